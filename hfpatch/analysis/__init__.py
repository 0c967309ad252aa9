"""What the added modules of a patched model do: pure functions on a model."""
