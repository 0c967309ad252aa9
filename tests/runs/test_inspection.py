"""`inspect`: everything that the analyses tell, as tables, JSON and a page."""

import html.parser
import json
import re
import shutil

import pytest
import torch

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, patch, save_patch
from hfpatch.__main__ import main
from hfpatch.analysis.norms import skip_norms
from hfpatch.recipes.comparison import ModelSettings
from hfpatch.runs import inspect
from hfpatch.runs.inspection_page import inspection_page
from hfpatch.runs.inspection_tables import inspection_tables
from hfpatch.surgery.bases import load_base
from hfpatch.tinyworld import checkpoint
from hfpatch.training.architecture import build_model

MODEL = ModelSettings(name="tinyworld/gpt-neox")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run: a patch that moved, what the training recorded, and a name that is no name."""
    folder = tmp_path_factory.mktemp("run") / "<script>alert(1)" / "seed-0"
    base = load_base(MODEL.name)
    patch(base.model, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig()], seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in base.model.named_parameters():
        if parameter.requires_grad and "up" not in name.split(".")[-3]:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    save_patch(base.model, folder / "patch")
    (folder / "training.json").write_text('{"steps": 5, "update_survival": {"preproj_down": 0.5, "all": 0.75}}')
    return folder


@pytest.fixture(scope="module")
def found(run):
    return inspect(MODEL, run / "patch", reparametrisation=True)


def test_every_analysis_is_made(found):
    told = found.to_json()
    layers = [0, 1, 2, 3]
    for name in ("skip_norms", "skip_sizes", "pre_projection_sizes", "query_sizes", "linearised", "reparametrisation"):
        assert [each["layer"] for each in told[name]] == layers, name
    assert [each["layer"] for each in told["sites"]] == layers
    assert len(told["relations"]) == len(told["relations_patched"]) == 16
    assert [each["layer"] for each in told["ablations"]["without"]] == [*layers, None]
    assert told["gauge"] < 1e-8
    assert told["parameters"]["added"] == found.summary.added > 0
    assert told["text"]["tokens"] >= 2048
    assert told["run"]["steps"] == 5
    assert told["notes"] == []
    kinds = {each["tensor"] for each in told["movement"]}
    assert len(told["movement"]) == len(told["gradients"]) == 4 * len(kinds)
    unmoved = {each["tensor"].split(".")[-3]: each["unmoved"] == each["weights"] for each in told["movement"]}
    assert unmoved["preproj_up"]
    assert not unmoved["preproj_down"]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_the_numbers_are_those_of_the_analyses(found, run):
    from hfpatch.surgery.folder import load_patch

    model = load_patch(load_base(MODEL.name).model, run / "patch")
    assert found.skip_norms == skip_norms(model)
    cells = {table.title: table.rows for table in inspection_tables(found)}
    assert cells["What the patch adds"][2][2] == f"{found.skip_norms[2].norm:.3g}"
    kept = {row[0]: row[-1] for row in cells["Training"]}
    assert (kept["preproj_down"], kept["preproj_up"]) == ("50.0%", "–")
    assert cells["One layer's injection taken out"][-1][0] == "all"
    shares = [each.here.symmetric for each in found.relations if each.layer == 1]
    expected = f"{sum(shares) / 4:.2f} [{min(shares):.2f}, {max(shares):.2f}]"
    assert cells["Q-K relation"][1][2] == expected


class Page(html.parser.HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        self.links += [values[name] for name in ("href", "src", "xlink:href") if name in values]


def test_the_page_stands_alone_and_escapes_what_it_shows(found):
    text = inspection_page(found)
    page = Page(text)
    assert "script" not in page.tags
    assert "&lt;script&gt;" in text
    assert page.tags.count("svg") == 7
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("data:application/json;base64,", "#")) for link in page.links)
    assert "url(http" not in text
    assert page.tags.count("h1") == 1
    assert inspection_page(found) == text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_on_a_phone_without_a_request_or_an_error(found, tmp_path, scheme):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the path")
    (path := tmp_path / "page.html").write_text(inspection_page(found), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme=scheme)
        noise = []
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: None if request.is_navigation_request() else noise.append(request.url))
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        with page.expect_download() as downloading:
            page.get_by_text("All numbers as JSON").click()
        assert json.loads(downloading.value.path().read_text()) == found.to_json()
        browser.close()
    assert noise == []


def test_figures_draw_what_was_found(found):
    from hfpatch.runs.inspection_figures import DRAWINGS

    figures = {drawing.name: drawing.draw(found) for drawing in DRAWINGS}
    drawn = {name: [ax.lines[0].get_ydata().tolist() for ax in figure.axes if ax.lines] for name, figure in figures.items()}  # noqa: E501  # fmt: skip
    assert drawn["skips"] == [[each.norm for each in found.skip_norms], [each.size for each in found.skip_sizes]]
    assert drawn["pre-projections"] == [[each.size for each in found.pre_projection_sizes]]
    assert drawn["queries"][:2] == [[each.size for each in found.query_sizes], [each.cosine for each in found.query_sizes]]  # noqa: E501  # fmt: skip
    changes = figures["ablations"].axes[0].lines[0].get_xdata().tolist()
    assert changes == [each.change for each in found.ablations.without]
    grid = figures["relation"].axes[0].collections[0].get_array()
    expected = [[each.here.symmetric for each in found.relations if each.layer == layer] for layer in range(4)]
    assert grid.tolist() == expected


def test_a_base_alone_shows_its_relation_and_says_nothing_of_patches():
    found = inspect(MODEL, None)
    assert len(found.relations) == 16
    assert [table.title for table in inspection_tables(found)] == [
        "Attention branches", "Q-K relation", "Q-K relation by relative offset",
    ]  # fmt: skip
    assert Page(inspection_page(found)).tags.count("svg") == 2


def test_a_model_from_scratch_shows_its_own_f(tmp_path):
    tokenizer = load_base(MODEL.name).tokenizer
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    for path in ("nonlinear", "identity"):
        architecture = {**shape, "num_attention_heads": 2, "query": {"path": path}}
        build_model(architecture, tokenizer=tokenizer).save_pretrained(tmp_path / path)
        tokenizer.save_pretrained(tmp_path / path)
    (text := tmp_path / "stories.txt").write_text("One day.\n<|endoftext|>\nAnother day, another walk.\n" * 40)
    found = inspect(ModelSettings(name=str(tmp_path / "nonlinear")), None, text=str(text), tokens=60)
    assert [(each.layer, each.adapter, each.target) for each in found.query_sizes] == [
        (0, "own", "query"), (1, "own", "query"),
    ]  # fmt: skip
    assert all(len(each.head_sizes) == 2 and each.size > 0 for each in found.query_sizes)
    assert any("counts as 0" in note for note in found.notes)
    (table,) = [table for table in inspection_tables(found) if table.title == "What f adds to its anchor"]
    assert table.rows[1][5] == f"{found.query_sizes[1].size:.3g}"
    assert Page(inspection_page(found)).tags.count("svg") == 3
    untold = inspect(ModelSettings(name=str(tmp_path / "nonlinear")), None)
    assert untold.query_sizes == []
    assert any("give text with --text" in note for note in untold.notes)
    assert inspect(ModelSettings(name=str(tmp_path / "identity")), None).notes == []


def test_without_text_what_needs_it_is_noted(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(checkpoint("gpt-neox"), model)
    found = inspect(ModelSettings(name=str(model)), run / "patch")
    assert found.text is None
    assert found.skip_norms
    assert found.ablations is None
    assert any("--text" in note for note in found.notes)
    assert any("not shown for 4 layers whose query is not linear" in note for note in found.notes)
    assert Page(inspection_page(found)).tags.count("svg") == 3


def test_the_command_prints_tables_json_and_a_page(capsys, tmp_path, run):
    arguments = ["inspect", "tinyworld/gpt-neox", "--patch", str(run / "patch")]
    page = tmp_path / "page.html"
    assert main([*arguments, "--json", "--html", "--out", str(page)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["patch"] == str(run / "patch")
    assert f"page: {page}" in err
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    (text := tmp_path / "stories.txt").write_text("One day.\n<|endoftext|>\nAnother day, another walk.\n" * 40)
    plain = ["inspect", "tinyworld/gpt2", "--text", str(text), "--tokens", "300", "--reparametrisation"]
    assert main(plain) == 0
    out = capsys.readouterr().out
    assert all(title in out for title in ("Attention branches", "Q-K relation", "Reparametrisation"))
    assert "orthogonal" in out
    assert str(text) in re.sub(r"\s", "", out)


def test_text_that_is_not_there_is_one_line(capsys, tmp_path):
    assert main(["inspect", "tinyworld/gpt-neox", "--text", str(tmp_path / "absent.txt")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hfpatch: error: ")]
    assert "absent.txt" in line
    (short := tmp_path / "short.txt").write_text("One\n")
    assert main(["inspect", "tinyworld/gpt-neox", "--text", str(short)]) == 2
    assert "fewer than four documents" in capsys.readouterr().err


def test_too_few_tokens_for_the_fit_are_noted_and_the_rest_is_shown(run, tmp_path):
    (text := tmp_path / "short.jsonl").write_text('{"text": "Anna took the lamp."}\n' * 6)
    found = inspect(MODEL, run / "patch", text=str(text))
    assert found.linearised == []
    assert any("too few to fit" in note for note in found.notes)
    assert found.ablations is not None
