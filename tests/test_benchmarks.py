"""Every benchmark runs at its smallest size and prints what its users read."""

import json
import subprocess
import sys
from pathlib import Path

SIZES = ["--hidden", "32", "--layers", "1", "--heads", "4", "--vocabulary", "64", "--rows", "1", "--length", "8"]


def test_step_time_gives_a_ratio_for_every_method():
    script = Path(__file__).parent.parent / "benchmarks" / "step_time.py"
    command = [sys.executable, str(script), *SIZES, "--rounds", "2", "--json"]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = {row["method"]: row for row in printed["rows"]}
    assert rows["lora"]["ratio"] == 1
    assert rows["pre_projection"]["trainable"] == 2 * 32 * 40
    assert rows["pre_projection_skip"]["trainable"] == 2 * 32 * 40 + 32 * 32
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows.values())


def test_query_step_gives_a_ratio_for_every_query_path():
    script = Path(__file__).parent.parent / "benchmarks" / "query_step.py"
    command = [sys.executable, str(script), *SIZES, "--rounds", "2", "--json"]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = {row["variant"]: row for row in printed["rows"]}
    assert rows["linear"]["ratio"] == 1
    assert rows["linear"]["parameters"] == 12 * 32 * 32 + 3 * 32
    assert rows["nonlinear"]["parameters"] == rows["nonlinear_fused"]["parameters"] == 12 * 32 * 32 + 5 * 32
    assert rows["identity"]["parameters"] == 11 * 32 * 32 + 3 * 32
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows.values())
