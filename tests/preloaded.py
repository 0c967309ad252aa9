"""What the processes of `forked` have imported when they start."""

import gc
import importlib
import logging

MODULES = [
    "accelerate.commands.launch",
    "families",
    "hfpatch.cli.app",
    "hfpatch.evaluation.run",
    "hfpatch.models",
    "hfpatch.runs.comparison",
    "hfpatch.runs.pretraining",
    "hfpatch.runs.train_eval",
    "hfpatch.training.pretrain",
    "hfpatch.training.probe",
    "torch.distributed.run",
    "training_blocks",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
]

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says which kernels it has not
for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # a fork shares what none of its collections goes through
