"""One table of the ratios in the committed files, each with its peer; or one of these files measured again.

    python benchmarks/table.py
    python benchmarks/table.py --run training-70m-amd --data-dir DATA --out build/bench

Of each row: the file, in which numbers, the processor and its threads as the file names them, what was measured over
which peer, and the median ratio with the smallest and the largest round in brackets where the file has them. Times
are the processor's. ``--run`` repeats the command that a file names, with its output in ``--out``.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfpatch.support.files import read_json

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = ("evaluation", "training", "inference", "start")
TRAINING = {
    "a_speed": ("tokens/s of a training step", "published way"),
    "b_step": ("time of a training step", "LoRA under HF Trainer"),
    "b_step_same_trainer": ("time of a training step", "LoRA, same loop"),
    "c_bound": ("time of a training step", "arithmetic bound"),
}
COMMITTED_DATA = "data"  # how the committed commands name the folder of local data
Row = tuple[str, str, str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="the name of a file, without .json, whose benchmark is run again")
    parser.add_argument("--data-dir", help="the folder with local copies of hub data, for --run")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where --run writes")
    arguments = parser.parse_args()
    files = {path.stem: path for folder in FOLDERS for path in sorted((RESULTS / folder).glob("*.json"))}
    runnable = {name: path for name, path in files.items() if command_of(read_json(path))}
    if arguments.run is None:
        print_table([row for name, path in files.items() for row in rows_of(name, read_json(path))])
        return
    if arguments.run not in runnable:
        made = files.get(arguments.run)
        why = f"{made} was put together from the output of several commands" if made is not None else "no such file"
        parser.error(f"--run {arguments.run}: {why}; one of {', '.join(runnable)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out / f"{arguments.run}.json"
    command = command_again(command_of(read_json(runnable[arguments.run])), out, arguments.data_dir)
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True)
    print_table(list(rows_of(arguments.run, read_json(out))))


def command_of(report: dict[str, Any]) -> str:
    """Return the command that a file names, if it is that of a benchmark."""
    command = str(provenance_of(report).get("command") or "")
    return command if (Path(__file__).parent / command.split(" ")[0]).is_file() else ""


def provenance_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return where a file is from; of one that several calls made, where its last rows are from."""
    made = report.get("provenance", {})
    return dict(made[-1] if isinstance(made, list) else made)


def command_again(command: str, out: Path, data_dir: str | None) -> list[str]:
    """Return a committed command with another output, and another folder for the data if there is one."""
    program, *words = shlex.split(command)
    for index, word in enumerate(words):
        if words[index - 1] in ("--json", "--out"):
            words[index] = str(out)
        elif data_dir and (word == COMMITTED_DATA or word.startswith(f"{COMMITTED_DATA}/")):
            words[index] = data_dir + word.removeprefix(COMMITTED_DATA)
    return [sys.executable, str(Path(__file__).parent / program), *words]


def rows_of(name: str, report: dict[str, Any]) -> Iterator[Row]:
    """Yield the ratios of a file: its name, dtype and place, what was measured, over what, and the ratio."""
    facts = provenance_of(report)
    where = f"{facts.get('processor') or 'unnamed processor'}, {facts.get('threads')} threads"
    settings = report.get("settings", {})
    numbers = settings.get("autocast") or settings.get("dtype", "float32")
    for row in report.get("scoring", ()):
        cpu, peaks = row["cpu"], row.get("peak_bytes", {})
        what, numbers = f"{row['shape']} {row['task']}", row.get("dtype", numbers)
        yield name, numbers, where, f"{what}: times faster", cpu["best_peer"], spread(cpu, "times_faster")
        yield name, numbers, where, f"{what}: time", "arithmetic bound", f"{cpu['ratio_to_bound']:.2f}"
        for peer in (peer for peer in peaks if peer != "hfpatch"):
            yield name, numbers, where, f"{what}: times less memory", peer, f"{peaks[peer] / peaks['hfpatch']:.1f}"
    shape = Path(settings.get("model") or settings.get("shape", "")).name
    for key, (what, peer) in TRAINING.items():
        if key in report.get("ratios", {}):
            yield name, numbers, where, f"{shape} {what}", peer, spread(report["ratios"][key], "median")
    memory = report.get("memory", {})
    for peer in (peer for peer in memory if peer != "ours"):
        yield name, numbers, where, f"{shape} peak memory of a step", peer, f"{memory['ours'] / memory[peer]:.2f}"
    for size, peaks in report.get("extra_bytes", {}).items():
        where = f"{report['processor']}, {report['threads']} threads"
        share = peaks["ours"] / peaks["published"]
        yield name, numbers, where, f"{size} peak memory of a step", "published", f"{share:.2f}"
    for what, value in report.get("ratios", {}).items():
        if isinstance(value, float):
            yield name, numbers, where, f"{what}: CPU time", "minimal script", f"{value:.2f}"
    for row in report.get("rows", ()):
        if "over_multiply_adds" in row and row["variant"].startswith("pre") and "hand" not in row["variant"]:
            what = f"{row['shape']} {row['what']}, {row['variant']}: time"
            yield name, numbers, where, what, "bare model", f"{row['ratio']:.2f}"
            yield name, numbers, where, what, "its multiply-adds", f"{row['over_multiply_adds']:.2f}"


def spread(values: dict[str, float], key: str) -> str:
    return f"{values[key]:.2f} [{values['lowest']:.2f}, {values['highest']:.2f}]"


def print_table(rows: list[Row]) -> None:
    """Print rows under their headings, as wide as the widest cell of each column."""
    table = [("file", "numbers", "where", "what", "over", "ratio"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
