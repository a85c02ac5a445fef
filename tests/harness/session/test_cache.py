"""Compiled folders in the cache: the longest unused go first, and none that is in use."""

import os

import pytest

from harness.errors import UserError
from harness.files import locked_folder
from harness.inputs import command_line
from harness.modes import cache
from harness.session.building import MANIFEST, forget_old


def compiled(cache, name, used):
    folder = cache / name / "nki"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * 1000)
    (folder / MANIFEST).write_text("{}")
    os.utime(folder / MANIFEST, (used, used))
    return folder.parent


def test_the_longest_unused_go_first(tmp_path):
    roots = [compiled(tmp_path, name, used) for name, used in (("b", 2), ("a", 3), ("c", 1))]
    assert forget_old(tmp_path, 10_000, roots[2]) == (3006, 0)
    assert all(root.exists() for root in roots)
    assert forget_old(tmp_path, 2500, roots[2]) == (2004, 1)
    assert [root.exists() for root in roots] == [False, True, True]


def test_the_cache_is_listed_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "nki-llama"
    kept, used = (compiled(place / "compiled", name, 1e9) for name in ("kept", "used"))
    (place / "references").mkdir()
    (place / "references" / "one.npz").write_bytes(b"x" * 500)

    def told(*arguments):
        assert cache.run(command_line.parse(["--mode", "cache", *arguments])) in (0, 1)
        return "".join(capsys.readouterr())

    with locked_folder(used, lambda: None):
        listed = told()
        assert "compiled/kept" in listed and "2001-09-09" in listed and "at most 16.0 GiB" in listed
        with pytest.raises(UserError, match="nothing named compiled/other"):
            told("--clear", "compiled/other")
        assert "Not removed, as they are in use or read-only: compiled/used" in told(
            "--clear", "all"
        )
    assert not kept.exists() and used.exists() and not (place / "references").exists()
    told("--clear", "compiled/used")
    assert not used.exists() and "empty" in told()
