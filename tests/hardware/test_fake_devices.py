"""The scorer, the tuners and the training loop with tensors of a simulated GPU: see `simulated_device`."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from accelerate import PartialState
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from families import logits_of, make_model, make_tokens, perturb
from peft import LoraConfig
from simulated_device import CPU, CUDA, simulated_device
from training_blocks import make_blocks, metrics_of

from hfpatch import NonlinearQueryConfig, PreProjectionConfig, methods, patch
from hfpatch.data.plan import draw_plan
from hfpatch.evaluation.scorer import TokenRequest, scorer
from hfpatch.evaluation.scorer.batching import BatchLimits
from hfpatch.recipes.training import TrainingSettings
from hfpatch.training import hardware, loss, processes
from hfpatch.training.head import loss_in_forward
from hfpatch.training.probe import train_probe
from hfpatch.training.retention import document_changes
from hfpatch.training.run import Run
from hfpatch.tuners.layer import MethodLayer

FAMILIES = ["gpt2", "llama"]  # fused and separate projections


@pytest.fixture(autouse=True)
def _without_liger(monkeypatch):
    """Its kernels need a real device."""
    monkeypatch.setattr(loss, "_liger", lambda: None)


OTHERS = [
    methods.CanonConfig, methods.LoReFTConfig, methods.NonlinearLoraConfig, methods.OutputGateConfig,
    methods.ParallelAdapterConfig, methods.QueryTemperatureConfig, methods.ValueResidualConfig,
]  # fmt: skip
CONFIGS = {
    "pre_projection": lambda: PreProjectionConfig(dropout=0.1),
    "gated": lambda: PreProjectionConfig(gated=True),
    "content_skip": lambda: PreProjectionConfig(content_skip=True, init="paper"),
    "nonlinear_query": lambda: NonlinearQueryConfig(),
    "literal": lambda: NonlinearQueryConfig(form="literal", activation="relu2", input_norm="layernorm"),
    "identity": lambda: NonlinearQueryConfig(form="literal", anchor="identity", output_norm="rmsnorm"),
    "key_value": lambda: NonlinearQueryConfig(targets=("key", "value"), output_norm="none"),
    **{method.__name__: method for method in OTHERS},
    "lora_stack": lambda: [PreProjectionConfig(content_skip=True), LoraConfig(r=2, target_modules="all-linear")],
}


def patched(family, name, device, dtype=torch.float32):
    """Return a model with adapters, all of whose tensors are off their initial values."""
    model = make_model(family, dtype).to(device)
    if name is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a branch in the key
            patch(model, CONFIGS[name]())
    perturb(model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tuner_computes_on_the_device_as_on_the_cpu(family, name):
    tokens = make_tokens()
    expected = logits_of(patched(family, name, "cpu").eval(), tokens)
    with simulated_device():
        model = patched(family, name, "cuda")
        assert {value.device for value in [*model.parameters(), *model.buffers()]} == {CUDA}
        actual = logits_of(model.eval(), tokens.to("cuda"))
        model.train()
        model(tokens.to("cuda"), labels=tokens.to("cuda"), use_cache=False).loss.backward()
        gradients = [value.grad for value in model.parameters() if value.requires_grad]
        assert {gradient.device for gradient in gradients} == {actual.device} == {CUDA}
    assert torch.equal(actual, expected)


def requests():
    """Return requests of several endings each, and plain rows of other lengths."""
    rows = make_tokens(6, 20).tolist()
    shared = [TokenRequest.cut(rows[0][:9], rows[i][: 3 + i], 40) for i in range(4)]
    return [*shared, *(TokenRequest.cut(row[:4], row[4 : 6 + i], 40) for i, row in enumerate(rows))]


SCORED = [
    *((family, "lora_stack", "sdpa") for family in FAMILIES),
    ("gpt_neox", None, "eager"),
    ("gemma2", None, "eager"),  # caps its logits
]


@pytest.mark.parametrize(("family", "name", "attention"), SCORED)
def test_the_scorer_scores_on_the_device_as_on_the_cpu(family, name, attention):
    def scores(device):
        model = patched(family, name, device).eval()
        model.set_attn_implementation(attention)
        computed = {}
        limits = BatchLimits(tokens=64, logits=1 << 12)
        made = scorer.Scorer(model, 40, limits, weigh_trials=False)
        made.score(requests(), computed.update)
        plan = made.plan(requests(), limits)
        return computed, plan.sharing, len(plan.modules)

    with simulated_device():
        computed = scores("cuda")
    assert computed == scores("cpu")


def test_the_scorer_scores_a_model_on_two_devices():
    """As ``device_map`` leaves it: the last block, the norm after it and the head are on another device."""

    def scores(parts):
        model = make_model("llama").eval()
        for name in parts:
            module = model.get_submodule(name).to("cuda")
            add_hook_to_module(module, AlignDevicesHook(CUDA))
        if parts:
            add_hook_to_module(model, AlignDevicesHook(CPU, io_same_device=True))
        patch(model, [PreProjectionConfig(content_skip=True), NonlinearQueryConfig(rank=3)])
        perturb(model)
        added = {str(layer.device()) for layer in model.modules() if isinstance(layer, MethodLayer)}
        computed = {}
        limits = BatchLimits(tokens=64, logits=1 << 12)
        scorer.Scorer(model, 40, limits, weigh_trials=False).score(requests(), computed.update)
        return computed, added

    with simulated_device():
        computed, added = scores(["model.layers.1", "model.norm", "lm_head"])
    expected, _ = scores([])
    assert added == {"cpu", "cuda:0"}
    assert computed.keys() == expected.keys()
    for index, (value, greedy) in expected.items():
        assert computed[index] == (pytest.approx(value, rel=1e-5), greedy)


@pytest.fixture
def accelerate_on_device(monkeypatch):
    """Let accelerate find the simulated device."""
    AcceleratorState._reset_state(reset_partial_state=True)  # another test may have chosen the CPU
    monkeypatch.setattr(PartialState, "default_device", property(lambda self: CUDA))
    monkeypatch.setattr(processes, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(hardware, "_SIDE", {"cuda": 64})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    compared = torch.utils.checkpoint._allowed_determinism_checks_to_fns  # asked where torch has left the simulation
    monkeypatch.setitem(compared, "default", lambda value: (value.shape, value.dtype))
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_trains_evaluates_and_resumes_on_the_device(tmp_path, accelerate_on_device, monkeypatch, resumed):
    family, name = ("gpt_neox", "content_skip") if resumed else ("llama", "lora_stack")
    dtype = torch.float32 if resumed else torch.bfloat16
    settings = TrainingSettings(
        steps=2, batch_size=2, micro_batch_size=1, warmup_steps=1, lr=1e-2, evaluate_every=1, save_every=1,
        gradient_checkpointing=resumed,
    )  # fmt: skip
    blocks = make_blocks(documents=12)
    plan = draw_plan(blocks=len(blocks), steps=2, batch_size=2, seed=0)

    def train(device, folder, on_step=None):
        model = patched(family, name, device, dtype)
        run = Run(settings, blocks, plan, 0, tmp_path / folder, held_out=blocks.head(1), on_step=on_step)
        train_probe(model, run)
        assert {value.device for value in model.parameters()} == {torch.device(device)}
        return model

    def stop(record):
        raise KeyboardInterrupt

    with simulated_device():
        whole = train("cuda:0", "whole")
        if resumed:
            with pytest.raises(KeyboardInterrupt):
                train("cuda:0", "cut", on_step=stop)
            model = train("cuda:0", "cut")
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), whole.parameters(), strict=True))
            assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(PartialState, "default_device", property(lambda self: CPU))
    train("cpu", "cpu")
    assert losses(tmp_path / "cpu") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5 if resumed else 1e-2)


def losses(folder):
    return [line[key] for line in metrics_of(folder) for key in ("loss", "eval_loss") if line.get(key) is not None]


MISTAKES = {
    "labels": (loss, "shifted", lambda stock: lambda labels: stock(labels).cpu()),
    "adapters": (MethodLayer, "device", lambda stock: lambda self: CPU),
    "trees": (scorer, "model_inputs", lambda stock: lambda *given: {k: x.cpu() for k, x in stock(*given).items()}),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_mistake_in_the_code_is_found(monkeypatch, mistake):
    tokens = make_tokens()
    with simulated_device():
        if mistake is not None:
            module, name, wrong = MISTAKES[mistake]
            monkeypatch.setattr(module, name, wrong(getattr(module, name)))
        with pytest.raises(RuntimeError, match="same device") if mistake is not None else nullcontext():
            model = patched("llama", "gated", "cuda").eval()
            with loss_in_forward(model):
                model(tokens.to("cuda"), labels=tokens.to("cuda")).loss.backward()
            scorer.Scorer(model, 40).score(requests(), lambda scores: None)


def test_torchs_default_dtype_changes_no_number(tmp_path):
    """As a process has it that calls ``set_default_dtype``, or while another thread makes a model."""

    blocks = make_blocks(documents=12, owners=True)

    def numbers(folder, model):
        computed = {}
        scorer.Scorer(model, 40).score(requests(), computed.update)
        settings = TrainingSettings(steps=2, batch_size=2, micro_batch_size=1, warmup_steps=1, lr=1e-2)
        plan = draw_plan(blocks=len(blocks), steps=2, batch_size=2, seed=0)
        changes = document_changes(model, blocks.head(2), batch_size=2)
        train_probe(model, Run(settings, blocks, plan, 0, folder))
        return computed, changes.tolist(), losses(folder)

    models = [patched("llama", "gated", "cpu") for _ in range(2)]
    expected = numbers(tmp_path / "float32", models[0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert numbers(tmp_path / "bfloat16", models[1]) == expected
    finally:
        torch.set_default_dtype(torch.float32)
