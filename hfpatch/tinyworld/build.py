"""Build what comes with the package: the tasks' items, the tokenizer and the two checkpoints.

python -m hfpatch.tinyworld.build                  everything, about 15 minutes on two cores
python -m hfpatch.tinyworld.build gpt2             one checkpoint
python -m hfpatch.tinyworld.build --items          the items alone
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import batched
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from hfpatch.data.blocks import TokenBlocks, blocks_from_stream
from hfpatch.data.plan import draw_plan
from hfpatch.data.tokenise import tokenise
from hfpatch.data.tokenizer import END_OF_TEXT, train_tokenizer
from hfpatch.files import atomic_directory, read_json, write_json, write_text
from hfpatch.recipe import PretrainRecipe, load_pretrain_recipe
from hfpatch.resources import recipes_dir
from hfpatch.tinyworld.checkpoints import CHECKPOINTS, MANIFEST, built_files, checkpoint
from hfpatch.tinyworld.language import documents
from hfpatch.tinyworld.tasks import TASKS, draw_items, items_file
from hfpatch.training.architecture import build_model
from hfpatch.training.pretrain import pretrain
from hfpatch.training.records import StepRecord

VOCABULARY_SIZE = 512
_TOKENIZER_DOCUMENTS = 2000
_DOCUMENTS_A_STRETCH = 1000


def build_items() -> None:
    """Draw the items of every task and write them."""
    for task in TASKS:
        write_text(items_file(task), "".join(json.dumps(item) + "\n" for item in draw_items(task)))


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on both splits, so that the words of each are equally well covered."""
    texts = [text for split in ("base", "shifted") for text in documents(split, count=_TOKENIZER_DOCUMENTS)]
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    tokenizer.model_max_length = context
    return tokenizer
