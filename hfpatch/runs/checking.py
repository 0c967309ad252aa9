"""`check`: the promises of one model, with one method or with every kind of method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hfpatch.errors import HfpatchError
from hfpatch.promises import CheckReport
from hfpatch.promises import check as run_promises
from hfpatch.recipes.base import ModelSettings
from hfpatch.runs.progress import Progress
from hfpatch.surgery.bases import load_config
from hfpatch.surgery.methods import Part, build_method, validate_methods
from hfpatch.surgery.model_class import load_model, own_class
from hfpatch.twins import twin

EVERY_KIND: list[Part] = [{"type": "pre_projection", "content_skip": True}, {"type": "nonlinear_query"}]


def check(
    model: ModelSettings, part: Part | None = None, *, config_only: bool = False, progress: Progress | None = None
) -> tuple[list[CheckReport], dict[str, str]]:
    """Run the promises on a model.

    Args:
        model: the model.
        part: a method's part, as a recipe writes it; None runs pre-projection with content skip and the nonlinear
            query, and reports which of them the architecture refuses.
        config_only: run them on a tiny random twin of the model's configuration, without its weights.
        progress: shown each promise before it is tested.

    Returns:
        A report for each method that was injected, and the reason for each method that was refused.

    Raises:
        HfpatchError: if the model cannot be loaded, or no method can be injected into it.
    """
    parts = EVERY_KIND if part is None else [part]
    progress = progress or Progress()
    for tried in parts:
        try:
            validate_methods({"checked": [tried]})
        except HfpatchError as error:  # there is no recipe whose key the message could name
            raise HfpatchError(str(error).removeprefix("methods.checked[0]").lstrip(".: ")) from error
    if config_only:
        config = load_config(model.full_name, revision=model.revision, trust_remote_code=model.trust_remote_code)
        if hasattr(config, "hfpatch"):
            raise HfpatchError(f"{model.name}: is an export, whose parts have their sizes; leave --config-only out")
        name, loaded = f"a tiny random twin of {model.full_name}", twin(config, own_class(config))
    else:
        name, loaded = model.full_name, load_model(model.name, **model.loading)

    def show(method: str, promise: str, done: int, total: int) -> None:
        progress.evaluating(method, promise)
        progress.scored(method, promise, done, total)

    reports: list[CheckReport] = []
    refused: dict[str, str] = {}
    for tried in parts:
        try:
            method = build_method(loaded, {"checked": [tried]}, "checked")
            report = run_promises(loaded, method.configs[0], watch=partial(show, str(tried["type"])))
            reports.append(replace(report, model=name))
            progress.finished(str(tried["type"]), "" if report.passed else "broken promises")
        except HfpatchError as error:
            if part is not None:
                raise
            refused[str(tried["type"])] = str(error)
    if not reports:
        raise HfpatchError(next(iter(refused.values())))
    return reports, refused
