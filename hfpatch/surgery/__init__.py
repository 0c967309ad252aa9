"""Patching a model: stacks of PEFT adapters in memory and on disk, the bases they go into, methods and budgets."""
