from contextlib import suppress

from hfpatch.runs.session import EVERY_S, SHARE, Throttled


def test_results_are_written_at_once_then_rarely_and_before_an_error_leaves():
    now, written = [0.0], []

    def write():
        now[0] += cost
        written.append(now[0])

    cost = 1.0
    with suppress(KeyboardInterrupt), Throttled(clock=lambda: now[0]) as throttled:
        throttled(write)
        assert written == [1.0]
        now[0] = EVERY_S
        throttled(write)
        assert len(written) == 1
        now[0] = 1.0 + EVERY_S
        cost = 100.0
        throttled(write)
        throttled(write)
        assert len(written) == 2
        now[0] = written[1] + 100.0 / SHARE - 1  # it may take a twentieth of the time
        throttled(write)
        assert len(written) == 2
        raise KeyboardInterrupt
    with suppress(KeyboardInterrupt), throttled:
        raise KeyboardInterrupt
    assert len(written) == 3
