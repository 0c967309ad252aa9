"""The report of an inspection: a model's attention, and its changes by a patch."""
