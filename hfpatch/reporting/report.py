"""Writing the whole report of a run folder, or of several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hfpatch.errors import HfpatchError
from hfpatch.reporting.cards import write_patch_cards
from hfpatch.reporting.curves import Curve, read_curves
from hfpatch.reporting.figure_data import figure_data, read_layers_csv, read_training_csv
from hfpatch.reporting.figures import differences, prominent, quality, training
from hfpatch.reporting.html import html
from hfpatch.reporting.layer_figure import layer_figure
from hfpatch.reporting.layers import LayerSeries, read_layers
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.merging import Check, merge
from hfpatch.reporting.page import Material, anchor
from hfpatch.reporting.results import Results, plain, read_results
from hfpatch.reporting.results_csv import results_csv
from hfpatch.reporting.samples import Samples, read_samples
from hfpatch.reporting.study.report import write_study
from hfpatch.reporting.study.results import is_study
from hfpatch.reporting.theme import report_style, to_svg
from hfpatch.reporting.written import Report, write_figures
from hfpatch.support.files import write_text

_RUN_FILES = ("results.json", "recipe.yaml")


def write_report(run_dir: Path) -> Report:
    """Write ``report.html``, ``report.md``, ``results.csv`` and ``figures/`` from the result files in ``run_dir``.

    The same result files give the same bytes. An incomplete run is reported as far as it got, and what is missing
    is named. The cards of the run's patches are written again, with the results in them. A pretraining study gets the
    report of a study.

    Raises:
        HfpatchError: if ``run_dir`` holds no run, or cannot be written.
    """
    if is_study(run_dir):
        return write_study(run_dir, run_dir)
    material = _material("", run_dir)
    report = _write(run_dir, [material], ())
    write_patch_cards(run_dir, material.results)
    return report


def write_joint_report(run_dirs: Sequence[Path], out: Path) -> Report:
    """Write one report of several runs, or of one, to ``out``.

    They share the tables where they measured the same frozen model on the same documents, and stand side by side
    where they did not. What they have in common is checked and told.

    Raises:
        HfpatchError: if one holds no run, one is named twice, ``out`` is a run's own folder or cannot be written.
    """
    if any((out / name).exists() for name in _RUN_FILES):
        raise HfpatchError(f"{out}: holds a run, whose own report would be lost; choose another --out")
    study = next((path for path in run_dirs if is_study(path)), None)
    if study is not None and len(run_dirs) == 1:
        return write_study(study, out)
    if study is not None:
        raise HfpatchError(
            f"{study}: is a pretraining study, which has a report of its own; leave it out of the others"
        )
    each = [_material(label, folder) for label, folder in _labels(run_dirs).items()]
    if len(each) == 1:
        return _write(out, [replace(each[0], title="")], ())
    merged = merge({one.title: one.results for one in each})
    joined = None if merged.results is None else _joined(each, merged.results, merged.names)
    return _write(out, each if joined is None else [joined], merged.checks)


def default_out(run_dirs: Sequence[Path]) -> Path:
    """Return the folder that takes the report of several runs where none is named."""
    names = "+".join(re.sub(r"[^\w.-]", "_", path.resolve().name) for path in run_dirs)
    return Path("runs") / f"report-{names}"[:100]


def _labels(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the shortest end of its path that tells it from the others."""
    paths = [path.resolve() for path in run_dirs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise HfpatchError(f"{twice}: named twice; name each run once")
    for length in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(map(plain, names), run_dirs, strict=True))


def _material(label: str, run_dir: Path) -> Material:
    """Read all that a run folder holds; what it should hold and does not is named in the results."""
    results = read_results(run_dir)
    curves = read_curves(run_dir, list(results.methods))
    samples = read_samples(run_dir, results)
    layers, broken = read_layers(run_dir, results)
    if not (run_dir / "runs").is_dir():  # a published folder: what an earlier report kept beside its figures
        curves = read_training_csv(run_dir / "figures" / "training.csv", results.methods)
        layers = read_layers_csv(run_dir / "figures" / "layers.csv", results.methods)
    missing = (*results.missing, *_curveless(results, curves), *_strangers(run_dir, results), *broken, *samples.missing)
    results = results.model_copy(update={"missing": missing})
    figures = _draw(results, curves, layers)
    return Material(label, results, curves, layers, samples, figures, {label: results})


def _joined(each: Sequence[Material], results: Results, names: Mapping[str, Mapping[str, str]]) -> Material:
    """Return the runs as one, every method by its name in the union."""
    curves = {names[one.title][name]: curve for one in each for name, curve in one.curves.items()}
    layers = [replace(series, method=names[one.title][series.method]) for one in each for series in one.layers]
    sides = [replace(side, method=names[one.title][side.method]) for one in each for side in one.samples.sides]
    documents: dict[str, dict[str, Mapping[str, str]]] = {}
    for one in each:
        for task, known in one.samples.documents.items():
            documents[task] = {**documents.get(task, {}), **known}
    samples = Samples(tuple(sides), documents, ())
    sources = {one.title: one.results for one in each}
    return Material("", results, curves, layers, samples, _draw(results, curves, layers), sources)


def _draw(results: Results, curves: Mapping[str, Curve], layers: Sequence[LayerSeries]) -> dict[str, str]:
    shown = prominent(results)
    with report_style():
        drawn = {
            "differences": differences(shown),
            "quality": quality(shown),
            "training": training(shown, {name: curve for name, curve in curves.items() if name in shown.methods}),
            "layers": layer_figure(shown, layers),
        }
        return {name: to_svg(figure) for name, figure in drawn.items() if figure is not None}


def _write(out: Path, material: Sequence[Material], checks: Sequence[Check]) -> Report:
    texts: dict[Path, str] = {}
    for place, each in enumerate(material):
        for name, svg in each.figures.items():
            path = out / "figures" / f"{anchor(material, place)}{name}"
            texts[path.with_suffix(".svg")] = svg
            texts[path.with_suffix(".csv")] = figure_data(name, each.results, each.curves, each.layers)
    with report_style():
        drawn = differences(prominent(material[0].results), title=True) if len(material) == 1 else None
        figures = write_figures(texts, drawn, out / "figures")
    report = Report(
        html=out / "report.html",
        markdown=out / "report.md",
        csv=out / "results.csv",
        figures=figures,
        runs=tuple(each.results for each in material),
    )
    write_text(report.csv, results_csv({each.title: each.results for each in material}))
    write_text(report.markdown, markdown(material, checks))
    write_text(report.html, html(material, checks))
    return report


def _curveless(results: Results, curves: Mapping[str, Curve]) -> list[str]:
    trained = [name for name, method in results.methods.items() if any(run.train for run in method.runs.values())]
    return [f"{name}: no training curve (metrics.jsonl)." for name in trained if name not in curves]


def _strangers(run_dir: Path, results: Results) -> list[str]:
    """Name the runs that lie in the folder and are not the results' own."""
    runs = run_dir / "runs"
    names = sorted(plain(path.name) for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    return [
        f"runs/{name}: no method of these results, so it is left out." for name in names if name not in results.methods
    ]
