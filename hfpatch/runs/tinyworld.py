"""Build what comes with the package: the tasks' items, the tokenizer and the two checkpoints.

python -m hfpatch.runs.tinyworld                  everything
python -m hfpatch.runs.tinyworld gpt2             the items and one checkpoint

Text, initialisation and batches follow from the seeds in the recipes, and the weights from those up to the machine's
rounding. The manifest records how long each checkpoint took.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from hfpatch.data.load import load_blocks
from hfpatch.data.plan import draw_plan
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.recipes.pretraining import load_pretrain_recipe
from hfpatch.support.files import atomic_directory, write_json, write_text
from hfpatch.support.resources import recipes_dir
from hfpatch.tinyworld.checkpoints import CHECKPOINTS, MANIFEST, built_files, checkpoint, manifest
from hfpatch.tinyworld.language import documents
from hfpatch.tinyworld.tasks import TASKS, draw_items, items_file
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import pretrain
from hfpatch.training.records import StepRecord

VOCABULARY_SIZE = 512
_TOKENIZER_DOCUMENTS = 2000


def build_items() -> None:
    """Draw the items of every task and write them."""
    for task in TASKS:
        write_text(items_file(task), "".join(json.dumps(item) + "\n" for item in draw_items(task)))


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on both splits, so that it splits the words of neither.

    Args:
        context: the model's context in tokens, kept as ``model_max_length``.
    """
    texts = [text for split in ("base", "shifted") for text in documents(split, count=_TOKENIZER_DOCUMENTS)]
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    tokenizer.model_max_length = context
    return tokenizer


def build_checkpoint(name: str) -> dict[str, Any]:
    """Pretrain a checkpoint by its recipe and put it in its place; return what the manifest says about it."""
    recipe = load_pretrain_recipe(recipes_dir() / f"tinyworld-{name}.yaml")
    tokenizer = build_tokenizer(recipe.data.block_size)
    model = build_model(recipe.architecture, tokenizer=tokenizer, seed=recipe.seed)
    blocks = load_blocks(recipe.data, tokenizer)
    training = recipe.training
    plan = draw_plan(blocks=len(blocks), steps=training.steps, batch_size=training.batch_size, seed=recipe.seed)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        result = pretrain(
            model,
            settings=training,
            blocks=blocks,
            plan=plan,
            tokenizer=tokenizer,
            seed=recipe.seed,
            run_dir=run_dir,
            on_step=_print_step,
        )
        with atomic_directory(checkpoint(name)) as temporary:
            shutil.copytree(run_dir / "model", temporary, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return {
        "seed": recipe.seed,
        "parameters": model.num_parameters(),
        "steps": result.steps,
        "tokens": result.tokens,
        "final_loss": round(result.final_loss, 4),
        "seconds": round(result.wall_s),
    }


def main() -> None:
    """Build the checkpoints named on the command line, or all, and write the manifest."""
    parser = argparse.ArgumentParser(description="Build the embedded language's items and checkpoints.")
    parser.add_argument("names", nargs="*", choices=[*CHECKPOINTS, []], help="checkpoints; none means all")
    names = parser.parse_args().names or CHECKPOINTS
    build_items()
    for name in names:
        built = build_checkpoint(name)
        others = manifest()["checkpoints"] if MANIFEST.exists() else {}
        write_json(MANIFEST, {"checkpoints": {**others, name: built}, "files": built_files()})


def _print_step(record: StepRecord) -> None:
    if record.step % 50 == 0:
        print(f"step {record.step}  loss {record.loss:.4f}  {record.seconds:.2f} s a step", flush=True)


if __name__ == "__main__":
    main()
