import pytest

from hfpatch.support.folders import cache_folder, is_writable


def test_the_folder_is_the_users_unless_the_environment_names_another(monkeypatch, tmp_path):
    monkeypatch.setenv("HFPATCH_CACHE", str(tmp_path / "kept"))
    assert cache_folder("tokens") == tmp_path / "kept" / "tokens"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (lambda name: monkeypatch.setenv(name, ""), monkeypatch.delenv):
        unset("HFPATCH_CACHE")
        assert cache_folder("answers") == tmp_path / ".cache" / "hfpatch" / "answers"


def test_a_folder_that_takes_no_files_is_a_warning(tmp_path):
    assert is_writable(tmp_path / "new" / "folder", "the answers")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"^the answers are not cached for the next run: .*file"):
        assert not is_writable(tmp_path / "file" / "below", "the answers")
