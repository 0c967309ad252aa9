"""A process in which neither hfpatch nor PEFT can be imported: what it computes with an export.

It is started once and answers one request after the other, since importing transformers takes longer than most answers.
"""

import atexit
import functools
import json
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file

PROGRAM = """
import functools, json, sys, traceback

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        absent = name.split(".")[0] in ("hfpatch", "peft")
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
dynamic_module_utils.check_imports = functools.cache(dynamic_module_utils.check_imports)  # asked twice of each file
torch.set_num_threads(int(sys.argv[1]))

def answer(request):
    folder, given = request["folder"], load_file(request["file"])
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval().requires_grad_(False)
    for parameter in model.parameters():  # kernels are chosen by the address, too
        parameter.data = parameter.data.clone()
    found, tokens = {}, given["tokens"]
    with torch.no_grad():
        torch.manual_seed(0)
        found["logits"] = model(tokens, use_cache=False).logits
    if request["new_tokens"]:
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), output_logits=True, return_dict_in_generate=True,
            max_new_tokens=request["new_tokens"], do_sample=False, eos_token_id=None, pad_token_id=0,
        )
        found |= {"written": out.sequences, "steps": torch.stack(out.logits)}
    if "trained" in given:
        parts = {name: p for name, p in model.named_parameters() if "hfpatch_" in name}
        for parameter in model.parameters() if request["training_mode"] else parts.values():
            parameter.requires_grad = True
        torch.manual_seed(0)
        logits = model.train(request["training_mode"])(given["trained"], use_cache=False).logits
        (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
        found |= {f"gradient {name}": p.grad for name, p in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, request["file"])
    assert not {"hfpatch", "peft"} & set(sys.modules)
    return {"dtypes": {name: str(p.dtype) for name, p in model.named_parameters()}}

for line in sys.stdin:
    try:
        reply = answer(json.loads(line))
    except Exception:
        reply = {"error": traceback.format_exc()}
    print("reply " + json.dumps(reply), flush=True)
"""


@functools.cache
def _process():
    arguments = [sys.executable, "-c", PROGRAM, str(torch.get_num_threads())]
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    atexit.register(process.kill)
    return process


def computed(folder, tokens, *, new_tokens=0, trained=None, training_mode=False):
    """Return what the other process computes with an export: tensors by name, and the dtypes of its parameters.

    Args:
        folder: of the export.
        tokens: what ``logits`` are computed of.
        new_tokens: how many tokens are ``written`` after them, with the logits of these ``steps``.
        trained: tokens of one backward pass, which gives ``gradient NAME`` of every part.
        training_mode: whether that pass is in training mode, and of the base's parameters, too.
    """
    file = folder / "exchange.safetensors"
    save_file({"tokens": tokens} | ({} if trained is None else {"trained": trained.clone()}), file)
    request = {"folder": str(folder), "file": str(file), "new_tokens": new_tokens, "training_mode": training_mode}
    process = _process()
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = next(line for line in process.stdout if line.startswith("reply "))
    reply = json.loads(line.removeprefix("reply "))
    assert "error" not in reply, reply["error"]
    tensors = load_file(file)
    file.unlink()
    return tensors, reply["dtypes"]
