"""The tokenizer of a pretraining; and `tokenize`, which writes its text as a token file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hfpatch.data.corpora import filtered_documents, open_corpus
from hfpatch.data.deciding import tokenizer_documents
from hfpatch.data.token_file import TokenFileInfo, check_free, describe_token_file, write_token_file
from hfpatch.data.tokenizer import train_tokenizer
from hfpatch.errors import HfpatchError
from hfpatch.recipes.pretraining import StudyRecipe
from hfpatch.support.files import atomic_directory, hash_values
from hfpatch.support.folders import cache_folder
from hfpatch.surgery.bases import load_tokenizer


def recipe_tokenizer(recipe: StudyRecipe) -> PreTrainedTokenizerBase:
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
            f"tokenizer.train_vocab_size: data.format={unread[0].format} of {unread[0].source} is not plain text to "
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
    fields = ("max_documents", "min_characters", "text_column", "held_out", "config", "split", "group")
    text = [(corpus.digest(), corpus.revision, *(getattr(part, name) for name in fields)) for corpus, part in corpora]
    kept = cache_folder("tokens") / f"tokenizer-{hash_values([text, recipe.data.seed, size])[:32]}"
    if not kept.is_dir():
        trained = train_tokenizer(tokenizer_documents(corpora), size)
        try:
            with atomic_directory(kept) as temporary:
                trained.save_pretrained(temporary)
        except HfpatchError as error:  # a cache is a convenience
            warnings.warn(f"the tokenizer is not kept for the next run: {error}", stacklevel=2)
            return trained
    return load_tokenizer(str(kept))


@dataclass(frozen=True)
class Tokenized:
    """A token file that was written.

    Attributes:
        file: the file of ids.
        info: its sidecar.
        tokenizer: the folder of the tokenizer, where it was trained on the same text; else None.
        overrides: what to change in the recipe to train on the file.
    """

    file: Path
    info: TokenFileInfo
    tokenizer: Path | None = None
    overrides: tuple[str, ...] = ()


def tokenize(
    recipe: StudyRecipe, out: str | Path | None = None, *, on_part: Callable[[int, int], None] | None = None
) -> Tokenized:
    """Tokenise the text that ``recipe.data`` names into a token file, in bounded memory.

    A tokenizer that the recipe trains is trained on the same text first, and saved beside the file as
    ``NAME-tokenizer``. A ``data.source`` that is itself a token file, of another tool, only gets its sidecar.

    Args:
        recipe: names text and tokenizer.
        out: the file, ``NAME.bin``; by default the recipe's name in the working directory.
        on_part: called now and then with how many documents and tokens are written.

    Raises:
        HfpatchError: if there is such a file, it cannot be written, or text or tokenizer are not as the recipe says.
    """
    if recipe.data.is_token_file:
        file = Path(recipe.data.source)
        if out is not None and Path(out) != file:
            raise HfpatchError(
                f"data.source: {file} contains tokens already and gets only its sidecar; leave out --out {out}"
            )
        described = describe_token_file(file, recipe_tokenizer(recipe))
        return Tokenized(file, described, overrides=(f"data.source={file}", "data.layout=stream"))
    if recipe.data.mixture or recipe.data.format != "text":
        key, what = ("mixture", "has several") if recipe.data.mixture else ("format", "learns a part of it")
        raise HfpatchError(
            f"data.{key}: a token file is one text, all of which is learned, and this data {what}; tokenize each text "
            "by itself, whose file a mixture may name, or train on the recipe as it is"
        )
    file = Path(out or f"{recipe.name}.bin")
    check_free(file)
    folder = file.with_name(f"{file.stem}-tokenizer")
    trained = recipe.tokenizer.train_vocab_size is not None
    if trained and folder.exists():
        raise HfpatchError(f"{folder}: exists already; delete it or choose another --out")
    tokenizer = recipe_tokenizer(recipe)
    corpus = open_corpus(recipe.data, recipe.data_dir)
    texts = filtered_documents(corpus, recipe.data)
    info = write_token_file(file, texts, tokenizer, recipe.data, revision=corpus.revision, on_part=on_part)
    changes = [f"data.source={file}", "data.layout=stream", *recipe.data.reset_text()]
    if trained:
        with atomic_directory(folder) as temporary:
            tokenizer.save_pretrained(temporary)
        changes += ["tokenizer.train_vocab_size=null", f"tokenizer.path={folder}"]
    return Tokenized(file, info, folder if trained else None, tuple(changes))
