import json

from hfpatch.reporting import write_report
from hfpatch.reporting.cards import run_card
from hfpatch.surgery.manifest import FORMAT


def patch_of(run_dir, method, seed):
    folder = run_dir / "runs" / method / f"seed-{seed}" / "patch"
    folder.mkdir(parents=True, exist_ok=True)
    base = {"name": "EleutherAI/pythia-160m", "class": "X", "model_type": "gpt_neox"}
    manifest = {
        "format": FORMAT,
        "base": base | {"fingerprint": {"dtypes": ["float32"], "exact": "f"}},
        "active": ["lora"],
        "adapters": [{"name": "lora", "method": "lora", "sha256": "a" * 64}],
    }
    (folder / "patch.json").write_text(json.dumps(manifest))
    (folder / "README.md").write_text("old")
    return folder


def test_a_report_puts_each_patchs_results_in_its_card(run_dir):
    folders = [patch_of(run_dir, "lora", seed) for seed in (0, 1)]
    write_report(run_dir)
    first, second = ((folder / "README.md").read_text() for folder in folders)
    assert "| tinyworld_cloze | acc | 400 | 40.0 % | 41.0 % | +1.5 [−2.6, 5.6] points | not decided |" in first
    assert "| 42.0 % |" in second
    for text in ("tinyworld/shifted, 2,000 documents", "Trained parameters: 81,920", "Seed: 0", "Batch plan, seed 0"):
        assert text in first
    assert "Batch plan, seed 1" not in first
    assert "lora has 2.4 % more trainable parameters" in first


def test_a_broken_patch_keeps_its_card_and_no_patch_gets_none(run_dir):
    write_report(run_dir)
    assert not list(run_dir.rglob("README.md"))
    folder = patch_of(run_dir, "lora", 0)
    (folder / "patch.json").write_text("{")
    write_report(run_dir)
    assert (folder / "README.md").read_text() == "old"


def test_the_card_of_a_run_has_answer_table_and_how_to_load(results):
    card = run_card(results)
    assert card.startswith("---\nlibrary_name: peft\n")
    assert all(
        text in card for text in ("pre_projection_skip beats baseline", "| lora | 41.5 % |", "is a LoRA", "load_patch")
    )
