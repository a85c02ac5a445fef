"""Compiled folders in the cache: the longest unused go first, and none that is in use."""

import os

from harness.files import locked_folder
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


def test_a_folder_that_another_run_uses_stays(tmp_path):
    used, kept = (compiled(tmp_path, name, 1) for name in ("used", "kept"))
    with locked_folder(used, lambda: None):
        assert forget_old(tmp_path, 0, kept) == (2004, 0)
    assert forget_old(tmp_path, 0, kept) == (1002, 1) and not used.exists()
