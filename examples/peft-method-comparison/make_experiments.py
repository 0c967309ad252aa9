"""Write the experiments: every method with the size of LoRA of rank 32 on Llama-3.2-3B, at two learning rates."""

import json
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

import hfpatch

LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
METHODS = {
    "pre_projection": hfpatch.PreProjectionConfig(),
    "linear_pre_projection": hfpatch.PreProjectionConfig(activation="identity"),
    "nonlinear_query": hfpatch.NonlinearQueryConfig(),
    "nonlinear_lora": hfpatch.NonlinearLoraConfig(),
    "parallel_adapter": hfpatch.ParallelAdapterConfig(),
    "loreft": hfpatch.LoReFTConfig(),
}
RATES = {"": None, "-lr1e-3": 1e-3}  # PEFT's default is 1e-4


def main() -> None:
    """Write ``experiments/METHOD/NAME/adapter_config.json`` and, where the rate is not the default, its parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LLAMA)
    for method, config in METHODS.items():
        config = hfpatch.sized(config, model, parameters=LoraConfig(r=32))
        config.task_type = "CAUSAL_LM"
        for suffix, rate in RATES.items():
            folder = Path(__file__).parent / "experiments" / method / f"llama-3.2-3B-lora32-size{suffix}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "adapter_config.json").write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n")
            if rate is not None:
                params = {"optimizer_kwargs": {"lr": rate, "weight_decay": 0.1}}
                (folder / "training_params.json").write_text(json.dumps(params, indent=2) + "\n")


if __name__ == "__main__":
    main()
