"""What the tests of trainings on several processes share: the program, free ports, and what a training left."""

import socket
from pathlib import Path

import torch
from safetensors.torch import load_file
from train_on_processes import STEPS
from training_blocks import metrics_of

TESTS = Path(__file__).parent
PROGRAM = TESTS / "train_on_processes.py"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def losses(folder: Path, key: str = "loss", steps: int = STEPS) -> list[float]:
    lines = metrics_of(folder)
    assert [line["step"] for line in lines if line["step"]] == list(range(1, steps + 1))
    return [line[key] for line in lines if key in line]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "patch" / "pre_projection" / "adapter_model.safetensors")
