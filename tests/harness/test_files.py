"""Where the driver keeps its files, and what it refuses to write into."""

import os

import pytest

from harness import files
from harness.errors import UserError


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "t", tmp_path / "file"):
        with pytest.raises(UserError, match="not a folder"):
            files.check_writable_folder(target)


def test_a_lock_leaves_no_folder_that_stays_empty(tmp_path):
    """Those in front of it, too, but neither what was there before nor what holds something."""
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "a" / "b" / "c", tmp_path / "there"):
        with pytest.raises(UserError), files.locked_folder(folder, lambda: None):
            raise UserError("A refused compile.")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with files.locked_folder(tmp_path / "a" / "b", lambda: None):
        (tmp_path / "a" / "kept").write_text("")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "kept", "there"]


def test_a_lock_is_of_the_folder_that_is_there(tmp_path):
    """Who waits for a folder that the other one removes makes it anew, and has that one locked."""
    folder, handles = tmp_path / "folder", []
    folder.mkdir()
    first = files._locked(folder, lambda: None)

    def give_up():
        folder.rmdir()
        os.close(first)
        handles.append(1)

    with files.locked_folder(folder, give_up):
        assert handles == [1] and folder.is_dir()
        assert not files.remove_unlocked(folder)
