"""hfpatch inside other trainers; each module is imported by the tool that it is for, and by nothing else."""
