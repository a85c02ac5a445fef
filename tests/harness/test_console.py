"""Progress where there is no terminal to draw a bar on."""

from harness import console


def test_without_a_terminal_lines_tell_the_progress(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with console.step("Working", total=4) as step:
        step.advance()
        step.note("Working harder")
        step.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Working: 25 %", "Working harder: 75 %"]
    assert len(lines) == 3 and lines[2].startswith("Working harder: ") and lines[2].endswith(" s")


def test_a_step_in_which_nothing_ends_says_that_it_goes_on(capsys):
    with console.step("Working", total=4) as step:
        step.still()  # a moment ago it began
        step._said -= console.STILL_SECONDS
        step.still()
        step.still()
    assert capsys.readouterr().err.splitlines()[0] == "Working: 0 %, 0 s so far"


def test_status_lines_move_no_cursor(capsys):
    console.say("boom \x1b[2J\rbang\u202e")
    assert capsys.readouterr().err == "boom \\x1b[2J\\rbang\\u202e\n"
