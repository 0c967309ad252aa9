"""The report of a pretraining study: several query paths trained from scratch, over seeds and sweep points."""
