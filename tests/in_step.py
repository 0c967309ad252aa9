"""Two threads that run one model in step."""

import threading

from families import logits_of


def in_step(model, tokens):
    """Return the logits of two batches of tokens from two threads, both in the same module at any time.

    What the model's parameters require must be False: `logits_of` would change that while the other thread runs.
    """
    logits, meet = {}, threading.Barrier(2, timeout=120)

    def wait(*_):
        meet.wait()

    def call(index):
        try:
            logits[index] = logits_of(model, tokens[index])
        except threading.BrokenBarrierError:
            meet.abort()

    handles = [module.register_forward_hook(wait) for module in model.modules()]
    threads = [threading.Thread(target=call, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.remove()
    return [logits[index] for index in (0, 1)]
