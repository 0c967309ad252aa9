"""lm-eval's own files of an evaluation, for its viewers: ``results_<date>.json``, ``samples_<task>_<date>.jsonl``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker
from lm_eval.loggers.utils import add_tokenizer_info
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list, sanitize_model_name

from hfpatch.evaluation.selection import Selection, as_lm_eval, prompting
from hfpatch.results.parts import TaskResult
from hfpatch.support.files import write_text
from hfpatch.support.provenance import Clock, provenance

if TYPE_CHECKING:
    from hfpatch.evaluation.model import HfpatchLM

FOLDER = "lm_eval"
"""The part of an evaluation's folder for lm-eval's files, with a folder for each model as lm-eval calls it."""
_DEFAULT_SEEDS = (0, 1234, 1234, 1234)
_OF_TASKS = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


class SampleLog:
    """Writes the files of one model: those of each task as soon as it is scored, and the results at the end.

    Args:
        output: the folder of the evaluation.
        name: the model as lm-eval would call it: the id, or the folder of its adapter.
        arguments: lm-eval's ``model_args`` that would load it.
    """

    def __init__(self, output: Path, name: str, arguments: Mapping[str, Any]) -> None:
        self.folder = output / FOLDER / sanitize_model_name(name)
        self._name, self._arguments = name, dict(arguments)
        self._started, self._clock, self._tracker = time.time(), Clock(), GeneralConfigTracker()
        self._date = datetime.now().isoformat().replace(":", "-")
        self._parts: dict[str, dict[str, Any]] = {part: {} for part in _OF_TASKS}
        self._hashes: dict[str, str] = {}

    def add(self, task: str, output: Mapping[str, Any]) -> None:
        """Write the samples of a task from what lm-eval's ``evaluate`` returned."""
        samples, lines = output["samples"][task], []
        for sample in samples:  # arguments by name, responses and target as text, as lm-eval writes them
            arguments = {
                f"gen_args_{number}": {f"arg_{index}": value for index, value in enumerate(request)}
                for number, request in enumerate(sample["arguments"])
            }
            texts = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
            row = {**sample, **texts, "arguments": arguments, "target": str(sample["target"])}
            lines.append(json.dumps(row, default=handle_non_serializable, ensure_ascii=False) + "\n")
        write_text(self.folder / f"samples_{task}_{self._date}.jsonl", "".join(lines))
        for part in _OF_TASKS:
            self._parts[part] |= output[part]
        hashes = (sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples)
        self._hashes[task] = hash_string("".join(hashes))

    def close(self, scorer: HfpatchLM, selection: Selection, scores: Mapping[str, TaskResult]) -> None:
        """Write the results of all tasks, with the standard errors of ``scores``."""
        settings = selection.settings
        parts = {part: dict(values) for part, values in self._parts.items()}
        for task, score in scores.items():
            scores_of = parts["results"][task]
            errors = {key: value for key, value in as_lm_eval(score).items() if "_stderr," in key and key in scores_of}
            parts["results"][task] = {**scores_of, **errors}
        results_of = selection.group_results(scores)
        groups = {name: {"alias": name, "name": name, **as_lm_eval(result)} for name, result in results_of.items()}
        bare = {name: {"alias": group.alias or name, "name": name} for name, group in selection.groups.items()}
        parts["results"] |= {**bare, **groups}
        parts["versions"] |= {name: group.version for name, group in selection.groups.items()}
        seeds = settings.seed or _DEFAULT_SEEDS
        asked = settings.apply_chat_template
        template = scorer.chat_template(asked) if asked else None
        results: dict[str, Any] = {
            **parts,
            **({"groups": groups} if groups else {}),
            "group_subtasks": {name: group.child_names for name, group in selection.groups.items()},
            "config": {
                "model": "hfpatch",
                "model_args": self._arguments,
                "model_num_parameters": scorer.model.num_parameters(),
                "model_dtype": scorer.model.dtype,
                "model_revision": self._arguments.get("revision") or "main",
                "model_sha": "",
                "batch_size": settings.batch_size,
                "batch_sizes": [],
                "device": str(scorer.device),
                "use_cache": None,
                "limit": settings.limit,
                "bootstrap_iters": 0,
                "gen_kwargs": settings.gen_kwargs or None,
                **dict(zip(("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"), seeds, strict=True)),
            },
            "git_hash": (now := provenance(self._clock))["commit"],
            "date": self._started,
            "pretty_env_info": f"{now['platform']}, {now['processor']}, {now['device']}, Python {now['python']}",
            "transformers_version": transformers.__version__,
            "lm_eval_version": now["versions"].get("lm_eval"),
            "upper_git_hash": None,
        }
        add_tokenizer_info(results, scorer)
        as_turns, system = prompting(settings)["fewshot_as_multiturn"], settings.system_instruction
        self._tracker.log_experiment_args("hfpatch", {"model": self._name}, system, template, as_turns)
        self._tracker.log_end_time()
        results |= {"task_hashes": self._hashes, **asdict(self._tracker)}
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_text(self.folder / f"results_{self._date}.json", text)
