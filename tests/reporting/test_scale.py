import time

import pytest
from reporting.big import write_big_run

from hfpatch.reporting import write_report
from hfpatch.reporting.comparison.figures import prominent
from hfpatch.reporting.numbers import MOST_METHODS
from hfpatch.results.folder import load_comparison


@pytest.mark.slow
def test_two_hundred_methods_take_seconds_and_few_megabytes(tmp_path):
    folder = write_big_run(tmp_path, methods=200, tasks=5, seeds=3, documents=50, steps=50)
    started = time.process_time()
    report = write_report(folder)
    assert time.process_time() - started < 20
    assert report.html.stat().st_size < 10e6
    text = report.html.read_text()
    assert "method_199_with_a_name" in text.replace("<wbr>", "")
    assert f"Of 199 methods the {MOST_METHODS} are drawn" in text


def test_figures_show_the_surest_differences_whichever_way_they_go(tmp_path):
    folder = write_big_run(tmp_path, methods=40, tasks=2, seeds=1, documents=2, steps=0)
    results = load_comparison(folder)
    surest = {}
    for each in results.comparisons:
        if each.reference == "baseline":
            surest[each.method] = min(each.p, surest.get(each.method, 1.0))
    kept = [name for name in prominent(results).methods if name != "baseline"]
    assert len(kept) == MOST_METHODS
    assert max(surest[name] for name in kept) <= min(p for name, p in surest.items() if name not in kept)
    assert kept == sorted(kept)
