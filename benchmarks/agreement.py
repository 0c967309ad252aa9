"""Whether hfpatch's scorer and lm-eval's own Hugging Face model agree on every request of the real tasks.

    python benchmarks/agreement.py --data-dir DATA --out results/evaluation-agreement.json
    python benchmarks/agreement.py --data-dir DATA --families gpt_neox --requests 32

Small random-weight models with the tokenizer's whole vocabulary, bare and patched, of a family each with rotary, with
learned, with sliding-window positions and with recurrent layers. Counted are log-likelihoods further apart than
1e-4 + 1e-6 of their size, greedy decisions that differ, and documents of which another choice is the likeliest. The
file grows row by row; a later call at the same commit adds what is not in it yet.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from evaluation import OWN, agreement, make_requests, make_scorer, peer_name, tokenizer_of

LLAMA = {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 2048}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"intermediate_size": 128},
    "gpt2": {"n_positions": 2048},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 64},
    "falcon_h1": {**LLAMA, **MAMBA},
}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1}


def main() -> None:
    arguments = parse_arguments()
    from hfpatch.support.files import write_json
    from hfpatch.support.provenance import Clock, provenance

    clock, rows = Clock(), earlier_rows(arguments.out)
    for task in arguments.tasks:
        requests = make_requests(arguments, task)
        for family in arguments.families:
            for patched in (False, True):
                what = {"task": task, "family": family, "patched": patched, "requests": len(requests)}
                what |= {
                    "peer": peer_name(arguments.peer),
                    "tokenizer": Path(arguments.tokenizer or tokenizer_of(arguments)).name,
                }
                if any(what.items() <= row.items() for row in rows):
                    continue
                rows.append({**what, **compare(arguments, family, patched, requests)})
                print(rows[-1], flush=True)
                if arguments.out:
                    write_json(arguments.out, {"provenance": provenance(clock), "rows": rows})


def earlier_rows(out: Path | None) -> list[dict[str, Any]]:
    """Return the rows that earlier calls at this commit left in the file."""
    from hfpatch.support.files import read_json
    from hfpatch.support.provenance import checkout_state

    if out is None or not out.is_file():
        return []
    earlier = read_json(out)
    there, here = earlier["provenance"]["commit"], checkout_state()[0]
    if there != here:
        raise SystemExit(f"{out}: made at commit {there}, this is {here}; choose another --out")
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"type": lambda text: text.split(","), "metavar": "A,B"}
    parser.add_argument("--data-dir", type=Path, help="a folder with local copies of hub data; the hub if not given")
    parser.add_argument("--tokenizer", help="an id, a folder or tinyworld; DATA_DIR/gpt-neox-tokenizer")
    parser.add_argument("--tasks", **names, default=["lambada_openai", "hellaswag", "arc_easy"])
    parser.add_argument("--families", **names, default=list(FAMILIES))
    parser.add_argument("--requests", type=int, default=10**9, help="the first so many requests of each task; all")
    parser.add_argument("--peer", default="1", help="lm-eval's batch size; with 1 it pads nothing")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def compare(arguments: argparse.Namespace, family: str, patched: bool, requests: list[Any]) -> dict[str, Any]:
    """Score all requests both ways on one model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(arguments))
    model = make_model(family, patched, len(tokenizer))
    ours, theirs = (make_scorer(name, model, tokenizer)(requests) for name in (OWN, peer_name(arguments.peer)))
    return {**agreement(ours, theirs), "other_choices": other_choices(requests, ours, theirs)}


def make_model(family: str, patched: bool, vocabulary: int) -> Any:
    import torch
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM

    from hfpatch import PreProjectionConfig, patch

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.1} if family == "gpt2" else SIZES
    config = AutoConfig.for_model(family, **sizes, **FAMILIES[family], vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if patched:
        recurrent = family == "falcon_h1"
        patch(model, LoraConfig(target_modules=["q_proj"]) if recurrent else PreProjectionConfig(content_skip=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def other_choices(requests: list[Any], ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> int:
    """Return the number of documents of which the two scorers take another ending for the likeliest."""
    documents: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        documents.setdefault(request.doc_id, []).append(index)
    return sum(
        max(members, key=lambda index: ours[index][0]) != max(members, key=lambda index: theirs[index][0])
        for members in documents.values()
    )


if __name__ == "__main__":
    main()
