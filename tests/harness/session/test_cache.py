"""Compiled folders in the cache: the longest unused go first, and none that is in use."""

from __future__ import annotations

import os
from pathlib import Path

from harness.files import locked_folder
from harness.session.building import MANIFEST, forget_old


def compiled(cache: Path, name: str, used: float) -> Path:
    folder = cache / name / "nki"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * 1000)
    (folder / MANIFEST).write_text("{}")
    os.utime(folder / MANIFEST, (used, used))
    return folder.parent


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    roots = [compiled(tmp_path, name, used) for name, used in (("b", 2), ("a", 3), ("c", 1))]
    forget_old(tmp_path, 10_000, roots[2])
    assert all(root.exists() for root in roots)
    forget_old(tmp_path, 2500, roots[2])
    assert [root.exists() for root in roots] == [False, True, True]


def test_what_another_run_has_locked_stays(tmp_path: Path) -> None:
    used, kept = compiled(tmp_path, "used", 1), compiled(tmp_path, "kept", 2)
    with locked_folder(used, lambda: None):
        forget_old(tmp_path, 10, kept)
    assert used.exists() and kept.exists()
    forget_old(tmp_path, 10, kept)
    assert not used.exists() and kept.exists()
