"""What a recipe says about training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from hfpatch.settings import Dtype, Section


class TrainingSettings(Section):
    """The optimiser, its schedule and the batch; the defaults are the probe protocol of arXiv 2604.10791."""

    steps: PositiveInt = 500
    """Optimiser steps."""
    batch_size: PositiveInt = 16
    """Blocks that one optimiser step sees, over all processes and accumulation steps together."""
    micro_batch_size: PositiveInt | None = None
    """Blocks in one forward pass on one process; None takes the whole batch at once."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The decay after warm-up, down to zero (constant: none)."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay; never applied to norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient's norm to this; None does not clip."""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    """One run per seed; a seed fixes initialisation and batch plan for every method alike."""
    trainable_dtype: Dtype = "float32"
    """The dtype of what is trained. bfloat16 loses most small updates; it is here to reproduce results that used it."""
    autocast: Literal["bfloat16"] | None = None
    """Run the forward pass under autocast in this dtype."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every so many steps; None writes none before the end."""
