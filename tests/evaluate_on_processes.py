"""A program for several processes: evaluates and compares tiny models, once for each scenario, and saves what came.

    accelerate launch ... evaluate_on_processes.py ROOT '{"name": {"kind": "evaluate", ...}, ...}'

Kinds are those of `KINDS`. ``command`` runs the command line, in which with ``kill: N`` the last process ends itself by
SIGKILL before its N-th batch.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hfpatch import load_patch, unpatch
from hfpatch.__main__ import main
from hfpatch.evaluation.scorer import Scorer
from hfpatch.recipes.base import ModelSettings
from hfpatch.recipes.comparison import Recipe
from hfpatch.recipes.evaluation import EvaluationSettings
from hfpatch.runs import compare, evaluate
from hfpatch.support import ranks
from hfpatch.surgery.bases import hash_weights
from hfpatch.surgery.placement import tensor_parallel_plan
from hfpatch.training.processes import start_processes, start_ranks


def evaluate_patches(out: Path, *, model: str, patches: list[str], settings: dict) -> None:
    given = {"settings": EvaluationSettings(**settings), "output": out, "baseline": True}
    evaluate(ModelSettings(name=model), patches=list(map(Path, patches)), **given)


def evaluate_several(out: Path, *, models: list[str], settings: dict) -> None:
    evaluate(*[ModelSettings(name=name) for name in models], settings=EvaluationSettings(**settings), output=out)


def run_comparison(out: Path, *, recipe: dict) -> None:
    compare(Recipe.model_validate(recipe), out, resume=out.exists())


@torch.no_grad()
def in_pieces(out: Path, *, model: str, patches: list[str], tokens: list[list[int]]) -> None:
    """Save the logits of the model in tensor parallelism, bare and with each patch, and how it was cut."""
    start = start_ranks(split=True)
    config = AutoModelForCausalLM.from_pretrained(model).config
    loaded = AutoModelForCausalLM.from_pretrained(
        model, distributed_config=tensor_parallel_plan(config, start.count)
    ).eval()
    cut = [name for name, value in loaded.named_parameters() if hasattr(value, "to_local")]
    facts = {"cut": cut, "sha256": hash_weights(loaded), "logits": [loaded(torch.tensor(tokens)).logits.tolist()]}
    for patch in patches:
        load_patch(loaded, Path(patch))
        facts["logits"].append(loaded(torch.tensor(tokens)).logits.tolist())
        unpatch(loaded)
    write(out, facts)


def loads(out: Path) -> None:
    """Save how many tokens each process was given in all scenarios so far."""
    write(out, {"loads": start_ranks().loads})


def command(out: Path, *, arguments: list[str], kill: int | None = None) -> None:
    state = start_processes()
    if kill is not None and state.process_index == state.num_processes - 1:
        kill_before(kill)
    code = main(arguments)
    write(out, {"code": code})
    state.wait_for_everyone()
    if state.is_main_process:
        torch.distributed.distributed_c10d._get_default_store().delete_key(ranks._SAID)
    state.wait_for_everyone()


def kill_before(batch: int) -> None:
    features, count = Scorer._features, 0

    def counted(self, *args):
        nonlocal count
        count += 1
        if count == batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return features(self, *args)

    Scorer._features = counted


def write(out: Path, facts: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(facts))


KINDS = {
    "evaluate": evaluate_patches,
    "models": evaluate_several,
    "compare": run_comparison,
    "pieces": in_pieces,
    "loads": loads,
    "command": command,
}


def run(out: Path, scenario: dict) -> None:
    """Run one scenario in ``out``."""
    chosen = dict(scenario)
    KINDS[chosen.pop("kind")](out, **chosen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, scenario in json.loads(sys.argv[2]).items():
        run(Path(sys.argv[1]) / name, scenario)
