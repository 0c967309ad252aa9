"""What the configurations of all hfpatch methods share."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import PeftConfig, TaskType


@dataclass
class SurgeryConfig(PeftConfig):
    """Which layers to change, and the seed.

    Args:
        layers_to_transform: index or indices of the layers to change; None changes all.
        seed: seed of the initialisation; a parameter's initial value depends on it, the layer and the parameter's
            name alone.
        target_modules: the attention modules that were changed; filled in when the adapter is injected.
    """

    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "Index or indices of the layers to change; None changes all."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the initialisation."})
    target_modules: list[str] | None = field(
        default=None, metadata={"help": "The attention modules that were changed; filled in at injection."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.task_type = self.task_type or TaskType.CAUSAL_LM
