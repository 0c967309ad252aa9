"""Few-shot examples: no document is shown itself, with its answer, before it is asked.

lm-eval leaves a document out of its own examples only where ``fewshot_split`` is the task's ``test_split``. Where a
task names no split for examples and has none for training, lm-eval draws them from all scored documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval.api.task import ConfigurableTask

from hfpatch.errors import HfpatchError, first_line
from hfpatch.results.parts import FewShot
from hfpatch.support.modes import replaced


@contextmanager
def others_as_examples(name: str, task: Any, cluster: str | None = None) -> Iterator[Callable[[], FewShot | None]]:
    """Leave each document out of its own few-shot examples inside the ``with`` block.

    Left out is also one that only differs in fields that no prompt has, such as a number. Examples are drawn as lm-eval
    does, and where they are drawn from the scored documents as it does if ``fewshot_split`` names their split.

    Examples of a document's group, by the column ``cluster``, are counted.

    Yields:
        A function that returns what is to be said of the examples so far, if anything.
    """
    left_out, related = False, 0

    def few_shot() -> FewShot | None:
        return FewShot(own_left_out=left_out, related=related) if left_out or related else None

    if not isinstance(task, ConfigurableTask) or not hasattr(task, "sampler"):  # tasks of old draw no own document
        yield few_shot
        return
    draw, context, from_scored = task.sampler.sample, task.fewshot_context, _from_scored(task)
    asked: Any = None
    as_read: Any = None

    def read(document: Any) -> Any:
        choices = None if task.config.doc_to_choice is None else task.doc_to_choice(document)
        return task.doc_to_text(document), choices, task.doc_to_target(document)

    def fewshot_context(doc: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal asked, as_read
        asked, as_read = doc, read(doc)
        return context(doc, *arguments, **options)

    def sample(n: int, eval_doc: Any = None, **options: Any) -> Sequence[Any]:
        nonlocal left_out, related
        more = 0
        try:
            drawn: Sequence[Any] = draw(n=n, eval_doc=asked if from_scored else eval_doc, **options)
            while len(others := [other for other in drawn if other != asked and read(other) != as_read]) < n:
                more += n - len(others)  # in a split with another name, or again in the same one
                is_all = n + more == len(task.sampler.df)  # of which lm-eval would draw one more, to leave out
                drawn = draw(n=n + more, eval_doc=None if is_all else asked, **options)
        except (ValueError, AssertionError) as error:
            raise HfpatchError(
                f"task {name}: {n} few-shot examples cannot be chosen ({first_line(error)}); lower num_fewshot"
            ) from error
        left_out |= more > 0 or (from_scored and eval_doc is None)
        group = None if cluster is None else asked.get(cluster)
        related += group is not None and any(example.get(cluster) == group for example in others[:n])
        return others[:n]

    with replaced(task, fewshot_context=fewshot_context), replaced(task.sampler, sample=sample):
        yield few_shot


def _from_scored(task: ConfigurableTask) -> bool:
    """Return whether lm-eval draws a task's examples from the split that it scores."""
    config, few = task.config, task.fewshot_cfg
    splits = (config.training_split, config.validation_split, config.test_split)
    default = next((split for split in splits if split is not None), None) if few.samples is None else None
    scored = config.test_split if config.test_split is not None else config.validation_split
    return bool((few.split if few.split is not None else default) == scored)
