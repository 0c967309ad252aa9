"""Build what comes with the package: the tasks' items, the tokenizer and the two checkpoints.

PYTHONPATH=tests python -m tinyworld.build             everything
PYTHONPATH=tests python -m tinyworld.build gpt2        the items and one checkpoint

Text, initialisation and batches follow from the seeds in the recipes, and the weights from those up to the machine's
rounding. The manifest records how long each checkpoint took.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from hfpatch import tinyworld
from hfpatch.data.load import load_blocks
from hfpatch.data.plan import draw_plan
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.recipes.pretraining import load_pretraining
from hfpatch.support.files import atomic_directory, read_json, sha256_file, write_json, write_text
from hfpatch.support.folders import recipes_dir
from hfpatch.tinyworld.language import document, documents, draw_story
from hfpatch.tinyworld.story import Event, Story, ask
from hfpatch.tinyworld.tasks import CHECKPOINTS, ITEMS, TASKS, Item, checkpoint
from hfpatch.tinyworld.world import NAMES, OBJECTS, PLACES
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import pretrain
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run

VOCABULARY_SIZE = 512
_TOKENIZER_DOCUMENTS = 2000
EXAMPLES = 16
_FOLDER = Path(tinyworld.__file__).parent
_MANIFEST = _FOLDER / "manifest.json"
_WORDS = {"person": NAMES, "friend": NAMES, "place": PLACES, "object": OBJECTS}


def manifest() -> dict[str, Any]:
    """Read the manifest: facts of each checkpoint, and the SHA-256 of every built file."""
    return dict(read_json(_MANIFEST))


def built_files() -> dict[str, str]:
    """Return the SHA-256 of every built file that is there now, by its path inside the package."""
    files = sorted(path for name in ("checkpoints", "items") for path in (_FOLDER / name).rglob("*") if path.is_file())
    return {path.relative_to(_FOLDER).as_posix(): sha256_file(path) for path in files}


def build_checkpoint(name: str) -> dict[str, Any]:
    """Pretrain a checkpoint by its recipe and put it in its place; return what the manifest says about it."""
    recipe = load_pretraining(recipes_dir() / f"tinyworld-{name}.yaml")
    training, (seed,) = recipe.training, recipe.training.all_seeds
    texts = [text for split in ("base", "shifted") for text in documents(split, count=_TOKENIZER_DOCUMENTS)]
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)  # on both splits, so that it splits the words of neither
    tokenizer.model_max_length = recipe.data.block_size
    model = build_model(recipe.architecture, tokenizer=tokenizer, seed=seed)
    blocks = load_blocks(recipe.data, tokenizer)
    plan = draw_plan(blocks=len(blocks), steps=training.steps, batch_size=training.batch_size, seed=seed)

    def print_step(record: StepRecord) -> None:
        if record.step % 50 == 0:
            print(f"step {record.step}  loss {record.loss:.4f}  {record.seconds:.2f} s a step", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        result = pretrain(model, Run(training, blocks, plan, seed, run_dir, on_step=print_step), tokenizer=tokenizer)
        with atomic_directory(checkpoint(name)) as temporary:
            shutil.copytree(run_dir / "model", temporary, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return {
        "seed": seed,
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
    for task in TASKS:
        write_text(_FOLDER / "items" / f"{task}.jsonl", "".join(json.dumps(item) + "\n" for item in draw_items(task)))
    for name in names:
        built = build_checkpoint(name)
        others = manifest()["checkpoints"] if _MANIFEST.exists() else {}
        write_json(_MANIFEST, {"checkpoints": {**others, name: built}, "files": built_files()})


def draw_items(task: str) -> list[Item]:
    """Draw a task's items and examples; those in the package were drawn by this."""
    draw = {"cloze": _cloze, "endings": _endings, "questions": _questions, "text": _text}[task]
    stream: Iterator[Item] = (item for index in count() for item in draw(TASKS.index(task), index))
    return list(islice(stream, ITEMS + EXAMPLES))


def _text(seed: int, index: int) -> list[Item]:
    return [{"text": document("shifted", "eval", seed, index)}]


def _cloze(seed: int, index: int) -> list[Item]:
    """A story cut off before a last word that the story decides."""
    story, rng = draw_story("shifted", "eval", seed, index)
    open_ends = [k for k, event in enumerate(story.events) if _last_slot(event) in event.decided]
    if not open_ends:
        return []
    chosen = rng.choice(open_ends)
    event = story.events[chosen]
    text = f"{_before(story, chosen)} {event.outcome()}".removesuffix(".")
    return [{"text": text, "kind": f"{event.kind}/{_last_slot(event)}"}]


def _endings(seed: int, index: int) -> list[Item]:
    """A story cut off before an outcome that it decides, the outcome, and three that contradict it."""
    story, rng = draw_story("shifted", "eval", seed, index)
    cut = [(k, wrong) for k, event in enumerate(story.events) if (wrong := _wrong_outcomes(story, k, event, rng))]
    if not cut:
        return []
    chosen, wrong = rng.choice(cut)
    event = story.events[chosen]
    endings, label = _shuffled(rng, event.outcome(), wrong)
    return [{"ctx": _before(story, chosen), "endings": endings, "label": label, "kind": event.kind}]


def _questions(seed: int, index: int) -> list[Item]:
    """A story, a question about it, and four answers in the same form."""
    story, rng = draw_story("shifted", "eval", seed, index)
    question = rng.choice(ask(story))
    wrong = _others(question.answer, _WORDS[question.kind], story.text(), rng, mentioned_only=False)[:3]
    texts, label = _shuffled(rng, question.reply(), [question.reply(word) for word in wrong])
    choices = {"text": texts, "label": list("ABCD")}
    item = {"passage": story.text(), "question": question.text, "choices": choices, "answerKey": "ABCD"[label]}
    return [{**item, "kind": " ".join(question.text.split()[:2]).lower()}]


def _before(story: Story, chosen: int) -> str:
    """Return the story up to the outcome of an event, its lead included."""
    parts = [story.opening, *(event.text() for event in story.events[:chosen]), story.events[chosen].lead]
    return " ".join(part for part in parts if part)


def _last_slot(event: Event) -> str | None:
    match = re.search(r"\{(\w+)\}\.$", event.template)
    return match[1] if match else None


def _wrong_outcomes(story: Story, chosen: int, event: Event, rng: Random) -> list[str]:
    """Return three outcomes that contradict the story, or none where the story names too few words to build them.

    One decided slot takes three other words; two decided slots take one other word each, alone and together, so that
    no word is more frequent in the right ending than in the wrong ones.
    """
    text = f"{_before(story, chosen)} {event.outcome()}"
    wrong = {slot: _wrong_words(event, slot, text, rng) for slot in event.decided}
    needed = 3 if len(wrong) == 1 else 1
    if not wrong or any(len(words) < needed for words in wrong.values()):
        return []
    if len(wrong) == 1:
        ((slot, words),) = wrong.items()
        return [event.outcome(**{slot: word}) for word in words[:3]]
    (first, (a, *_)), (second, (b, *_)) = wrong.items()
    return [event.outcome(**changed) for changed in ({first: a}, {second: b}, {first: a, second: b})]


def _wrong_words(event: Event, slot: str, text: str, rng: Random) -> list[str]:
    """Return wrong words for a decided slot that the text names; those on offer, where there was an offer."""
    words = event.offered if event.offered and slot == "object" else _WORDS[slot]
    return [word for word in _others(event.slots[slot], words, text, rng) if word != event.slots.get("person")]


def _others(right: str, words: tuple[str, ...], text: str, rng: Random, *, mentioned_only: bool = True) -> list[str]:
    """Return words other than the right one in random order, those that the text names first."""
    named = set(re.findall(r"\w+", text))
    others = [word for word in words if word != right]
    rng.shuffle(others)
    mentioned = [word for word in others if word in named]
    return mentioned if mentioned_only else mentioned + [word for word in others if word not in named]


def _shuffled(rng: Random, right: str, wrong: list[str]) -> tuple[list[str], int]:
    """Return all four in random order, and where the right one is."""
    texts = [right, *wrong]
    rng.shuffle(texts)
    return texts, texts.index(right)


if __name__ == "__main__":
    main()
