import pytest
import yaml
from markdown_it import MarkdownIt
from reporting.conftest import HOSTILE

from hfpatch.surgery.bases import locate
from hfpatch.surgery.card import Measured, base_licence, export_card, front, hub_id, model_card, patch_card, shown_base
from hfpatch.surgery.manifest import Adapter, Base, Fingerprint

ADAPTERS = [Adapter(name="lora", method="lora", sha256="a" * 64)]


def base(name):
    fingerprint = Fingerprint(dtypes=["float32"], exact="f" * 32)
    return Base(**{"name": name, "class": "GPT2LMHeadModel"}, model_type="gpt2", fingerprint=fingerprint)


def header(card):
    return yaml.safe_load(card.split("---")[1])


def headings(card):
    tokens = MarkdownIt("commonmark").parse(card.split("---", 2)[2])
    return [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]


def test_the_header_names_the_base_where_others_can_find_it(tmp_path):
    assert header(patch_card(base("EleutherAI/pythia-160m"), ADAPTERS)) == {
        "library_name": "peft",
        "base_model": "EleutherAI/pythia-160m",
        "tags": ["hfpatch"],
    }
    card = patch_card(base(str(tmp_path / "my-base")), ADAPTERS)
    assert "base_model" not in header(card)
    assert str(tmp_path) not in card
    assert "my-base" in card


@pytest.mark.parametrize("stated", ["license: apache-2.0", "license: 'apache-2.0'", 'title: x\nlicense: "apache-2.0"'])
def test_the_licence_is_the_one_that_the_base_states(tmp_path, stated):
    (tmp_path / "README.md").write_text(f"---\n{stated}\n---\n# A base\nlicense: none\n")
    assert base_licence(str(tmp_path)) == "apache-2.0"
    card = patch_card(base(str(tmp_path)), ADAPTERS)
    assert header(card)["license"] == "apache-2.0"
    assert "The base is under apache-2.0" in card


@pytest.mark.parametrize("text", ["", "license: mit", "---\ntitle: x\n---\nlicense: mit"])
def test_a_licence_that_is_not_stated_is_not_made_up(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    assert base_licence(str(tmp_path)) is None
    assert "license" not in header(patch_card(base(str(tmp_path)), ADAPTERS))


def test_a_base_of_the_hub_has_its_licence_from_the_cache(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text("---\nlicense: mit\n---\n")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: str(readme))
    assert base_licence("someone/model") == "mit"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: None)
    assert base_licence("someone/model") is None


def test_a_base_without_a_name_has_no_licence_and_tinyworld_is_known_by_name(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")  # of something else than the base
    monkeypatch.chdir(tmp_path)
    assert base_licence("") is None
    assert shown_base(locate("tinyworld/gpt2")[0]) == "tinyworld/gpt2"
    assert shown_base("/elsewhere/hfpatch/tinyworld/checkpoints/gpt2") == "tinyworld/gpt2"
    assert shown_base("EleutherAI/pythia-160m") == "EleutherAI/pythia-160m"
    assert hub_id("tinyworld/gpt2") is None


def test_hostile_names_stay_text():
    measured = Measured(HOSTILE, [(HOSTILE, HOSTILE)], [], [HOSTILE], [[HOSTILE]], [HOSTILE])
    card = patch_card(base(HOSTILE), ADAPTERS, measured)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(card.split("---", 2)[2])
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or []}
    assert not kinds & {"html_block", "html_inline", "link_open", "image"}
    assert headings(card)[1:] == ["Base", "Method", "Data", "Results", "How to load it", "Licence"]


VALUES = ["no", "on", "null", "1.0", "1e5", "2020-01-01", "2020-01-01T00:00:00Z", "a: b", "x\n---\ny", '"', "- a"]


@pytest.mark.parametrize("value", VALUES)
def test_the_header_gives_back_what_it_was_given(value):
    assert yaml.safe_load(front({"key": value}).removeprefix("---").removesuffix("---")) == {"key": value}


def test_the_card_of_an_export_says_how_to_load_it_and_under_which_licences():
    card = export_card("a/b", "HfpatchX", "apache-2.0")
    assert header(card)["license"] == "apache-2.0"
    for text in ("trust_remote_code=True", "MIT licence", "apache-2.0", "modeling_hfpatch.py"):
        assert text in card


def test_the_card_of_a_trained_model_says_when_its_code_is_needed():
    card = model_card("GPT2LMHeadModel", [("Text", HOSTILE)], code="code.py")
    assert header(card) == {"library_name": "transformers", "tags": ["hfpatch"]}
    assert headings(card) == ["GPT2LMHeadModel", "Training", "How to load it", "Licence"]
    assert "trust_remote_code=True" in card
    assert "`code.py` is under the MIT licence" in card
    assert "trust_remote_code" not in model_card("GPT2LMHeadModel", [], code=None)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("BartForConditionalGeneration", "BartForConditionalGeneration"),
        ("HfpatchGPT2LMHeadModel", "AutoModelForCausalLM"),  # of an export
    ],
)
def test_a_card_loads_the_base_by_the_class_it_is_of(kind, shown):
    made_for = base("org/base").model_copy(update={"class_name": kind})
    assert f"    model = {shown}.from_pretrained('org/base')" in patch_card(made_for, [])
    assert f"    from transformers import {shown}" in patch_card(made_for, [])
