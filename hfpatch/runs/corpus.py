"""What a pretraining trains on: a tokenizer and token blocks."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.corpora import open_corpus
from hfpatch.data.deciding import tokenizer_documents
from hfpatch.data.load import load_splits
from hfpatch.data.plan import draw_evaluation
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import PretrainRecipe, StudyRecipe
from hfpatch.runs.identity import Identity, identify_data
from hfpatch.support.files import atomic_directory, check_data_dir
from hfpatch.support.folders import cache_folder
from hfpatch.surgery.bases import load_tokenizer
from hfpatch.training.processes import start_processes


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, the blocks to train on and, if the recipe has any, those whose loss is measured."""

    tokenizer: PreTrainedTokenizerBase
    train: TokenBlocks
    evaluation: TokenBlocks | None

    @cached_property
    def identity(self) -> Identity:
        """The hashes of all three."""
        return identify_data(self.tokenizer, self.train, self.evaluation)


def load_corpus(recipe: PretrainRecipe | StudyRecipe) -> Corpus:
    """Load or train the tokenizer and tokenise the text, on the first process; the others read its cache.

    Raises:
        HfpatchError: if the tokenizer or the text cannot be loaded.
    """
    check_data_dir(recipe.data_dir)
    with start_processes().local_main_process_first():
        tokenizer = recipe_tokenizer(recipe)
        splits = load_splits(
            recipe.data,
            tokenizer,
            data_dir=recipe.data_dir,
            cache_dir=cache_folder("tokens"),
            evaluation=recipe.evaluation_data,
        )
    evaluation = splits.held_out
    if evaluation is not None and recipe.evaluation_blocks is not None:
        evaluation = draw_evaluation(evaluation, recipe.evaluation_blocks)
    return Corpus(tokenizer, splits.train, evaluation)


def recipe_tokenizer(recipe: PretrainRecipe | StudyRecipe) -> PreTrainedTokenizerBase:
    """Load the recipe's tokenizer, or train it on the recipe's text unless that was done before.

    Raises:
        HfpatchError: if it cannot be loaded, or there is no text to train it on.
    """
    size = recipe.tokenizer.train_vocab_size
    if size is None:
        return load_tokenizer(str(recipe.tokenizer.path))
    parts = recipe.data.parts()
    if unread := [part for part in parts if part.format != "text"]:
        raise HfpatchError(
            f"tokenizer.train_vocab_size: data.format={unread[0].format} of {unread[0].source} is no plain text to "
            "train a tokenizer on; set tokenizer.path"
        )
    if tokens := [part for part in parts if part.is_token_file]:
        raise HfpatchError(
            f"tokenizer.train_vocab_size: {tokens[0].source} has tokens and no text to train a tokenizer on; set "
            "tokenizer.path to the one it was made with"
        )
    corpora = [(open_corpus(part, recipe.data_dir), part) for part in parts]
    if not all(corpus.cacheable for corpus, _ in corpora):
        return train_tokenizer(tokenizer_documents(corpora), size)
    text: list[Any] = ["without what is held out, and its copies"]
    for corpus, part in corpora:
        text += [corpus.digest, corpus.revision, part.max_documents, part.min_characters]
        text += [part.text_column, part.held_out, part.config, part.split]
    text.append(size)
    kept = cache_folder("tokens") / f"tokenizer-{hashlib.sha256(json.dumps(text).encode()).hexdigest()[:32]}"
    if not kept.is_dir():
        trained = train_tokenizer(tokenizer_documents(corpora), size)
        try:
            with atomic_directory(kept) as temporary:
                trained.save_pretrained(temporary)
        except HfpatchError as error:  # a cache is a convenience
            warnings.warn(f"the tokenizer is not kept for the next run: {error}", stacklevel=2)
            return trained
    return load_tokenizer(str(kept))
