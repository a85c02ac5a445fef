"""Cells that runs over the real libraries found, and which of them a resumed run leaves out."""

import pytest

from tests.real import alone, page


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_run_goes_on_behind_the_cells_of_its_own_tree(monkeypatch, capsys):
    monkeypatch.setattr(page, "_state", lambda: "before")
    page.keep("modes", "0.6", "chat", "PyTorch", "old", 1.0)
    page.keep("modes", "0.6", "serve", "PyTorch", "old", 1.0)
    monkeypatch.setattr(page, "_state", lambda: "now")
    page.keep("modes", "0.6", "chat", "PyTorch", "new", 2.5)
    assert page.done("modes") == {"0.6": {"chat": {"PyTorch": "new"}}}
    assert page.kept("modes")["0.6"]["serve"] == {"PyTorch": "old"}
    page.keep("modes", "0.6", "chat", "kernels", f"{alone.CUT}: after 9 s", 9)
    assert page.done("modes") == {"0.6": {"chat": {"PyTorch": "new"}}}
    page.end("modes", writes=False)
    assert "modes: 2 cells, 12 processor seconds" in capsys.readouterr().err


@pytest.mark.parametrize("table", page.COLUMNS)
def test_a_table_does_not_shrink_to_what_is_kept_here(table, tmp_path, monkeypatch, capsys):
    before = page.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text(before, encoding="utf-8")
    page.write(table)
    page.keep_rows(table, ["one"])
    for column in page.COLUMNS[table]:
        page.keep(table, "0.6", "one", column, "1.0e-08", 1.0)
    page.write(table)
    assert page.PAGE.read_text(encoding="utf-8") == before
    assert f"{table} of 0.6: " in capsys.readouterr().err
    rows = [f"row {number}" for number in range(160)]
    page.keep_rows(table, rows)
    for row in rows:
        for column in page.COLUMNS[table]:
            page.keep(table, "0.6", row, column, "1.0e-08", 1.0)
    page.write(table)
    after = page.PAGE.read_text(encoding="utf-8")
    assert after != before and page._parts(table)["0.6"] in after
    assert "row 159" in after or "160 of 160 pairs are right" in after


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
