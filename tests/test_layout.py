import ast
import re
from pathlib import Path

from scipy import stats

ROOT = Path(__file__).parents[1]


def test_no_mean_depends_on_the_version_of_python():
    """``sum`` rounds floats otherwise since Python 3.12; `statistics.fmean` and `math.fsum` are exact everywhere."""
    mean = re.compile(r"\bsum\(([a-z_]+)\) / len\(\1\)")
    files = {path.name for path in (ROOT / "hfpatch").rglob("*.py") if mean.search(path.read_text(encoding="utf-8"))}
    assert files == set()


def test_no_quantile_of_a_test_is_written_as_a_number():
    """A rounded quantile is right for one number of seeds; scipy's are right for all."""
    kinds = [stats.norm, *(stats.t(freedom) for freedom in range(1, 31))]
    quantiles = {float(kind.ppf(level)) for kind in kinds for level in (0.975, 0.995)}
    rounded = {f"{quantile:.{digits}f}" for quantile in quantiles for digits in (2, 3, 4)}
    constants = []
    for path in sorted((ROOT / "hfpatch").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        numbers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        written = {ast.get_source_segment(text, node) for node in numbers if isinstance(node.value, float)}
        constants += [f"{path.name}: {number}" for number in sorted(written & rounded)]
    assert constants == []
