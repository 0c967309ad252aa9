"""A program for several processes: each loads the same text, and notes how often it tokenised and what it got.

Started for each rank, as torchrun does: tokenise_on_processes.py TEXT TOKENIZER OUT
"""

import json
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from hfpatch.data import load
from hfpatch.recipes.data import DataSettings
from hfpatch.training.processes import start_processes


def run(text: str, tokenizer: str, out: Path) -> None:
    """Load the text in both ways, the first process of the machine before the others."""
    state, calls = start_processes(), []
    write, layouts = load.write_token_file, {}
    load.write_token_file = lambda *args, **options: calls.append("write_token_file") or write(*args, **options)
    for layout in ("packed", "stream"):
        settings = DataSettings(source=text, layout=layout, block_size=8)
        with state.local_main_process_first():
            blocks = load.load_blocks(settings, AutoTokenizer.from_pretrained(tokenizer), cache_dir=out / "cache")
        rows = blocks.rows if isinstance(blocks.rows, np.memmap) else blocks.rows.base
        layouts[layout] = {"sha256": blocks.sha256, "mapped": isinstance(rows, np.memmap)}
    (out / f"{state.process_index}.json").write_text(json.dumps({"calls": calls, **layouts}))
    state.wait_for_everyone()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
