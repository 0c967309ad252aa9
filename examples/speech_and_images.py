"""Speech and images: a Whisper-shaped and a Llava-shaped model through patch, save, load and generate.

    python examples/speech_and_images.py

Both are small and random. `target_modules` chooses the tower; None is the language model, and the rest is logged as
left out.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hfpatch

IMAGE = 60  # the token in whose place a patch of the image goes


def whisper() -> Any:
    """Return a Whisper of two blocks each; in use: ``from_pretrained("openai/whisper-tiny")``."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sound = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **ids, **sound, **none)).eval()


def llava() -> Any:
    """Return a Llava of two blocks each; in use: ``from_pretrained("llava-hf/llava-1.5-7b-hf")``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    vision = CLIPVisionConfig(image_size=16, patch_size=4, **sizes)  # 16 patches
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(vocab_size=64, **sizes), vision_config=vision, image_token_index=IMAGE)
    ).eval()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return made-up sound, or an image and a text."""
    torch.manual_seed(1)
    if isinstance(model, WhisperForConditionalGeneration):
        return {"input_features": torch.randn(1, 8, 40)}
    ids = torch.tensor([[IMAGE] * 16 + [5, 6, 7]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 16, 16)}


def generated(model: Any) -> torch.Tensor:
    """Return eight greedy tokens."""
    return model.generate(**inputs(model), max_new_tokens=8, min_new_tokens=8, do_sample=False)


def through(make: Any, target: str | None, folder: Path) -> dict[str, Any]:
    """Patch a tower, move the patch off its start as training does, save, load into a new model, generate."""
    model = make()
    base = generated(model)
    hfpatch.patch(model, hfpatch.PreProjectionConfig(content_skip=True, target_modules=target))
    assert torch.equal(generated(model), base), "a new patch changes nothing"

    torch.manual_seed(2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data += 0.3 * torch.randn_like(parameter)
    hfpatch.save_patch(model, folder)
    loaded = hfpatch.load_patch(make(), folder)
    after = generated(model)
    assert torch.equal(generated(loaded), after), "the loaded patch generates something else"
    assert torch.equal(generated(hfpatch.unpatch(loaded)), base), "without the patch it is the base again"
    summary = hfpatch.patch_summary(model)
    return {"changed": not torch.equal(after, base), "trainable": summary.trainable, "left out": summary.left_out}


def main() -> dict[str, dict[str, Any]]:
    """Take both models through, with the language model and with the other tower patched."""
    cases = {
        "Whisper, decoder": (whisper, None),
        "Whisper, encoder": (whisper, r".*encoder\.layers\..*self_attn"),
        "Llava, language model": (llava, None),
        "Llava, vision tower": (llava, r".*vision_tower.*self_attn"),
    }
    with tempfile.TemporaryDirectory() as folder:
        return {name: through(*case, Path(folder) / name) for name, case in cases.items()}


if __name__ == "__main__":
    for name, seen in main().items():
        print(f"{name}: {seen}")
