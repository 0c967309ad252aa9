"""How cost grows: scoring, a training step, a comparison's overhead and its report, with peers where the work is equal.

    python benchmarks/growth.py --part scoring --minutes 8 --json growth.json
    python benchmarks/growth.py --minutes 15 --json growth.json
    python benchmarks/growth.py --draw growth.json

Every point is measured in a process of its own: CPU seconds on one thread, the least of the rounds, and peak memory
above what is there before. Random weights of Pythia's shapes, random tokens.

    scoring    documents of 80 words with one word to score, over their number and over the model's size, in bfloat16;
               beside lm-eval's HFLM (batches of 8)
    training   a step of LoRA on one row, over its tokens and over the model's size, in float32; beside HF Trainer
    compare    everything that ``hfpatch compare`` does but training and scoring, over methods and over seeds: complete
               records take the place of both
    report     ``hfpatch report`` on these comparisons, over their runs

The smallest points of all curves come first. What does not fit ``--minutes`` is listed as not measured; the JSON keeps
what it has of other parts. ``--draw`` writes the figure beside the JSON, and the table of exponents between two lines
of results/README.md: slopes by least squares on logarithmic axes, of all points and of the two largest, where fixed
costs weigh least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

OWN, HFLM, TRAINER = "hfpatch", "lm-eval", "HF Trainer"
SHAPES = {  # Pythia's: hidden, layers, heads
    "14m": (128, 6, 4),
    "31m": (256, 6, 8),
    "70m": (512, 6, 8),
    "160m": (768, 12, 12),
    "410m": (1024, 24, 16),
    "1b": (2048, 16, 8),
}
VOCABULARY = 50304
DOCUMENTS = (100, 300, 1_000, 3_000, 10_000)
BLOCKS = (128, 256, 512, 1_024, 2_048, 4_096)
COUNTS = (1, 5, 25, 100)  # of methods with 4 seeds, of seeds with 4 methods: 4 to 400 runs
RUN_DOCUMENTS, RUN_STEPS = 50, 20  # of a run in a comparison: documents of each of four tasks, steps
CURVES = {  # of each part, with what it grows over
    "scoring": {"documents": DOCUMENTS, "parameters": tuple(SHAPES)},
    "training": {"tokens of a row": BLOCKS, "parameters": tuple(SHAPES)},
    "compare": {"methods": COUNTS, "seeds": COUNTS},
    "report": {"methods": COUNTS, "seeds": COUNTS},
}
WHO = {"scoring": (OWN, HFLM), "training": (OWN, TRAINER), "compare": (OWN,), "report": (OWN,)}
README = Path(__file__).parents[1] / "results" / "README.md"
BEGIN, END = "<!-- growth: begin -->", "<!-- growth: end -->"
MARGIN = 1.3  # how much longer than its curve foretells a point may take
START_S = 10.0  # of a process, idle


class Point(NamedTuple):
    """What one process measures: ``at`` is a number, or the name of a shape."""

    part: str
    curve: str
    at: int | str
    who: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(CURVES), help="only this part")
    parser.add_argument("--minutes", type=float, default=15.0, help="when to end")
    parser.add_argument("--rounds", type=int, default=2, help="how often each point is measured, if there is time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--largest", type=int, default=10**9, help="leave out larger points (parameters in millions)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--draw", type=Path, help="draw this file instead")
    parser.add_argument("--readme", type=Path, default=README, help="where --draw writes the table")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw, arguments.readme)
    elif arguments.point:
        print(json.dumps(measure(Point(*json.loads(arguments.point)), arguments)))
    else:
        with tempfile.TemporaryDirectory(prefix="growth-") as scratch:
            arguments.scratch = Path(scratch)
            run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Measure round by round until the time is over; write the file after every point."""
    from hfpatch.support.provenance import Clock, provenance

    clock, deadline = Clock(), time.monotonic() + 60 * arguments.minutes
    parts = [arguments.part] if arguments.part else list(CURVES)
    kept = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    points = [point for point in ordered(parts) if millions(point) <= arguments.largest]
    measured: dict[Point, dict[str, Any]] = {}
    left_out: dict[Point, str] = {}
    for turn in range(arguments.rounds):
        for point in points if turn == 0 else list(measured):
            expected = foretold(point, measured, left_out) if turn == 0 else MARGIN * measured[point]["wall_s"]
            if (left := deadline - time.monotonic()) < expected:
                if turn == 0:
                    left_out[point] = "not enough time left"
                continue
            begun = time.monotonic()
            try:
                made = in_process(point, arguments, left)
            except (subprocess.SubprocessError, OSError) as error:
                error_lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                print(f"{' '.join(map(str, point))}: {error_lines[-1]}", file=sys.stderr)
                if turn == 0:
                    left_out[point] = type(error).__name__
                continue
            made["wall_s"] = time.monotonic() - begun
            if point in measured:
                made["seconds"] = measured[point]["seconds"] + made["seconds"]
                made["peak_bytes"] = min(measured[point]["peak_bytes"], made["peak_bytes"])
            measured[point] = made
            print(f"{' '.join(map(str, point)):<48}{min(made['seconds']):>9.2f} s{made['peak_bytes'] / 1e6:>9.0f} MB")
            if arguments.json:
                write(arguments.json, kept, parts, measured, left_out, provenance(clock))
    if arguments.json:
        write(arguments.json, kept, parts, measured, left_out, provenance(clock))
    for point, why in left_out.items():
        print(f"not measured: {' '.join(map(str, point))} ({why})")


def ordered(parts: list[str]) -> list[Point]:
    """Return all points, the smallest of every curve first, peers one after the other."""
    curves = [[(part, curve, at) for at in sizes] for part in parts for curve, sizes in CURVES[part].items()]
    ranks = zip_longest(*curves)
    return [Point(*one, who) for rank in ranks for one in rank if one is not None for who in WHO[one[0]]]


def millions(point: Point) -> float:
    """Return a point's size, a shape's in millions of parameters, as its name says."""
    if isinstance(point.at, int):
        return point.at
    return float(point.at[:-1]) * (1000 if point.at.endswith("b") else 1)


def foretold(point: Point, measured: dict[Point, dict[str, Any]], left_out: dict[Point, str]) -> float:
    """Return the seconds that a point may take: what starting takes, and its curve's last time as its size grows."""
    curve = (point.part, point.curve, point.who)
    if any((other.part, other.curve, other.who) == curve for other in left_out):
        return math.inf
    same = [other for other in measured if (other.part, other.curve, other.who) == curve]
    if not same:
        return START_S
    last = max(same, key=millions)
    work = max(0.0, measured[last]["wall_s"] - START_S)
    return MARGIN * (START_S + work * millions(point) / millions(last))


def in_process(point: Point, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Measure a point in a process of its own, which is ended after some seconds."""
    command = [sys.executable, __file__, "--point", json.dumps(point), "--threads", str(arguments.threads)]
    command += ["--scratch", str(arguments.scratch)]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(arguments.threads)}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "env": {**os.environ, **quiet}}
    done = subprocess.run(command, timeout=seconds, **options)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def write(
    path: Path,
    kept: dict[str, Any],
    parts: list[str],
    measured: dict[Point, dict[str, Any]],
    left_out: dict[Point, str],
    made_by: dict[str, Any],
) -> None:
    """Write all points, and those of other parts that the file had."""
    from hfpatch.support.files import write_json

    rows = [{**point._asdict(), **values} for point, values in measured.items()]
    missing = [{**point._asdict(), "why": why} for point, why in left_out.items()]
    every = [*(row for row in kept.get("points", ()) if row["part"] not in parts), *rows]
    report = {
        "points": every,
        "not_measured": [*(row for row in kept.get("not_measured", ()) if row["part"] not in parts), *missing],
        "exponents": exponents(every),
        "provenance": {**kept.get("provenance", {}), **dict.fromkeys(parts, made_by)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)


def exponents(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the slope of each curve on logarithmic axes: of all its points, and of the two largest."""
    rows = []
    for key, curve in by_curve(points).items():
        series = {"seconds": [min(point["seconds"]) for point in curve]}
        series["peak_bytes"] = [point["peak_bytes"] for point in curve]
        for stage in curve[0].get("stages", {}):
            series[stage] = [point["stages"][stage] for point in curve]
        for what, values in series.items():
            sizes = [point["x"] for point in curve]
            if len(curve) > 1 and min(values) > 0:
                slope = {"all": power(sizes, values), "largest": power(sizes[-2:], values[-2:])}
                span = {"smallest": sizes[0], "at_most": sizes[-1], "from": values[0], "to": values[-1]}
                rows.append({**key._asdict(), "what": what, **slope, **span})
    return rows


class Curve(NamedTuple):
    """The points of one line in the figure."""

    part: str
    curve: str
    who: str


def by_curve(points: list[dict[str, Any]]) -> dict[Curve, list[dict[str, Any]]]:
    curves: dict[Curve, list[dict[str, Any]]] = {}
    parts = list(CURVES)
    for point in sorted(points, key=lambda point: (parts.index(point["part"]), point["curve"], point["x"])):
        curves.setdefault(Curve(point["part"], point["curve"], point["who"]), []).append(point)
    return curves


def power(sizes: list[float], values: list[float]) -> float:
    """Return the exponent p of the power law c·sizeᵖ that is nearest on logarithmic axes, by least squares."""
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, values))).slope


def measure(point: Point, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a point's size as a number, its seconds and its peak memory."""
    import torch

    torch.set_num_threads(arguments.threads)
    if point.part == "scoring":
        return measure_scoring(point)
    if point.part == "training":
        return measure_training(point)
    return measure_runs(point, arguments.scratch)


@contextlib.contextmanager
def watched(measured: dict[str, Any]) -> Iterator[None]:
    """Add the CPU seconds of a block to those of a point, and its peak memory above what lies in memory before."""
    from training import give_back_memory

    from hfpatch.training.hardware import peak_memory_bytes, reset_peak_memory, resident_memory_bytes

    give_back_memory()
    reset_peak_memory()
    memory, begun = resident_memory_bytes(), time.process_time()
    yield
    measured["seconds"] = [time.process_time() - begun]
    measured["peak_bytes"] = peak_memory_bytes() - memory


def make_model(shape: str, dtype: str) -> Any:
    """Return a GPT-NeoX with random weights, and its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    hidden, layers, heads = SHAPES[shape]
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden,
        vocab_size=VOCABULARY, max_position_embeddings=max(BLOCKS), bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def measure_scoring(point: Point) -> dict[str, Any]:
    from evaluation import make_scorer
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer

    from hfpatch.evaluation.harness import quiet
    from hfpatch.tinyworld import checkpoint

    of_size = point.curve == "parameters"
    model = make_model(str(point.at) if of_size else "14m", "bfloat16").eval()
    tokenizer, rng = AutoTokenizer.from_pretrained(checkpoint("gpt-neox")), random.Random(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
    asked = []
    for number in range(DOCUMENTS[0] if of_size else int(point.at)):
        text = " ".join(rng.choices(words, k=min(300, max(10, int(rng.lognormvariate(4.2, 0.6))))))
        asked.append(Instance("loglikelihood", {}, (text, f" {rng.choice(words)}"), 0, ("growth", number, 1)))
    scorer = make_scorer("hfpatch" if point.who == OWN else "hflm-8", model, tokenizer)
    measured = {"x": sum(value.numel() for value in model.parameters()) if of_size else len(asked)}
    with quiet():
        scorer(asked[:16])
        with watched(measured):
            scorer(asked)
    return measured


def measure_training(point: Point) -> dict[str, Any]:
    """Measure the second step's time and the third one's memory: the first prepares, hfpatch's last one saves."""
    import numpy as np
    from training import Data, run_variant
    from transformers import TrainerCallback

    from hfpatch.data.blocks import blocks_from_stream
    from hfpatch.data.tokenizer import TokenStream
    from hfpatch.recipes.data import DataSettings
    from hfpatch.surgery.methods import build_method
    from hfpatch.surgery.patch import patch

    of_size = point.curve == "parameters"
    model, length = make_model(str(point.at) if of_size else "14m", "float32"), 512 if of_size else int(point.at)
    parameters = sum(value.numel() for value in model.parameters())
    patch(model, build_method(model, {"lora": [{"type": "lora", "r": 16}]}, "lora").configs)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, length).astype(np.uint16)
    settings = DataSettings(source="made-up", block_size=length)
    blocks = blocks_from_stream(TokenStream(tokens, np.array([length])), settings, pad_token_id=0)
    measured: dict[str, Any] = {"x": parameters if of_size else length}
    taken: list[dict[str, Any]] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.watch = contextlib.ExitStack()
            taken.append({})
            if len(taken) == 2:
                taken[-1]["seconds"] = [-time.process_time()]
            elif len(taken) == 3:
                self.watch.enter_context(watched(taken[-1]))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if len(taken) == 2:
                taken[-1]["seconds"][0] += time.process_time()
            self.watch.close()

    settings_of_run = Namespace(micro=1, autocast=None)
    steps = 4 if point.who == OWN else 3
    run_variant(
        "lora_ours" if point.who == OWN else "lora", model, settings_of_run, Data(blocks, blocks), steps, Steps()
    )
    return {**measured, "seconds": taken[1]["seconds"], "peak_bytes": taken[2]["peak_bytes"]}


def recipe_of(methods: int, seeds: int) -> dict[str, Any]:
    """Return a recipe of one LoRA and pre-projections of different sizes, which are compared with it and the base."""
    from many_runs import recipe_of as loras

    recipe = loras(2, seeds, RUN_STEPS)
    sizes = {f"pre_{n:03d}": [{"type": "pre_projection", "expansion": n / 64}] for n in range(1, methods)}
    return {**recipe, "methods": {"baseline": [], "lora": recipe["methods"]["lora_001"], **sizes}}


def measure_runs(point: Point, scratch: Path) -> dict[str, Any]:
    """Run ``compare`` with complete records in the place of training and scoring; or report what it left."""
    import many_runs

    from hfpatch.recipes.comparison import Recipe
    from hfpatch.reporting import write_report

    methods, seeds = (int(point.at), 4) if point.curve == "methods" else (4, int(point.at))
    template, made, out = (scratch / name for name in ("template", f"{methods}x{seeds}", f"{methods}x{seeds}-compared"))
    values = recipe_of(methods, seeds)
    if not (template / "results.json").is_file():
        shutil.rmtree(template, ignore_errors=True)
        many_runs.make_template(template, RUN_DOCUMENTS)
    if not (made / "recipe.yaml").is_file():
        many_runs.make(made, template, values, RUN_DOCUMENTS)
    measured: dict[str, Any] = {"x": methods * seeds}
    recipe = Recipe.model_validate(values)
    if point.part == "compare" or not (out / "results.json").is_file():
        shutil.rmtree(out, ignore_errors=True)
        compare_complete(recipe, made, out, measured)
    if point.part == "report":
        with watched(measured):
            write_report(out)
        measured.pop("stages", None)
    return measured


def compare_complete(recipe: Any, made: Path, out: Path, measured: dict[str, Any]) -> None:
    """Compare runs whose files are linked to where training and scoring would leave them; time the stages apart."""
    from hfpatch import reporting
    from hfpatch.runs import compare
    from hfpatch.runs.train_eval import TrainEvalSession

    stages = {"set-up": 0.0, "results": 0.0, "report": 0.0, "units": 0.0}

    def timed(stage: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                stages[stage] += time.process_time() - begun

        return call

    def link(names: tuple[str, ...], run: Any) -> None:
        source = made / run.folder.relative_to(out)
        run.folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (source / name).is_dir():
                shutil.copytree(source / name, run.folder / name, copy_function=os.link, dirs_exist_ok=True)
            elif (source / name).is_file():
                os.link(source / name, run.folder / name)

    TrainEvalSession.train = lambda self, run: link(("metrics.jsonl", "patch", "training.json"), run)
    TrainEvalSession._evaluate = lambda self, run: link(("evaluations", "result.json"), run)
    TrainEvalSession.set_up = timed("set-up", TrainEvalSession.set_up)
    TrainEvalSession.write_results = timed("results", TrainEvalSession.write_results)
    reporting.write_report = timed("report", reporting.write_report)
    with watched(measured):
        compare(recipe, out)
    stages["units"] = measured["seconds"][0] - sum(stages.values())
    measured["stages"] = stages


def draw(path: Path, readme: Path) -> None:
    """Write the figure of a file beside it, and its table into a page that shows the figure."""
    from matplotlib.ticker import LogLocator, NullFormatter

    from hfpatch.reporting.plots import panels
    from hfpatch.reporting.theme import BLUE, VERMILLION, report_style, to_svg
    from hfpatch.support.files import write_text

    report = json.loads(path.read_text(encoding="utf-8"))
    curves = by_curve(report["points"])
    shown = list(dict.fromkeys((key.part, key.curve) for key in curves))
    with report_style():
        figure, axes = panels(2 * len(shown), columns=4, width=3.0, height=2.6)
        for number, (part, curve) in enumerate(shown):
            for key, points in curves.items():
                if (key.part, key.curve) != (part, curve):
                    continue
                look = {"color": BLUE, "marker": "o"} if key.who == OWN else {"color": VERMILLION, "marker": "D"}
                sizes = [point["x"] for point in points]
                least = [min(point["seconds"]) for point in points]
                peaks = [max(1.0, point["peak_bytes"] / 1e6) for point in points]
                axes[2 * number].plot(sizes, least, label=key.who, markersize=4, **look)
                axes[2 * number + 1].plot(sizes, peaks, label=key.who, markersize=4, **look)
            over = f"runs ({curve})" if part in ("compare", "report") else curve
            for ax, what in zip(axes[2 * number : 2 * number + 2], ("CPU seconds", "peak MB"), strict=True):
                ax.set(xscale="log", yscale="log", title=f"{part}: {what}", xlabel=over)
                for axis in (ax.xaxis, ax.yaxis):
                    axis.set_major_locator(LogLocator(subs=(1, 3)))  # a panel may be within one power of ten
                    axis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value:g}")
                    axis.set_minor_formatter(NullFormatter())
                if len(WHO[part]) > 1:
                    ax.legend()
    write_text(path.with_suffix(".svg"), to_svg(figure))
    text = readme.read_text(encoding="utf-8")
    start, rest = text.split(f"{BEGIN}\n", 1)
    shown_at = os.path.relpath(path.with_suffix(".svg").resolve(), readme.resolve().parent)
    body = f"![Time and memory over size]({shown_at})\n\n{markdown(report)}"
    write_text(readme, f"{start}{BEGIN}\n{body}{END}{rest.split(END, 1)[1]}")
    print(body)


def markdown(report: dict[str, Any]) -> str:
    """Return the table of exponents, and what was not measured."""
    rows = ["| | over | from | to | CPU seconds | exponent | at the end | peak MB | exponent |", "|---" * 9 + "|"]
    fits = {(row["part"], row["curve"], row["who"], row["what"]): row for row in report["exponents"]}
    for (part, curve, who, what), row in fits.items():
        if what == "peak_bytes":
            continue
        name = f"{part}, {who}" if what == "seconds" else f"{part}, {who}: {what}"
        cells = [name, f"runs ({curve})" if part in ("compare", "report") else curve]
        cells += [f"{row['smallest']:,}", f"{row['at_most']:,}", f"{row['from']:.3g} to {row['to']:.3g}"]
        cells += [f"{row['all']:.2f}", f"{row['largest']:.2f}"]
        memory = fits.get((part, curve, who, "peak_bytes")) if what == "seconds" else None
        peaks = f"{memory['from'] / 1e6:.0f} to {memory['to'] / 1e6:.0f}" if memory else ""
        cells += [peaks, f"{memory['all']:.2f}" if memory else ""]
        rows.append(f"| {' | '.join(cells)} |")
    missing: dict[str, list[str]] = {}
    for row in report["not_measured"]:
        missing.setdefault(f"{row['part']} over {row['curve']} by {row['who']}", []).append(f"{row['at']}")
    unmeasured = "; ".join(f"{curve}: {', '.join(sizes)}" for curve, sizes in missing.items())
    return "\n".join(rows) + "\n" + (f"\nNot measured for lack of time: {unmeasured}.\n" if unmeasured else "")


if __name__ == "__main__":
    main()
