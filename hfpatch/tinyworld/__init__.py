"""The embedded default: a synthetic language, its tasks, and two tiny checkpoints pretrained on it."""

from hfpatch.tinyworld.language import documents
from hfpatch.tinyworld.tasks import CHECKPOINTS, DESCRIPTIONS, TASKS, checkpoint, examples, items

__all__ = ["CHECKPOINTS", "DESCRIPTIONS", "TASKS", "checkpoint", "documents", "examples", "items"]
