"""Files and folders that are complete or absent, after a kill and after a power failure."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from neuron_cpu import files
from neuron_cpu.errors import UnwritableError

ROOT = Path(__file__).resolve().parents[1]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_only_when_finished(tmp_path):
    target = tmp_path / "a" / "target"
    with files.atomic_folder(target) as unfinished:
        (unfinished / "x").write_text("1")
        assert not target.exists()
    assert names(target) == ["x"] and names(target.parent) == ["target"]
    with files.atomic_folder(target) as unfinished:
        (unfinished / "y").write_text("2")
    assert names(target) == ["y"] and names(target.parent) == ["target"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_interrupted_folder_keeps_the_old_one(tmp_path, error):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(type(error)), files.atomic_folder(target) as unfinished:
        (unfinished / "half").write_text("2")
        raise error
    assert names(target) == ["old"] and names(tmp_path) == ["target"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        Exception("No space left on device (os error 28)"),  # tokenizers
        ValueError('I/O error: IoError(Os { code: 28, kind: StorageFull, message: "No space" })'),
    ],
)
def test_full_disk_is_one_sentence(error, tmp_path):
    with pytest.raises(UnwritableError, match="No space left"), files.atomic_folder(tmp_path / "t"):
        raise error
    assert names(tmp_path) == []


def test_the_old_folder_comes_back_where_the_rename_fails(tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "old").write_text("1")
    rename = os.rename

    def refuse_new(source, target):
        if os.path.exists(os.path.join(source, "new")):
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_new)
    with pytest.raises(OSError, match="broken disk"), files.atomic_folder(tmp_path / "t") as folder:
        (folder / "new").write_text("2")
    assert names(tmp_path / "t") == ["old"] and names(tmp_path) == ["t"]


@pytest.fixture
def disk(monkeypatch):
    """(what, inode) of every fsync and every rename, in order."""
    events: list[tuple[str, int]] = []
    fsync = os.fsync

    def synced(handle):
        events.append(("sync", os.fstat(handle).st_ino))
        fsync(handle)

    def renaming(original):
        def renamed(source, target):
            events.append(("rename", os.stat(source).st_ino))
            original(source, target)

        return renamed

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(getattr(os, name)))
    return events


def test_a_folder_is_on_the_disk_before_its_name(tmp_path, disk):
    with files.atomic_folder(tmp_path / "t") as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("1")
        (folder / "link").symlink_to("a/b")
    inodes = {p: os.stat(tmp_path / p).st_ino for p in (".", "t", "t/a", "t/a/b")}
    at = disk.index(("rename", inodes["t"]))
    assert {("sync", inodes[p]) for p in ("t", "t/a", "t/a/b")} <= set(disk[:at])
    assert disk[at + 1 :] == [("sync", inodes["."])]


def test_a_file_is_on_the_disk_before_its_name(tmp_path, disk):
    files.write_bytes_atomically(tmp_path / "f", b"1")
    file, folder = os.stat(tmp_path / "f").st_ino, os.stat(tmp_path).st_ino
    assert disk == [("sync", file), ("rename", file), ("sync", folder)]


# --- what strangers leave -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind",
    [
        *("symlink", "to a folder", "fifo", "second name", "itself"),
        *("runs as its owner", "runs as its group", "closed to its owner"),
    ],
)
def test_only_plain_files_are_taken(kind, tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("1")
    files.check_plain(folder)
    place = folder / "below" / "odd"
    if kind == "symlink":
        place.symlink_to("/etc/passwd")
    elif kind == "to a folder":
        place.symlink_to("/etc")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "second name":
        place.hardlink_to(folder / "below" / "file")
    elif kind != "itself":
        place.touch()
        place.chmod({"runs as its owner": 0o4755, "runs as its group": 0o2755}.get(kind, 0o077))
    else:
        (tmp_path / "odd").symlink_to(folder)
        folder = tmp_path / "odd"
    with pytest.raises(ValueError, match="is no (plain file|folder)"):
        files.check_plain(folder)


def test_what_is_too_deep_or_too_much_is_not_taken(tmp_path, monkeypatch):
    """Four thousand letters of a path are more than the system takes at once."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("deep")
    os.chdir("deep")
    for _ in range(30):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    with pytest.raises(ValueError, match="d cannot be read: File name too long"):
        files.check_plain(tmp_path / "deep")
    files.remove_tree(tmp_path / "deep")
    (tmp_path / "many" / "below").mkdir(parents=True)
    files.check_plain(tmp_path / "many")
    monkeypatch.setattr(files, "MOST_FILES", 3)
    for name in ("a", "b", "below/c"):
        (tmp_path / "many" / name).touch()
    with pytest.raises(ValueError, match="more than 3 files"):
        files.check_plain(tmp_path / "many")


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    """To open one waits for whoever writes to it."""
    made = "from neuron_cpu import files\nwith files.atomic_folder(files.Path('t')) as unfinished:"
    made += "\n    files.os.mkfifo(unfinished / 'fifo')"
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", made], cwd=tmp_path, env=path, check=True, timeout=60)
    assert stat.S_ISFIFO(os.stat(tmp_path / "t" / "fifo").st_mode)


def test_a_strangers_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"123")
    assert files.read_plain(path, 3) == b"123"
    with pytest.raises(ValueError, match="more than 2 bytes"):
        files.read_plain(path, 2)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError):
        files.read_plain(tmp_path / "link", 3)
    with pytest.raises(ValueError, match="no plain file"):
        files.read_plain(tmp_path / "fifo", 3)


def test_closed_and_deep_folders_are_removed(tmp_path):
    made = """
import os, sys
from neuron_cpu import files
os.setgid(65534), os.setuid(65534)
os.chdir(sys.argv[1])
os.mkdir("x")
os.mkdir("x/closed")
open("x/closed/file", "w").close()
os.chmod("x/closed", 0)
os.chdir("x")
for _ in range(1100):
    os.mkdir("deep")
    os.chdir("deep")
files.remove_tree(files.Path(sys.argv[1]) / "x")
assert os.listdir(sys.argv[1]) == [], os.listdir(sys.argv[1])
"""
    made = made if os.getuid() == 0 else made.replace("os.setgid(65534), os.setuid(65534)", "")
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o777)
    try:
        subprocess.run([sys.executable, "-c", made, str(place)], check=True, timeout=60, cwd=ROOT)
    finally:
        place.rmdir()


def test_one_file_is_whole_or_not_there(tmp_path):
    target = tmp_path / "x"
    abandoned = tmp_path / f".x.{dead_process()}.00000000"
    abandoned.write_text("half")
    files.write_text_atomically(target, "1")
    assert names(tmp_path) == ["x"] and target.stat().st_mode & 0o600 == 0o600
    (tmp_path / "link").symlink_to(target)
    files.write_text_atomically(tmp_path / "link", "2")
    assert target.read_text() == "2" and (tmp_path / "link").is_symlink()


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_devices_and_pipes_are_written_to():
    files.write_text_atomically(Path(os.devnull), "1")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    reader, writer = os.pipe()
    files.write_text_atomically(Path(f"/dev/fd/{writer}"), "1")
    assert os.read(reader, 9) == b"1"
    os.close(reader), os.close(writer)
