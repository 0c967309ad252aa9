"""What `make core` runs where only the core of hfpatch is installed, from its wheel: adapters, without hfpatch[lab]."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAB = ("lm_eval", "datasets", "scipy", "matplotlib", "pandas", "pyarrow")
BROUGHT_BY_OTHERS = ("typer", "rich")  # transformers installs both for a command of its own; the core imports neither
LAB_OF_HFPATCH = (
    "analysis",
    "data",
    "evaluation",
    "integrations",
    "reporting",
    "results",
    "runs",
    "sharing",
    "training",
)


def main() -> None:
    """Run the README's example, PEFT's life cycle, the promises and an export."""
    assert [name for name in LAB if importlib.util.find_spec(name) is not None] == []
    import hfpatch

    assert not Path(hfpatch.__file__).is_relative_to(ROOT / "hfpatch"), "the wheel is to be tested, not the clone"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        readme_example()
        base = tiny_model("base")
        peft_life_cycle(base)
        report = hfpatch.check(base, hfpatch.NonlinearQueryConfig())
        assert report.passed, str(report)
        exported()
        command_line()
    imported = {name.split(".")[1] for name in sys.modules if name.startswith("hfpatch.")}
    assert imported.isdisjoint(LAB_OF_HFPATCH), imported
    assert [name for name in BROUGHT_BY_OTHERS if name in sys.modules] == []
    print(f"core: all passed with {len(list(distributions()))} packages")


def readme_example() -> None:
    """Run the ten lines as they stand in the README."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
    assert Path("my-patch/patch.json").is_file()


def tiny_model(folder: str):  # noqa: ANN201  # a transformers model
    """Return a random Llama of two blocks, saved to a folder with an embedded tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from hfpatch.tinyworld import checkpoint

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("gpt-neox"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def peft_life_cycle(base) -> None:  # noqa: ANN001
    """Train one step inside PEFT, save, load: the same logits. The base is left without adapters."""
    import torch
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    import hfpatch

    tokens = torch.arange(16)[None]
    model = get_peft_model(base, hfpatch.PreProjectionConfig(content_skip=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained("adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
    with torch.no_grad():
        trained, again = model(tokens).logits, loaded(tokens).logits
        with model.disable_adapter():
            before = model(tokens).logits
    torch.testing.assert_close(again, trained)
    assert not torch.allclose(trained, before)
    model.unload()


def exported() -> None:
    """Export the adapter and load the folder with transformers alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hfpatch.export import export_patch

    export_patch(Path("adapter"), Path("exported"), model="base")
    model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True).eval()
    patched = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, patched(tokens).logits)


def command_line() -> None:
    """A command that needs the lab says in one line what to install."""
    command = [Path(sys.executable).parent / "hfpatch", "compare", "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line == "hfpatch: error: this needs lm_eval, which is not installed; pip install 'hfpatch[lab]'"


if __name__ == "__main__":
    main()
