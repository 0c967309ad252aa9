"""What is an installed package, and what lies beside it."""

import json
import sys
from pathlib import Path

import pytest

import hfpatch
from hfpatch.recipes.code import refuse_code
from hfpatch.support import plugins
from hfpatch.support.plugins import is_installed, is_installed_path


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Put a folder among those where packages are installed, and return it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(plugins.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(plugins.site, "getsitepackages", lambda: [])
    monkeypatch.setattr(plugins.site, "ENABLE_USER_SITE", False)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    plugins._installed_folders.cache_clear()
    yield folder
    plugins._installed_folders.cache_clear()


def test_installed_is_what_lies_among_the_packages_also_editable(site, tmp_path, monkeypatch):
    (site / "theirs_a.py").touch()
    by_path, by_record, nowhere = (tmp_path / name for name in ("by_path", "by_record", "nowhere"))
    for name, folder in {"theirs_b": by_path, "theirs_c": by_record, "theirs_d": nowhere}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(folder)
    (site / "theirs.pth").write_text(f"import nothing\n{by_path}\n")
    info = site / "theirs_c-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs_c\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": by_record.as_uri(), "dir_info": {"editable": True}}))
    names = ("theirs_a", "theirs_b.inner", "theirs_c", "theirs_d", "sys", "hfpatch.methods.canon", "not_there")
    assert [is_installed(name) for name in names] == [True, True, True, False, True, True, True]
    assert is_installed_path(site / "x") and not is_installed_path(nowhere)  # noqa: PT018


def test_the_working_directory_is_none_also_where_it_hides_or_adds_to_a_package(site, monkeypatch):
    (site / "theirs_a.py").touch()
    (site / "theirs_e").mkdir()  # a package in several places
    (site / "theirs_e" / "one.py").touch()
    assert is_installed("theirs_a") and is_installed("theirs_e.one")  # noqa: PT018
    Path("theirs_a.py").touch()
    Path("theirs_e").mkdir()
    before = list(sys.path)
    assert not is_installed("theirs_a")
    assert not is_installed("theirs_e.one")
    assert sys.path == before


def test_an_installed_module_is_imported_without_the_working_directory(site, monkeypatch):
    (site / "theirs_f.py").write_text("import sys\npath = list(sys.path)")
    path = plugins.named_object("theirs_f:path")
    assert str(Path.cwd()) not in path
    del sys.modules["theirs_f"]
    refuse_code({"methods": {"a": [{"type": "theirs_f:path"}]}}, [], "recipe.yaml")
    assert hfpatch.__name__ not in sys.path
