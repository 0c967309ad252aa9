import pytest
import torch
from accelerate import PartialState
from families import make_model

from hfpatch import PreProjectionConfig, patch
from hfpatch.training.hardware import (
    flops_per_token,
    matrix_rate,
    peak_memory_bytes,
    reset_peak_memory,
    resident_memory_bytes,
    tokens_per_s_at_most,
)

HIDDEN, INNER, VOCABULARY, WIDTH = 32, 48, 96, 40
BLOCK = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER  # QKV, output and MLP of GPT-NeoX
HEAD = VOCABULARY * HIDDEN
ADDED = 2 * HIDDEN * WIDTH


def test_operations_are_those_of_the_matrices_on_the_way():
    model = patch(make_model("gpt_neox"), PreProjectionConfig())
    forward = 2 * (2 * BLOCK + HEAD + 2 * ADDED)
    assert flops_per_token(model) == forward + 2 * (2 * BLOCK + HEAD + 2 * ADDED) + 2 * 2 * ADDED
    model = patch(make_model("gpt_neox"), PreProjectionConfig(layers_to_transform=[1]))
    forward = 2 * (2 * BLOCK + HEAD + ADDED)
    assert flops_per_token(model) == forward + 2 * (BLOCK + HEAD + ADDED) + 2 * ADDED
    model = make_model("gpt2").requires_grad_(True)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name)
    assert flops_per_token(model) == 6 * (matrices + HEAD)


def test_on_the_cpu_of_a_machine_with_gpus_memory_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert resident_memory_bytes() > 0
    reset_peak_memory()
    assert peak_memory_bytes() > 0


def test_a_status_without_a_peak_leaves_that_to_the_system(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t 2048 kB\n")  # as sandboxes have it
    monkeypatch.setattr("hfpatch.training.hardware._STATUS", tmp_path / "status")
    assert resident_memory_bytes() == 2048 * 1024 < peak_memory_bytes()


def test_the_rate_is_measured_once_and_bounds_the_speed():
    state = PartialState()
    rate = matrix_rate(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e14
    assert matrix_rate(torch.device("cpu"), torch.float32) == rate
    model = patch(make_model("gpt2"), PreProjectionConfig())
    assert tokens_per_s_at_most(model, state, None) == pytest.approx(rate / flops_per_token(model))
