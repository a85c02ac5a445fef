"""Where the driver keeps its files, and what it refuses to write into."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import files
from harness.errors import UserError


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "t", tmp_path / "file"):
        with pytest.raises(UserError, match="not a folder"):
            files.check_writable_folder(target)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "nki-llama"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files.cache_folder() == tmp_path / "home" / ".cache" / "nki-llama"
