"""Progress where there is no terminal to draw a bar on."""

from harness import console
from neuron_cpu.console import progress


def test_without_a_terminal_lines_tell_the_progress(capsys):
    with console.step("Working", total=4) as step:
        step.advance()
        step.note("Working harder")
        step.tell()
    with console.step("Working") as step:
        step.tell()
        progress.report("a part", 1, 2)
        step.tell()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Working harder: 25 %, 0 s so far" and lines[1] == "Working harder: 0.0 s"
    assert lines[2:4] == ["Working: 0 s so far", "Working: a part 50 %, 0 s so far"]


def test_status_lines_move_no_cursor(capsys):
    console.say("boom \x1b[2J\rbang\u202e")
    assert capsys.readouterr().err == "boom \\x1b[2J\\rbang\\u202e\n"
