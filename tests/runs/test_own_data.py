"""Comparisons on one's own data and bases, against the loss of each conversation by itself."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from draws import drawn
from tiny_runs import save_base
from torch.nn.functional import cross_entropy

import hfpatch.runs.setup
from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import load_recipe
from hfpatch.runs import compare, train
from hfpatch.runs.plan import plan_runs
from hfpatch.runs.session import open_runs
from hfpatch.runs.setup import set_up
from hfpatch.runs.train_eval import TrainEvalSession
from hfpatch.surgery.bases import hash_weights, load_base, place_base
from hfpatch.surgery.patch import patch_summary

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # noqa: E501
RECIPE = {
    "name": "own",
    "model": {"name": "$HFPATCH_HERE/model"},
    "data": {
        "mixture": [
            {"source": "$HFPATCH_HERE/chat/*.json", "format": "messages", "weight": 2},
            {"source": "$HFPATCH_HERE/text.csv", "split": "train[:50%]"},
        ],
        "chat_template": "$HFPATCH_HERE/t.jinja",
        "block_size": 64,
        "held_out": 6,
    },
    "training": {"epochs": 0.75, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2},
    "evaluation": {"tasks": ["tinyworld_cloze"], "limit": 8},
    "methods": {"baseline": [], "lora": [{"type": "lora", "r": 2, "target_modules": "attention"}]},
}


def conversation(number):
    lines = [f"where is {number}?", "at the mill", "why?", "b" * number]
    roles = ["user", "assistant"] * 2
    return [{"role": role, "content": line} for role, line in zip(roles, lines, strict=True)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    save_base(folder / "model", hidden_size=64, intermediate_size=128, max_position_embeddings=512)
    (folder / "chat").mkdir()
    for first in (0, 20):
        rows = [{"messages": conversation(number)} for number in range(first, first + 20)]
        (folder / "chat" / f"{first:02}.json").write_text(json.dumps(rows))
    (folder / "text.csv").write_text("text\n" + "".join(f'"one, {number}"\n' for number in range(60)))
    (folder / "t.jinja").write_text(TEMPLATE)
    (folder / "r.yaml").write_text(json.dumps(RECIPE))
    return folder


@pytest.fixture
def recipe(here, monkeypatch):
    monkeypatch.setenv("HFPATCH_HERE", str(here))
    return lambda *overrides: load_recipe(here / "r.yaml", overrides)


def losses_by_hand(base, texts, chats):
    """Sum and count of nats, a document at a time: of texts all tokens but the first, of chats the replies."""
    total, count = 0.0, 0
    encoded = [[*base.tokenizer(text)["input_ids"], base.tokenizer.eos_token_id] for text in texts]
    rows = [(ids, [True] * len(ids)) for ids in encoded]
    for chat in chats:
        ids, mask = [], []
        for message in chat:  # the end-of-text keeps messages apart, so each is tokenised alone
            header = f"{message['role']}: "
            text = header + message["content"]
            tokens = base.tokenizer(text)["input_ids"]
            ends = np.cumsum([len(base.tokenizer.decode([token])) for token in tokens])
            reply = message["role"] == "assistant"
            mask += [bool(reply and end > len(header)) for end in ends] + [reply]
            ids += [*tokens, base.tokenizer.eos_token_id]
        rows.append((ids[:64], mask[:64]))
    for ids, mask in rows:
        with torch.no_grad():
            logits = base.model(torch.tensor([ids])).logits[0, :-1]
        nats = cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")[torch.tensor(mask[1:])]
        total, count = total + float(nats.sum()), count + len(nats)
    return total, count


@pytest.mark.filterwarnings("ignore:.*are longer than data.block_size")
def test_a_mixture_of_conversations_and_texts_for_part_of_an_epoch(recipe, here, tmp_path):
    results = compare(recipe(), tmp_path / "out")
    data, base = results["data"], load_base(str(here / "model"))
    chats, texts = [conversation(number) for number in range(40)], [f"one, {number}" for number in range(30)]
    kept = drawn(texts, 2), drawn(chats, 4)  # six by weight
    total, count = losses_by_hand(base, *kept)
    assert data["held_out"]["predicted_tokens"] == count
    assert data["held_out"]["base_loss"] == pytest.approx(total / count, rel=1e-5)
    rest = ([item for item in items if item not in held] for items, held in zip((texts, chats), kept, strict=True))
    assert data["predicted_tokens"] == losses_by_hand(base, *rest)[1]
    assert [part["source"] for part in data["mixture"]] == [f"{here}/chat/*.json", f"{here}/text.csv"]
    assert results["plan"]["0"]["steps"] == results["training"]["steps"] == math.ceil(0.75 * data["blocks"] / 4)
    lines = (tmp_path / "out" / "runs" / "lora" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == results["plan"]["0"]["steps"]
    again = compare(recipe(), tmp_path / "out", resume=True)
    assert again["methods"] == results["methods"]
    with pytest.raises(HfpatchError, match=r"epochs is 0.75 there, not set here"):
        compare(recipe("training.steps=9"), tmp_path / "out", resume=True)
    with pytest.raises(HfpatchError, match=r"training.epochs is 0.75 of \d+ blocks: training.warmup_steps is 99"):
        compare(recipe("training.warmup_steps=99"), tmp_path / "other")
    assert not any(path.is_file() for path in (tmp_path / "other").rglob("*"))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["model.load_in_4bit=true", "model.bnb_4bit_use_double_quant=true"], Linear4bit),
        (["model.load_in_8bit=true", "model.attn_implementation=eager"], Linear8bitLt),
    ],
)
def test_a_quantised_base_is_trained_on_and_stays_as_it_is(recipe, tmp_path, overrides, kind):
    """Also where bitsandbytes would pack the weights otherwise, with other values, for a processor that likes that."""
    wanted = recipe(*overrides, "training.steps=2")
    base = load_base(wanted.model.name, **wanted.model.loading)
    assert sum(isinstance(module, kind) for module in base.model.modules()) == 2 * 4
    before = hash_weights(base.model)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        first = base.model(ids).logits
    assert torch.equal(first, base.model(ids).logits.detach())
    assert before == base.sha256 == hash_weights(base.model)
    assert patch_summary(base.model).base == patch_summary(load_base(wanted.model.name).model).base
    train(wanted, "lora", tmp_path / "out")
    shared = json.loads((tmp_path / "out" / "identity.json").read_text())
    assert shared["base_weights"] == before
    with pytest.raises(HfpatchError, match=r"model.load_in_.bit is true there, false here"):
        train(recipe("training.steps=2"), "lora", tmp_path / "out", resume=True)


def test_a_device_map_places_the_base(recipe, monkeypatch):
    wanted = recipe("model.device_map={'': cpu}")
    base = load_base(wanted.model.name, **wanted.model.loading)
    place_base(base, torch.device("meta"))
    assert {value.device.type for value in base.model.parameters()} == {"cpu"}
    for processes, why in ((2, "there are 2, each with a device"), (1, "is on cpu and this process trains on cuda:1")):
        state = SimpleNamespace(num_processes=processes, device=torch.device("cuda:1"))
        monkeypatch.setattr(hfpatch.runs.setup, "PartialState", lambda state=state: state)
        with pytest.raises(HfpatchError, match=why):
            set_up(wanted)


def test_without_bitsandbytes_it_is_one_clear_line(recipe, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    name = recipe().model.name
    with pytest.raises(HfpatchError, match=r"load_in_4bit needs bitsandbytes; pip install 'hfpatch\[quantized\]'"):
        load_base(name, load_in_4bit=True)


def test_a_run_has_one_recipe_whose_epochs_are_steps_and_the_folder_that_which_was_read(recipe, here, tmp_path):
    whole = recipe()
    assert whole.training.epochs == 0.75
    session = TrainEvalSession(plan_runs(whole, tmp_path / "out"))
    with open_runs(session.plan, session.set_up, resume=False):
        assert session.plan.recipe is session.setup.recipe
        training = session.plan.recipe.training
        steps = math.ceil(0.75 * len(session.setup.blocks) / 4)
        assert (training.epochs, training.steps, session.setup.plans[0].steps) == (None, steps, steps)
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == whole
