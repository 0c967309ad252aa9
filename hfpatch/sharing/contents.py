"""The files of a folder that go to the hub, and changes made to them."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import yaml
from huggingface_hub import constants

from hfpatch.errors import HfpatchError, nearest
from hfpatch.reporting.cards import run_card
from hfpatch.reporting.paths import VALUES, cut_paths, paths_in, without_paths
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.folder import load_results
from hfpatch.support.files import read_json
from hfpatch.surgery.card import shown_base
from hfpatch.surgery.manifest import MODELS_OF_RUN, PATCHES_OF_RUN, read_manifest
from hfpatch.surgery.part_files import PICKLE, read_tensors, require_whole

Contents = dict[str, Path | bytes]
"""Files for the hub: the path there -> the file, or its bytes."""

_REPORT = (
    *("recipe.yaml", "plan.json", "plan.safetensors", "questions.json", "results.json", "values.safetensors"),
    *("results.csv", "results.tex", "report.html", "report.md"),
)
_OF_TRAINER = re.compile(
    r"(.*/)?(training_args\.bin|trainer_state\.json|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth"
    r"|events\.out\.tfevents.*)|(checkpoint-|global_step)\d+/.*"
)
_MARKERS = ("patch.json", "adapter_config.json", "config.json")
_SCORES = ".eval_results"


def contents(
    folder: Path, *, method: str | None = None, seed: int | None = None, repo_id: str | None = None
) -> Contents:
    """Return the files of a folder that are shared.

    Of a run: recipe, plan, results, report, figures, training curves and patches, with a card; not the checkpoints,
    and not the per-document records, which hold text of the data sets. Of a patch or an export: everything but what
    Trainer puts beside it, to resume and to log. A link that leads out of the folder is left out, with a warning. Local
    paths in the report of a run and that of a patch's base are cut down to names. One method's patch has its scores
    beside it, as the hub reads them.

    Args:
        folder: a folder written by `compare`, `save_patch` or `export`.
        method: of a run, the one method whose patch is at the top level, ready to be loaded; None takes all patches.
        seed: the seed of that patch; None takes the first.
        repo_id: where it goes, which the scores name as their source; None leaves them out.

    Raises:
        HfpatchError: if the folder is none of these, a study or has no such patch, a patch or a model is damaged, or
            if a seed is given without a method.
    """
    is_model = any((folder / name).is_file() for name in _MARKERS)  # one from the hub may have the report of its run
    if not (folder / "results.json").is_file() or (is_model and not (folder / "runs").is_dir()):
        if method is not None or seed is not None:
            raise HfpatchError(f"{folder}: contains no run, so --method and --seed have no effect; leave them out")
        if is_model:
            base = [] if (folder / "config.json").is_file() else ["model.safetensors"]  # beside a patch, by Trainer
            return {name: file for name, file in _tree(folder, folder).items() if name not in base}
        raise HfpatchError(
            f"{folder}: contains no finished comparison, patch, export or model; give a folder with one (a run's are "
            f"{PATCHES_OF_RUN} and {MODELS_OF_RUN})"
        )

    # a run
    if seed is not None and method is None:
        raise HfpatchError(f"--seed {seed}: is the seed of one method's patch; name the method with --method")
    results = load_results(folder)
    if results.study is not None:
        raise HfpatchError(f"{folder}: holds a study, which has no patches; push a model of it, {MODELS_OF_RUN}")
    paths = paths_in(*(read(folder / name) for name, read in VALUES.items() if (folder / name).is_file()))
    report = {name: without_paths(folder / name, paths) for name in _REPORT if _is_own(folder / name, folder)}
    figures = {f"figures/{path.name}": path for path in sorted((folder / "figures").glob("*")) if _is_own(path, folder)}
    shared: Contents = {**report, **figures}
    if method is not None:
        if method not in results.methods:
            hint = f"{nearest(method, results.methods)}; it has {', '.join(results.methods)}"
            raise HfpatchError(f"{folder}: no method {method!r}{hint}")
        number, patch = _saved_patch(folder, method, seed)
        scores = eval_results(results, method, number, repo_id) if repo_id is not None else {}
        return {**shared, **_tree(patch, folder), **scores}
    for patch in sorted((folder / "runs").glob("*/seed-*/patch")):
        curve = patch.parent / "metrics.jsonl"
        files = {f"patch/{name}": file for name, file in _tree(patch, folder).items()}
        files |= {"metrics.jsonl": curve} if _is_own(curve, folder) else {}
        shared |= {f"{patch.parent.relative_to(folder).as_posix()}/{name}": file for name, file in files.items()}
    return {**shared, "README.md": cut_paths(run_card(results), paths).encode()}


def _saved_patch(folder: Path, method: str, seed: int | None) -> tuple[int, Path]:
    """Return the seed and the folder of a method's patch in a run; of the first seed where none is given."""
    saved = [path for path in (folder / "runs" / method).glob("seed-*/patch") if path.parent.name[5:].isdecimal()]
    patches = dict(sorted((int(path.parent.name[5:]), path) for path in saved))
    if not patches:
        raise HfpatchError(
            f"{folder}: {method} has no saved patch; the baseline has none, others once they are trained"
        )
    number = next(iter(patches)) if seed is None else seed
    if number not in patches:
        listed = ", ".join(f"seed-{saved_seed}" for saved_seed in patches)
        raise HfpatchError(f"{folder}: {method} has no patch of seed {seed}; it has {listed}")
    return number, patches[number]


def _is_own(path: Path, root: Path) -> bool:
    """Return whether a path is a file that is inside ``root``, also where it is a link.

    A link that leads out of it is an :class:`HfpatchError` if what is shared would be nothing without it.
    """
    if not path.is_file():
        return False
    inside = path.resolve().is_relative_to(root.resolve())
    if not inside and (path.suffix == ".safetensors" or path.name in ("results.json", *_MARKERS)):
        raise HfpatchError(f"{path}: leads out of {root}, as in the hub's cache; push a copy with the file itself")
    if not inside:
        warnings.warn(f"{path}: leads out of {root}, so it is left out; put a copy in its place", stacklevel=2)
    return inside


def _tree(folder: Path, root: Path) -> Contents:
    """Return every file below a folder but hidden ones, Trainer's and compiled code, which holds paths of this machine.

    Hidden scores in the hub's form are kept. Links that lead out of ``root``, the folder that is shared, are left out.
    A file that names the base by a path of this machine is changed to name its last part. A patch or a model that could
    not be loaded is an :class:`HfpatchError`.
    """
    files: Contents = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.suffix == ".pyc" or any(part.startswith(".") and part != _SCORES for part in relative.parts):
            continue
        if _OF_TRAINER.fullmatch(relative.as_posix()) or not _is_own(path, root):
            continue
        files[relative.as_posix()] = path
        if path.suffix == ".safetensors":
            require_whole(path)
        if path.name.endswith(".safetensors.index.json"):
            if not isinstance(shards := read_json(path).get("weight_map"), dict):
                raise HfpatchError(f"{path}: has no weight_map, which names the files of tensors; save the model again")
            for shard in {*map(str, shards.values())}:
                require_whole(path.parent / shard)
        if path.name in ("patch.json", "adapter_config.json"):
            value = read_json(path)
            base, key = value, "base_model_name_or_path"
            if path.name == "patch.json":
                for part in read_manifest(path).adapters:
                    read_tensors(path.parent / part.name, part.sha256)  # refuses another one
                base, key = value["base"], "name"
            elif not (path.parent / PICKLE).is_file():
                read_tensors(path.parent)  # refuses a folder without any
            if isinstance(name := base.get(key), str) and shown_base(name) != name:
                base[key] = shown_base(name)
                files[relative.as_posix()] = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    return files


def eval_results(results: ComparisonResults, method: str, seed: int, repo_id: str) -> dict[str, bytes]:
    """Return a patch's scores as the hub reads them, a file for each task on a data set of the hub, by path.

    The format: https://huggingface.co/docs/hub/eval-results.
    """
    from hfpatch.evaluation.tasks import hub_dataset  # lm-eval takes seconds to import

    include, date = results.evaluation.get("include_path"), results.provenance.get("started")
    version = results.provenance.get("versions", {}).get("lm_eval", "")
    files, run = {}, results.methods[method].runs.get(seed)  # None where only `train` was here
    for name, score in results.scores_of(run).items() if run is not None else ():
        dataset = hub_dataset(name, include_path=None if include is None else Path(include))
        if dataset is not None and math.isfinite(score.metrics.get(score.primary, math.nan)):
            part = " of a part of the set only" if _is_limited(results, score.task) else ""
            entry = {
                "dataset": {"id": dataset, "task_id": score.task},
                "value": score.metrics[score.primary],
                **({"date": date} if date else {}),
                "source": {"url": f"{constants.ENDPOINT}/{repo_id}/blob/main/report.md", "name": "hfpatch report"},
                "notes": f"{score.primary} of lm-eval {version}, task version {score.version}, "
                f"{score.num_fewshot}-shot, {score.n} documents{part}, seed {seed}",
            }
            files[f"{_SCORES}/{name}.yaml"] = yaml.safe_dump([entry], sort_keys=False, allow_unicode=True).encode()
    return files


def _is_limited(results: ComparisonResults, task: str) -> bool:
    """Return whether a limit holds for a task: that of all, its own, or one of a group that may have it."""
    tasks = results.evaluation.get("tasks")
    options = tasks if isinstance(tasks, dict) else {}
    limits = [options[task]] if task in options else options.values()
    return results.evaluation.get("limit") is not None or any((one or {}).get("limit") is not None for one in limits)
