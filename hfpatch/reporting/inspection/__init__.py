"""The report of an inspection: what a model's attention does, and what a patch changes."""
