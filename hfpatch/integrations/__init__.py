"""hfpatch inside other trainers; only the trainer imports its module."""
