"""Cells that runs over the real libraries found, and which of them a resumed run leaves out."""

import pytest

from tests.real import page


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_run_goes_on_behind_the_cells_of_its_own_tree(monkeypatch):
    monkeypatch.setattr(page, "_state", lambda: "before")
    page.keep("modes", "0.6", "chat", "PyTorch", "old")
    page.keep("modes", "0.6", "serve", "PyTorch", "old")
    monkeypatch.setattr(page, "_state", lambda: "now")
    page.keep("modes", "0.6", "chat", "PyTorch", "new")
    assert page.done("modes") == {"0.6": {"chat": {"PyTorch": "new"}}}
    assert page.kept("modes")["0.6"]["serve"] == {"PyTorch": "old"}


def test_the_state_is_the_commit_and_its_changes_but_pages(tmp_path, monkeypatch):
    def git(*words):
        page.subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
        )

    for name in ("a.md", "a.py"):
        (tmp_path / name).write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    monkeypatch.setattr(page, "REPOSITORY", tmp_path)
    found = []
    for name in (None, "a.md", "a.py"):
        if name is not None:
            (tmp_path / name).write_text("two")
        found.append(page._state.__wrapped__())
    assert found[0] == found[1] != found[2]
