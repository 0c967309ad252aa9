"""What a pretraining trains on: a tokenizer and token blocks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.corpora import filtered_documents, open_corpus
from hfpatch.data.load import default_cache, load_blocks, load_splits
from hfpatch.data.settings import DataSettings
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.files import atomic_directory
from hfpatch.pretraining_recipe import PretrainRecipe, StudyRecipe
from hfpatch.training.processes import start_processes


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, the blocks to train on and, where the recipe has any, those whose loss is measured."""

    tokenizer: PreTrainedTokenizerBase
    train: TokenBlocks
    evaluation: TokenBlocks | None


def load_corpus(recipe: PretrainRecipe | StudyRecipe) -> Corpus:
    """Find or train the tokenizer and tokenise the text, on the first process; the others read its cache.

    Raises:
        HfpatchError: if tokenizer or text cannot be had.
    """
    with start_processes().local_main_process_first():
        tokenizer = _tokenizer(recipe)
        load = {"tokenizer": tokenizer, "data_dir": recipe.data_dir, "cache_dir": default_cache()}
        splits = load_splits(recipe.data, **load)
        evaluation = load_blocks(recipe.evaluation_data, **load) if recipe.evaluation_data else splits.held_out
    return Corpus(tokenizer, splits.train, evaluation)


def _tokenizer(recipe: PretrainRecipe | StudyRecipe) -> PreTrainedTokenizerBase:
    size, path = recipe.tokenizer.train_vocab_size, recipe.tokenizer.path
    return _given_tokenizer(str(path)) if size is None else _trained_tokenizer(recipe.data, recipe.data_dir, size)


def _trained_tokenizer(data: DataSettings, data_dir: Path | None, size: int) -> PreTrainedTokenizerBase:
    """Train a tokenizer, or take the one that an earlier run trained on the same text."""
    corpus = open_corpus(data, data_dir)
    if not corpus.cacheable:
        return train_tokenizer(filtered_documents(corpus, data), size)
    text = [corpus.digest, corpus.revision, data.max_documents, data.min_characters, data.text_column, size]
    kept = default_cache() / f"tokenizer-{hashlib.sha256(json.dumps(text).encode()).hexdigest()[:32]}"
    if not kept.is_dir():
        trained = train_tokenizer(filtered_documents(corpus, data), size)
        with atomic_directory(kept) as temporary:
            trained.save_pretrained(temporary)
    return _given_tokenizer(str(kept))


def _given_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise HfpatchError(f"tokenizer.path: {path!r} cannot be loaded ({reason})") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
