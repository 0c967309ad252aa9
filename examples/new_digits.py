"""A vision transformer of the digits 0 to 4 learns 5 to 9: a pre-projection, its matched LoRA, its linear control.

    python examples/new_digits.py

The body is pretrained on scikit-learn's digits 0 to 4 and frozen; each method trains its adapter and a new
head on few images of 5 to 9. Ten seeds draw the training images, the head and the adapters, the same for every method.
The differences of the paired accuracies have 95 % t intervals.
"""

import copy
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

import hfpatch

SEEDS = 10
TRAIN = 100  # images of the new digits; the others are the test
RATES = (3e-3, 1e-2, 3e-2, 1e-1)  # each method takes the best on images that no test has
TUNING = 100


def digits(wanted: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images ``(n, 1, 8, 8)`` in [-1, 1] and labels from 0 of some digits."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)
    chosen = (labels >= wanted.start) & (labels < wanted.stop)
    return images[chosen], labels[chosen] - wanted.start


def fit(model: Any, images: torch.Tensor, labels: torch.Tensor, *, steps: int, rate: float, seed: int) -> None:
    """Train what is trainable with AdamW and a falling rate on batches of 32."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(images), (32,), generator=generator)
        cross_entropy(model(pixel_values=images[rows]).logits, labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of right answers."""
    return float((model(pixel_values=images).logits.argmax(-1) == labels).float().mean())


def pretrained(steps: int) -> Any:
    """Return a small vision transformer that has learnt the digits 0 to 4."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=5,
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    fit(model, *digits(range(5)), steps=steps, rate=3e-3, seed=0)
    return model


def adapted(base: Any, config: Any, data: tuple[torch.Tensor, ...], *, steps: int, rate: float, seed: int) -> Any:
    """Return the base with a method's adapter and a new head, both trained."""
    model = copy.deepcopy(base)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.weight, std=0.02)
    torch.nn.init.zeros_(model.classifier.bias)
    config = copy.deepcopy(config)
    config.modules_to_save = ["classifier"]
    if hasattr(config, "seed"):
        config.seed = seed
    model = get_peft_model(model, config)
    fit(model, *data, steps=steps, rate=rate, seed=seed)
    return model


def main(seeds: int = SEEDS, steps: int = 150, pretraining: int = 400) -> dict[str, Any]:
    """Adapt with every method and seed; return accuracies, rates, sizes and the paired differences."""
    base = pretrained(pretraining)
    images, labels = digits(range(5, 10))

    # Methods of the same size
    pre = hfpatch.PreProjectionConfig(expansion=0.25)
    targets = [name for name, _ in base.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
    added = hfpatch.count_added(base, [pre])
    rank = hfpatch.match_lora_rank(base, budget=added, target_modules=targets)
    methods = {
        "pre-projection": pre,
        "matched LoRA": LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets),
        "linear control": hfpatch.PreProjectionConfig(expansion=0.25, activation="identity"),
    }
    sizes = {name: hfpatch.count_added(base, [config]) for name, config in methods.items()}

    # The rate of each method, on images that no later training or test has
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    tuning, rest = order[: 2 * TUNING], order[2 * TUNING :]
    learn, judge = ((images[part], labels[part]) for part in (tuning[:TUNING], tuning[TUNING:]))
    rates = {}
    for name, config in methods.items():
        tried = {}
        for rate in RATES:
            tried[rate] = accuracy(adapted(base, config, learn, steps=steps, rate=rate, seed=100), *judge)
        rates[name] = max(tried, key=lambda rate: tried[rate])

    # Every seed: other training images, another head, other adapters; the same for all methods
    scores: dict[str, list[float]] = {name: [] for name in methods}
    for seed in range(seeds):
        drawn = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed + 1))]
        learn, judge = ((images[part], labels[part]) for part in (drawn[:TRAIN], drawn[TRAIN:]))
        for name, config in methods.items():
            model = adapted(base, config, learn, steps=steps, rate=rates[name], seed=seed)
            scores[name].append(accuracy(model, *judge))

    # Paired over seeds: mean difference and its 95 % t interval
    differences = {}
    for other in ("matched LoRA", "linear control"):
        pairs = torch.tensor(scores["pre-projection"]) - torch.tensor(scores[other])
        mean, error = float(pairs.mean()), float(pairs.std() / len(pairs) ** 0.5)
        half = float(stats.t.ppf(0.975, len(pairs) - 1)) * error
        differences[other] = (mean, mean - half, mean + half)
    return {"sizes": sizes, "rates": rates, "scores": scores, "differences": differences}


if __name__ == "__main__":
    results = main(*map(int, sys.argv[1:]))
    sizes, rates = results["sizes"], results["rates"]
    for name, values in results["scores"].items():
        mean = sum(values) / len(values)
        print(f"{name}: accuracy {mean:.3f}, {sizes[name]:,} added parameters, rate {rates[name]:g}")
    for other, (mean, low, high) in results["differences"].items():
        print(f"pre-projection minus {other}: {mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}")
