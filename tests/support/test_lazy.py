import gc
import sys

import pytest

from hfpatch.support.lazy import lazy_names


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_collected_during_an_import_and_is_afterwards(tmp_path, monkeypatch, fails):
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "home.py").write_text(f"import gc\nenabled = gc.isenabled()\nassert not {fails}\n")
    monkeypatch.syspath_prepend(tmp_path)
    get = lazy_names("lazily", {"enabled": "home"})
    assert gc.isenabled()
    if fails:
        with pytest.raises(AssertionError):
            get("enabled")
    else:
        assert get("enabled") is False
    assert gc.isenabled()
    for name in ("lazily", "lazily.home"):
        sys.modules.pop(name, None)
