from reporting.conftest import build, raw, results, run_dir  # noqa: F401 - fixtures
