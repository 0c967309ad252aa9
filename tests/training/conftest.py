from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from training_blocks import make_blocks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.plan import draw_plan
from hfpatch.recipes.training import LoopSettings, PretrainSettings, TrainingSettings
from hfpatch.results.parts import TrainResult
from hfpatch.training.optim import build_optimizer, build_scheduler
from hfpatch.training.pretrain import pretrain
from hfpatch.training.probe import train_probe

VOCABULARY = 64


def make_base(kind: str = "gpt_neox", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {"gpt_neox": {"intermediate_size": 64}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    config = AutoConfig.for_model(kind, **small, **extra.get(kind, {}), bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_patched(kind: str = "gpt_neox", dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> PreTrainedModel:
    """Return a frozen base with a LoRA adapter in float32, its second matrix away from zero."""
    model = make_base(kind, dtype).requires_grad_(False)
    target = {"gpt_neox": "query_key_value", "gpt2": "c_attn"}[kind]
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=[target], fan_in_fan_out=kind == "gpt2")
    torch.manual_seed(1)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def run_probe(model: PreTrainedModel, blocks: TokenBlocks, folder: Any, **values: Any) -> TrainResult:
    """Train a patched model for 8 steps; ``values`` are other settings, and other arguments of `train_probe`."""
    settings, given = _split(TrainingSettings, {"steps": 8, **values})
    plan = draw_plan(blocks=len(blocks), steps=settings.steps, batch_size=settings.batch_size, seed=3)
    return train_probe(model, **{"settings": settings, "blocks": blocks, "plan": plan, "run_dir": folder, **given})


def run_pretrain(model: PreTrainedModel, blocks: TokenBlocks, folder: Any, **values: Any) -> TrainResult:
    """Pretrain a model for 6 steps; ``values`` are other settings, and other arguments of `pretrain`."""
    settings, given = _split(PretrainSettings, {"steps": 6, **values})
    plan = draw_plan(blocks=len(blocks), steps=settings.steps, batch_size=settings.batch_size, seed=0)
    return pretrain(model, **{"settings": settings, "blocks": blocks, "plan": plan, "run_dir": folder, **given})


def rates_of(settings: LoopSettings, steps: int) -> list[float]:
    """Return the learning rate of each step."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), settings)
    scheduler, found = build_scheduler(optimizer, settings, steps=steps), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def _split(kind: type[LoopSettings], values: dict[str, Any]) -> tuple[LoopSettings, dict[str, Any]]:
    given = {name: value for name, value in values.items() if name not in kind.model_fields}
    chosen = {name: value for name, value in values.items() if name in kind.model_fields}
    return kind(**{"batch_size": 4, "lr": 1e-2, "warmup_steps": 2, **chosen}), {"seed": 0, **given}


@pytest.fixture
def blocks() -> TokenBlocks:
    return make_blocks()


@pytest.fixture
def padded_blocks() -> TokenBlocks:
    return make_blocks(layout="padded")


@pytest.fixture
def completion_blocks() -> TokenBlocks:
    with pytest.warns(UserWarning, match="have none to learn and are left out"):
        return make_blocks(completions=True)


@pytest.fixture
def patched() -> Callable[..., PreTrainedModel]:
    return make_patched


@pytest.fixture
def base() -> Callable[..., PreTrainedModel]:
    return make_base
