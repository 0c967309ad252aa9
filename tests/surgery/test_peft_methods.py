"""Every method of PEFT, alone and in a stack; docs/peft-methods.md must say what comes out here."""

import zlib
from importlib.metadata import version

import peft_methods
import pytest
import torch

PAGE = peft_methods.FILE.read_text(encoding="utf-8")
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.splitlines() if line.startswith("| `")}


@pytest.mark.parametrize("method", peft_methods.METHODS)
def test_the_page_says_what_happens(method, tmp_path):
    row = peft_methods.row_of(method, tmp_path)
    assert f"| {' | '.join(row.values())} |" == ROWS[row["method"]]


@pytest.mark.skipif(f"PEFT {version('peft')}" not in PAGE, reason="another version of PEFT has other methods")
def test_the_page_has_every_method():
    assert len(ROWS) == len(peft_methods.METHODS)
    assert PAGE.startswith(peft_methods.written([]).rstrip())


def noise_in(model):
    """Move every floating tensor that is trained off its initial value."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.data += 0.05 * torch.randn(p.shape, generator=generator).to(p)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = [("gpt2", "fp32"), ("gpt_neox", "bf16")]  # Llama in fp32 is in the page


@pytest.mark.parametrize(("case", "dtype"), KINDS)
def test_saving_and_loading_is_the_identity(case, dtype, tmp_path):
    """Every method that is not refused: every tensor in its own dtype, and the logits."""
    done = set()
    for method in peft_methods.METHODS:
        model = peft_methods.patched(method, case, "alone", DTYPES[dtype])
        if not isinstance(model, str):
            noise_in(model)
            peft_methods.reload(model, case, tmp_path / method)
            done.add(method)
    column = peft_methods.COLUMNS.index("on Conv1D" if case == "gpt2" else "alone")
    assert len(done) == sum(row.split(" | ")[column] == "yes" for row in ROWS.values())
