import errno
import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.errors import HfpatchError
from hfpatch.support.files import (
    atomic_directory,
    atomic_file,
    printable,
    read_json,
    remove_leftovers,
    sha256_file,
    write_json,
    write_text,
)


def failing(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


full = failing(errno.ENOSPC)


def interrupted(context, error):
    with context as temporary:
        (temporary / "new" if temporary.is_dir() else temporary).write_text("half")
        raise error


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_file(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_text() == "one"
    assert names(tmp_path) == ["new", "new/a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="files have other permissions there")
def test_files_have_the_permissions_of_a_new_file(tmp_path, monkeypatch):
    """Others can read what safetensors writes, unless the user's umask says otherwise."""
    (tmp_path / "new").touch()
    with atomic_file(tmp_path / "a") as temporary, atomic_directory(tmp_path / "b") as folder:
        for path in (temporary, folder / "c"):
            path.touch(0o600)
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "new").stat().st_mode}
    monkeypatch.setattr(type(tmp_path), "chmod", failing(errno.EPERM))
    write_text(tmp_path / "d", "on a file system without permissions")
    assert (tmp_path / "d").is_file()


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_folder(tmp_path, error):
    (tmp_path / "run").mkdir()
    for path in (tmp_path / "a.txt", tmp_path / "run" / "old"):
        path.write_text("old")
    for context in (atomic_file(tmp_path / "a.txt"), atomic_directory(tmp_path / "run")):
        with pytest.raises(type(error)):
            interrupted(context, error)
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt", "run", "run/old"]


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.write_text"])
def test_disk_full_leaves_the_old_file_and_says_so(tmp_path, monkeypatch, where):
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(where, full)
    with pytest.raises(HfpatchError, match=r"a\.txt: cannot be written .No space left on device.; free space"):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_appears_whole_and_takes_the_place_of_an_older_one(tmp_path):
    path = tmp_path / "new" / "run"
    with atomic_directory(path) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not path.exists()
    assert names(tmp_path) == ["new", "new/run", "new/run/sub", "new/run/sub/a"]
    with atomic_directory(path) as temporary:
        (temporary / "b").write_text("2")
        assert names(path) == ["sub", "sub/a"]
    assert names(tmp_path) == ["new", "new/run", "new/run/b"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path, monkeypatch, failing):
    path = tmp_path / "run"
    path.mkdir()
    (path / "old").write_text("1")
    rename, calls = type(path).replace, []

    def replace(self, target):
        calls.append(target)
        if len(calls) == failing:
            full()
        return rename(self, target)

    monkeypatch.setattr(type(path), "replace", replace)
    with pytest.raises(HfpatchError, match="run: cannot be written"), atomic_directory(path) as temporary:
        (temporary / "new").write_text("2")
    assert names(tmp_path) == ["run", "run/old"]


def test_a_file_in_the_place_of_a_folder_is_kept(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(HfpatchError, match="cannot be written"):
        write_text(tmp_path / "run" / "a", "x")
    message = r"run: cannot be written .a file has this name"
    with pytest.raises(HfpatchError, match=message), atomic_directory(tmp_path / "run"):
        pass
    assert (tmp_path / "run").read_text() == "x"
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("target", ["gone/folder", "link"])
def test_a_link_to_nothing_is_no_folder_and_its_target_is_made_a_file(tmp_path, target):
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(HfpatchError, match=r"link.a: cannot be written \(.*link (is a link to nothing|.*)\)"):
        write_text(link / "a", "x")
    write_text(link, "x")
    assert link.read_text() == "x"


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_exists_is_not_called_none(tmp_path, named):
    """As some file systems say of a rename to a folder that another process made meanwhile."""
    with pytest.raises(HfpatchError, match=r"run: cannot be written \(File exists\)"):  # noqa: SIM117
        with atomic_directory(tmp_path / "run") as temporary:
            raise FileExistsError(errno.EEXIST, "File exists", *[str(temporary)] * named)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    """As /dev/null would be, by a user with all rights."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HfpatchError, match=r"pipe: cannot be written \(it is a device or a pipe, not a file\)"):
        write_text(tmp_path / "pipe", "text")
    assert [(path.name, path.is_fifo()) for path in tmp_path.iterdir()] == [("pipe", True)]


def test_a_mistake_of_the_user_inside_passes_through(tmp_path):
    with pytest.raises(HfpatchError, match=r"^mine$"), atomic_directory(tmp_path / "run"):
        raise HfpatchError("mine")
    assert names(tmp_path) == []


@pytest.mark.parametrize("create", [atomic_file, atomic_directory])
def test_a_folder_without_permission(tmp_path, monkeypatch, create):
    monkeypatch.setattr("pathlib.Path.mkdir", failing(errno.EACCES))
    with pytest.raises(HfpatchError, match=r"cannot be written .Permission denied."), create(tmp_path / "a" / "b"):
        pass
    assert names(tmp_path) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_json_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, {"value": value})
    assert read_json(path) == {"value": value}


DIGITS = pytest.param(b"1" * 5000, id="more digits than Python reads")


@pytest.mark.parametrize("content", [None, b"{", b"", b"\xff\xfe", b"[1,]", b"[1]", b"1", b"null", b'"text"', DIGITS])
def test_what_is_no_json_object(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    is_json = content in (b"[1]", b"1", b"null", b'"text"')
    with pytest.raises(HfpatchError, match="is not a JSON object" if is_json else r"a\.json: cannot be read as JSON"):
        read_json(path)


@pytest.mark.parametrize("size", [0, 5, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_sha256(tmp_path, size):
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "a").write_bytes(content)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()


KILLED = """
import os, sys
from pathlib import Path
import hfpatch.support.files as files
out = Path(sys.argv[1])
files._sync = lambda path: os.kill(os.getpid(), 9)
if sys.argv[2] == "swap":
    files._sync, real = lambda path: None, Path.replace
    Path.replace = lambda self, other: real(self, other) if other.name.endswith(".old") else os.kill(os.getpid(), 9)
if sys.argv[2] == "file":
    files.write_text(out / "sub" / "a.txt", "new")
else:
    with files.atomic_directory(out / "run") as temporary:
        (temporary / "new").write_text("2")
"""


@pytest.mark.parametrize("killed", ["file", "folder", "swap"])
def test_what_a_killed_process_left_is_gone_at_the_next_start(tmp_path, killed):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old").write_text("1")
    with atomic_directory(tmp_path / "mine") as mine, atomic_file(tmp_path / "sub" / "file") as file:
        file.write_text("of a process that is alive")
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), killed], check=False)
        assert done.returncode == -9
        assert len(list(tmp_path.rglob(".*"))) > 2
        remove_leftovers(tmp_path)
        assert set(tmp_path.rglob(".*")) == {mine, file}
    assert names(tmp_path) == ["mine", "run", "run/old", "sub", "sub/file"]


def test_what_another_machine_writes_is_left_for_a_day(tmp_path):
    elsewhere = tmp_path / f".a.{'0' * 8}-1-{'0' * 8}.tmp"
    elsewhere.mkdir()
    (elsewhere / "part").write_text("1")
    os.utime(elsewhere, (1, 1))
    (tmp_path / ".a.tmp").write_text("of another program")
    remove_leftovers(tmp_path)
    assert elsewhere.exists()
    os.utime(elsewhere / "part", (1, 1))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".a.tmp"]


def test_printable_replaces_what_no_xml_and_no_json_can_hold():
    assert printable({"a\x00": ["\ud800", "\x1b[1m", "tab\tstays", 1.5, None, float("nan")]}) == {
        "a\ufffd": ["\ufffd", "\ufffd[1m", "tab\tstays", 1.5, None, None]
    }
