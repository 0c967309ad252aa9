import os
import signal
import threading

from hfpatch.support.signals import sigterm_answered_by, sigterm_kept


def test_a_handler_answers_for_as_long_as_it_is_asked_to():
    handlers, before = [], signal.getsignal(signal.SIGTERM)
    with sigterm_answered_by(lambda *_: handlers.append("inner")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert handlers == ["inner"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_the_handler_stays():
    handlers, before = [], signal.getsignal(signal.SIGTERM)

    def enter():
        with sigterm_answered_by(lambda *_: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_what_a_library_sets_does_not_stay():
    before = signal.getsignal(signal.SIGTERM)
    with sigterm_kept():
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert signal.getsignal(signal.SIGTERM) is before
