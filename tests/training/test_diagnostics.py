"""Update survival, and f of query paths against plain torch on the activations, without a trace in training."""

import math
from types import SimpleNamespace

import pytest
import torch
from architectures.formulas import nonlinear
from families import make_config
from models.test_build import ATTENTIONS, build, projection
from torch.nn.functional import linear
from training_blocks import make_blocks, metrics_of, run_pretrain, same, trainables

from hfpatch.errors import HfpatchError
from hfpatch.models import build_scratch
from hfpatch.recipes.models import ScratchSettings
from hfpatch.results.layout import Diagnostic
from hfpatch.training import loop
from hfpatch.training.diagnostics import (
    DIAGNOSED_BLOCKS,
    DiagnosticsFile,
    counting_survival,
    diagnose,
    survival_shares,
    survival_steps,
)

STEPS = 6
FORMS = {
    "identity": {"path": "nonlinear"},
    "fused": {"path": "nonlinear", "fused": True},
    "weight": {"path": "nonlinear", "anchor": "weight"},
    "weight, fused": {"path": "nonlinear", "anchor": "weight", "fused": True, "activation": "silu"},
    "residual": {"path": "residual"},
    "no norms": {"path": "nonlinear", "input_norm": "none", "output_norm": "none", "activation": "relu"},
}


def f_and_anchor(path, query, x):
    """Return f and A of a layer by the formulas, from its parameters by name and what it read."""
    weight = {name.removesuffix(".weight"): value.double() for name, value in path.state_dict().items()}
    anchor = linear(x, weight["anchor"], weight.get("anchor.bias")) if "anchor" in weight else x
    if query["path"] == "residual":
        return x @ weight["f"].T, anchor
    options = {name: value for name, value in query.items() if name in ("activation", "input_norm", "output_norm")}
    return nonlinear(x, {name.removeprefix("f."): value for name, value in weight.items()}, **options), anchor


def expected(model, case, form, blocks):
    """Return (layer, size, cosine, size beside x) by plain torch, block by block, over all tokens that are text."""
    query, rows = FORMS[form], []
    for layer in (0, 1):
        taken = {}
        reader = model.get_submodule(f"{ATTENTIONS[case].format(layer)}.{projection(case)}")
        handle = reader.register_forward_pre_hook(lambda _, args, taken=taken: taken.update(x=args[0].double()))
        numbers = []
        for row in range(min(DIAGNOSED_BLOCKS, len(blocks))):
            item = {name: value[None] for name, value in blocks[row].items() if name != "labels"}
            with torch.no_grad():
                model(**item, use_cache=False)
            f, anchor = f_and_anchor(reader.paths["query"], query, taken["x"])
            text = int(blocks.sizes[blocks.offsets[row] : blocks.offsets[row + 1]].sum())
            for f_t, a_t, x_t in zip(f[0, :text], anchor[0, :text], taken["x"][0, :text], strict=True):
                cosine = float(f_t @ a_t / (f_t.norm() * a_t.norm()))
                numbers.append((float(f_t.norm() / a_t.norm()), cosine, float(f_t.norm() / x_t.norm())))
        handle.remove()
        rows.append((layer, *(sum(column) / len(numbers) for column in zip(*numbers, strict=True))))
    return rows


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *(("gpt2", form) for form in FORMS),
        ("gpt_neox", "identity"),
        ("gpt_neox", "weight, fused"),
        ("llama", "weight"),
        ("llama", "fused"),
    ],
)
@pytest.mark.parametrize("layout", ["packed", "padded", "stream"])
def test_it_is_the_formula_on_what_the_layer_reads(case, form, layout):
    model, blocks = build(case, **FORMS[form]), make_blocks(layout=layout, documents=30)
    assert len(blocks) > DIAGNOSED_BLOCKS
    diagnosed = diagnose(model, blocks, step=7, batch_size=3)
    wanted = expected(model, case, form, blocks)
    assert [(layer.step, layer.layer, layer.target) for layer in diagnosed] == [(7, 0, "query"), (7, 1, "query")]
    for layer, (_, *numbers) in zip(diagnosed, wanted, strict=True):
        assert (layer.size, layer.cosine, layer.size_beside_x) == pytest.approx(numbers, rel=2e-5, abs=2e-6)
        if FORMS[form].get("anchor") != "weight":
            assert layer.size == layer.size_beside_x


def test_several_targets_are_told_apart_and_nothing_stays_behind():
    settings = ScratchSettings(query={"path": "nonlinear", "targets": ("value", "key", "query")})
    with pytest.warns(UserWarning, match="both query and key"):
        model = build_scratch(make_config("gpt2"), settings, seed=3).train()
    diagnosed = diagnose(model, make_blocks(), step=0, batch_size=8)
    assert [(entry.layer, entry.target) for entry in diagnosed] == [
        (layer, target) for layer in (0, 1) for target in ("key", "query", "value")
    ]
    assert len({entry.size for entry in diagnosed}) == 6
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def run(model, folder, *, held_out=True, **values):
    evaluation = make_blocks(documents=30, seed=1) if held_out else None
    values = {"evaluate_every": 4, "held_out": evaluation, **values}
    return run_pretrain(model, make_blocks(), folder, **values)


def made(dropout=0.0):
    config = make_config("gpt2", resid_pdrop=dropout, embd_pdrop=dropout)
    return build_scratch(config, ScratchSettings(query=FORMS["identity"]), seed=3)


def without_seconds(folder):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics_of(folder)]


def test_a_run_writes_them_at_the_start_on_time_and_at_the_end_and_trains_as_without(tmp_path):
    with_them, without = made(dropout=0.2), made(dropout=0.2)
    run(with_them, tmp_path / "with", diagnose_every=4)
    run(without, tmp_path / "without")
    assert [(line["step"], line["layer"]) for line in metrics_of(tmp_path / "with", "diagnostics")] == [
        (step, layer) for step in (0, 4, 6) for layer in (0, 1)
    ]
    assert all(
        math.isfinite(line["size"]) and -1 <= line["cosine"] <= 1
        for line in metrics_of(tmp_path / "with", "diagnostics")
    )
    assert not (tmp_path / "without" / "diagnostics.jsonl").exists()
    assert without_seconds(tmp_path / "with") == without_seconds(tmp_path / "without")
    assert same(trainables(with_them), trainables(without))
    last = diagnose(with_them, make_blocks(documents=30, seed=1), step=6, batch_size=4)
    for entry, line in zip(last, metrics_of(tmp_path / "with", "diagnostics")[-2:], strict=True):
        values = dict(entry)
        assert values.pop("target") == line.pop("target")
        assert values == pytest.approx(line, rel=1e-5)  # in training, attention takes documents one at a time


def test_neither_they_nor_the_evaluation_count_in_a_steps_seconds(tmp_path, monkeypatch):
    clock = [0.0]

    def slow(work):
        def worked(*args, **kwargs):
            clock[0] += 1000.0
            return work(*args, **kwargs)

        return worked

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for name in ("diagnose", "mean_loss"):
        monkeypatch.setattr(loop, name, slow(getattr(loop, name)))

    def tick(module, args):
        clock[0] += module.training

    model = made()
    model.register_forward_pre_hook(tick)
    result = run(model, tmp_path, diagnose_every=1, evaluate_every=1)
    assert clock[0] == 2 * 7 * 1000.0 + 6
    assert [line["seconds"] for line in metrics_of(tmp_path)] == [0.0] + 6 * [1.0]
    assert result.wall_s == 6.0


def test_missing_lines_are_refused(tmp_path):
    run(made(), tmp_path, diagnose_every=2)
    whole = (tmp_path / "diagnostics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "diagnostics.jsonl").write_text("".join(whole[:4]))
    with pytest.raises(HfpatchError, match=r"diagnostics\.jsonl: lines up to step 6 are missing"):
        run(made(), tmp_path, diagnose_every=2)


def test_a_diverged_run_is_measured_where_it_ended(tmp_path):
    values = {"diagnose_every": 4, "lr": 1e4, "warmup_steps": 0, "max_grad_norm": None, "diverged_above": 50.0}
    result = run(made(), tmp_path, **values)
    assert 0 < result.diverged_step < STEPS
    assert {line["step"] for line in metrics_of(tmp_path, "diagnostics")} >= {0, result.diverged_step}
    again = run(made(), tmp_path, **values)
    assert again.diverged_step == result.diverged_step


def test_a_model_without_f_writes_nothing(tmp_path):
    stock = build_scratch(make_config("gpt2"), ScratchSettings(), seed=3)
    identity = build_scratch(make_config("gpt2"), ScratchSettings(query={"path": "identity"}), seed=3)
    for name, model in {"stock": stock, "identity": identity}.items():
        run(model, tmp_path / name, diagnose_every=2)
        assert not (tmp_path / name / "diagnostics.jsonl").exists()
        run(model, tmp_path / name, diagnose_every=2)


def test_what_is_no_number_is_null(tmp_path):
    file = DiagnosticsFile(tmp_path / "diagnostics.jsonl")
    file.write([dict(Diagnostic(step=3, layer=0, size=math.inf, cosine=math.nan, size_beside_x=0.5))])
    (line,) = metrics_of(tmp_path, "diagnostics")
    assert line == {"step": 3, "layer": 0, "target": "query", "size": None, "cosine": None, "size_beside_x": 0.5}


def test_there_must_be_something_to_measure_on(tmp_path):
    with pytest.raises(HfpatchError, match=r"diagnose_every needs held-out text, .* set data\.held_out"):
        run(made(), tmp_path, held_out=False, diagnose_every=2)


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        (500, 50, [50, 106, 162, 218, 274, 330, 386, 442]),
        (5, 2, [2, 3, 4]),
        (3, 10, [2]),
        (1, 0, [0]),
    ],
)
def test_steps_are_spread_from_the_end_of_warm_up(steps, warmup, expected):
    assert sorted(survival_steps(steps=steps, warmup_steps=warmup)) == expected


def test_counts_weights_that_changed_among_those_with_a_gradient():
    first = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    second = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    idle = torch.nn.Parameter(torch.tensor([1.0]))
    parameters = {"x.A.default.weight": first, "y.B.default.weight": second, "z.C.default.weight": idle}
    first.grad, second.grad = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0])
    counts = {"B": (0, 1)}
    with counting_survival(counts, parameters):
        first.data += torch.tensor([0.5, 0.0, 0.5, 0.5])  # the third moves without a gradient
        second.data += torch.tensor([0.5, 0.5])
    assert counts == {"A": (2, 3), "B": (2, 3)}
    assert survival_shares(counts) == {"A": 2 / 3, "B": 2 / 3, "all": 4 / 6}
