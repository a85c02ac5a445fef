"""The twelve lessons through `neuron_cpu learn`: exercises fail, solutions pass, messages help."""

import json
import re
import sys
import warnings
from pathlib import Path

import pytest

from neuron_cpu.__main__ import main
from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.lessons import FOLDER, LESSONS, TARGETS, TODAY
from neuron_cpu.lessons.progress import FILE, file_name
from tests.conftest import REPOSITORY
from tests.crossed import crossed

# What each exercise fails with: the reason that its lesson is about.
REASONS = {
    "vector_add": "[err_unsupported_memory]",
    "masked_tail": "[err_tensor_access_out_of_bound]",
    "undefined_data": "[sim_undefined_data]",
    "loops": "first wrong element: (128, 0)",
    "tiled_matmul": "[err_size_of_dimension_exceed_arch_limit]",
    "psum_accumulation": "[sim_accumulation_start]",
    "transposes": "it computes something else than the reference",
    "double_buffering": "1.00 times as fast as the exercise's own kernel, 1.5 times asked for",
    "weight_layout": "1.00 times as fast as the exercise's own kernel, 1.15 times asked for",
    "fusing": "1.00 times as fast as the exercise's own kernel, 2 times asked for",
    "running_softmax": "first instruction whose result is infinite or NaN: ",
    "decode_attention": "1.00 times as fast as the exercise's own kernel, 2.5 times asked for",
}
IN_NEURONXCC = {"loops": "[err_unexpected_output_dependencies]"}
FIRST = LESSONS[0]
KERNEL = """\
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def mine(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    {}
    return out
"""
LEARN_3 = "neuron_cpu learn 3"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder of a learner with a narrow terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def learn(*arguments):
    return main(["learn", *map(str, arguments)])


def words(capsys):
    """What was printed, however its lines were broken; none was too long for the terminal.

    The line that says which SDK is in use comes from the package, for programs, and is left out.
    """
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() if not line.startswith("Neuron SDK: ")]
    assert max(map(len, lines), default=0) <= 80
    return " ".join((" ".join(lines) + told.err).split())


def copy_of(lesson, language=TODAY):
    return Path(f"{language}_lessons", file_name(lesson))


def edit(lesson, text):
    copy_of(lesson).parent.mkdir(exist_ok=True)
    copy_of(lesson).write_text(text)


@pytest.mark.parametrize(
    ("lesson", "language"),
    crossed(LESSONS, list(TARGETS)),
    ids=lambda one: getattr(one, "name", one),
)
def test_the_exercise_fails_for_its_reason_and_the_solution_passes(
    lesson, language, capsys, monkeypatch
):
    asked, copy = ("--language", language), copy_of(lesson, language)
    reason = {**REASONS, **(IN_NEURONXCC if language != TODAY else {})}[lesson.name]
    assert learn(lesson.number, *asked) == 1
    told = words(capsys)
    assert reason in told and "Not passed: " in told and "Task: " in told
    assert copy.read_text() == lesson.track(language).exercise
    assert lesson.explains(told) or "[" not in reason
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    copy.write_text(lesson.track(language).solution)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learn(lesson.name, *asked) == 0, words(capsys)
    assert f"Lesson {lesson.number} passed" in words(capsys)
    target = f"{copy}:{lesson.name}"
    last = lesson.module(language).CASES[-1].split()
    chip = f"--target={TARGETS[language]}"
    assert main(["check", target, chip, *(f"--arg={word}" for word in last)]) == 0
    assert " 0 unproven" in words(capsys)


def test_a_copy_in_the_other_language_is_told(capsys):
    edit(FIRST, FIRST.track("neuronxcc").exercise)
    assert learn(1) == 2
    assert "is a kernel of neuronxcc, expected one of nki; run neuron_cpu learn 1 " in words(capsys)


def test_progress(capsys, monkeypatch):
    assert learn() == 0
    told = words(capsys)
    assert "0 of 12 lessons passed" in told and "Next: neuron_cpu learn 1 (vector add)" in told
    assert told.count("not begun") == 12 and not Path("nki_lessons").exists()
    assert learn(1) == 1
    words(capsys)
    assert learn() == 0 and words(capsys).count("not begun") == 11
    edit(FIRST, FIRST.track(TODAY).solution)
    assert learn(1) == 0
    assert "Next: neuron_cpu learn 2 (masked tail)" in words(capsys)
    monkeypatch.chdir("nki_lessons")  # where the copies are: no folder below it
    assert learn() == 0
    assert "1 of 12 lessons passed" in words(capsys)
    assert not Path("nki_lessons").exists()


def test_json(capsys):
    """On standard output alone, with the tables beside it; --quiet leaves them out."""
    lesson = LESSONS[0]
    assert learn(lesson.number, "--json", "-") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["lesson"] == lesson.name and found["missing"] and not found["passed"]
    assert found["cases"]
    for asked, key in (("--hint", "hints"), ("--solution", "solution")):
        assert learn(lesson.number, asked, "--json", "-", "--quiet") == 0
        assert json.loads(capsys.readouterr().out)[key]
    assert learn("--json", "states.json", "--quiet") == 0
    states = json.loads(Path("states.json").read_text(encoding="utf-8"))
    assert not capsys.readouterr().out and len(states) == len(LESSONS)
    assert states[0]["state"] == "begun" and states[1]["state"] == "not begun"


def test_a_copy_is_never_overwritten(capsys):
    edit(FIRST, "mine = 1\n")
    assert learn(1) == 2
    assert "has no kernel 'vector_add'" in words(capsys)
    assert copy_of(FIRST).read_text() == "mine = 1\n"


def test_hints_come_one_by_one(capsys):
    for shown in (1, 2, 3, 3):
        assert learn(1, "--hint", "--folder", "elsewhere") == 0
        told = words(capsys)
        assert [f"Hint {n} of 3" in told for n in (1, 2, 3)] == [n <= shown for n in (1, 2, 3)]
    assert not Path("nki_lessons").exists()


def test_the_solution_is_shown_and_nothing_is_run(capsys):
    assert learn(12, "--solution") == 0
    told = words(capsys)
    assert " ".join(LESSONS[-1].track(TODAY).solution.split()) in told
    assert not Path("nki_lessons").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["0"], "lesson '0' does not exist, expected a number from 1 to 12"),
        (["13"], "lesson '13' does not exist"),
        (["vector add"], "lesson 'vector add' does not exist"),
        (["--hint"], "--hint without a lesson"),
        (["--solution"], "--solution without a lesson"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, capsys):
    assert learn(*arguments) == 2
    assert sentence in words(capsys)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("def vector_add(:\n", "cannot be imported (SyntaxError: "),
        ("def vector_add(a, b):\n    while True:\n        pass\n",
         "does not come to its end (it takes longer than 1 s) and is at "),
        ("def vector_add(a, b):\n    return numpy.add(a, b)\n", "raises NameError at"),
        ("import sys\nsys.exit(0)\n", "cannot be imported (SystemExit: 0)"),
        ("vector_add = 3\n", "has no kernel 'vector_add'"),
    ],
)  # fmt: skip
def test_answers_that_do_not_run(content, sentence, capsys):
    edit(FIRST, content)
    assert learn(1, "--time-limit", 1) == 2
    assert sentence in words(capsys)
    assert learn() == 0 and "0 of 12 lessons passed" in words(capsys)


@pytest.mark.parametrize("content", ["{", "[]", '{"races": 3}', '{"races": {"hints": "x"}}'])
def test_damaged_progress_is_told(content, capsys):
    Path("nki_lessons").mkdir()
    Path("nki_lessons", FILE).write_text(content)
    assert learn() == 2
    assert "is damaged, expected the progress" in words(capsys)


def test_a_folder_that_cannot_be_written(capsys):
    Path("file").write_text("")
    assert learn(1, "--folder", "file") == 2
    assert "Cannot write file/lesson01_vector_add.py" in words(capsys)


def test_an_interrupt_ends_the_check_alone(capsys, monkeypatch):
    from neuron_cpu.judge import exercises

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exercises, "check", interrupt)
    assert learn(1) == 130
    assert "interrupted" in words(capsys) and copy_of(FIRST).is_file()


# --- messages name lessons ------------------------------------------------------------------------
def test_every_message_has_one_lesson_or_none():
    page = (REPOSITORY / "docs" / "messages.md").read_text(encoding="utf-8")
    identifiers = page.partition("## All identifiers")[2]
    table = json.loads((FOLDER.parent / "lessons.json").read_text(encoding="utf-8"))
    named = [message for lesson in LESSONS for message in lesson.messages] + table["elsewhere"]
    # a new message: which lesson explains it?
    assert sorted(named) == sorted(set(re.findall(r"`((?:err|sim)_\w{2,})`", identifiers)))


# A line of a kernel, and the lessons that explain what is said of it.
POINTED = {
    "nl.store(out, nl.exp(x))": [1],
    "nl.store(out, nl.where(nl.load(x) > 0 and 1, 0, 1))": [1],
    "nl.store(out, nl.load(x[0:300]))": [2],
    "nl.store(out, nl.load(x).reshape((64, 128)))": [],
    "nl.store(out, nisa.nc_matmul(nl.load(x), nl.load(x[0:64])))": [7],
    "nl.store(out, nisa.tensor_scalar(nl.load(x), nl.add, nl.load(x)))": [10],
    "nl.store(out, nl.load(x) * nl.load(x[0:1]))": [],  # a row: no lesson has one
    "nl.store(out, nl.swish(nl.load(x)))": [],
    "nl.store(out, nl.load(x, dtype='bf16'))": [],
    "nl.store(out, x_sv)": [],
}


@pytest.mark.parametrize("line", POINTED)
def test_a_message_names_the_lessons_of_its_matter(line, capsys):
    Path("mine.py").write_text(KERNEL.format(line))
    assert main(["profile", "mine.py:mine", "--arg", "128x64:f32"]) == 2
    said = words(capsys)
    assert "mine.py:9" in said
    assert said.count("--language neuronxcc") == len(POINTED[line])
    assert [int(number) for number in re.findall(r"Lesson (\d+)", said)] == POINTED[line]


def test_errors_of_other_commands_name_the_lesson(capsys):
    target, shapes = "exercise.py:undefined_data", ["--arg", "128x64:f32"]
    Path("exercise.py").write_text(LESSONS[2].track(TODAY).exercise)
    pointer = "Lesson 3 (undefined data) is about this: " + LEARN_3
    assert main(["compare", target, *shapes]) == 2
    assert words(capsys).endswith(f"[sim_undefined_data] {pointer}")
    with pytest.warns(NkiWarning, match="sim_undefined_data"):  # no time depends on values
        assert main(["profile", target, *shapes]) == 0
    assert main(["check", target, "--ref", "exercise.py:reference", *shapes]) == 1
    assert pointer in words(capsys)


def test_scripts_are_told_behind_their_traceback(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("NEURON_CPU", "")
    call = "import numpy\nundefined_data(numpy.ones((20, 33), numpy.float32))\n"
    Path("script.py").write_text(LESSONS[2].track(TODAY).exercise + call)
    with pytest.raises(NkiError) as raised:
        main(["run", "script.py"])
    capsys.readouterr()
    sys.excepthook(raised.type, raised.value, None)
    told = words(capsys)
    assert told.endswith("[sim_undefined_data] Lesson 3 (undefined data) is about this: " + LEARN_3)


PAGE = (REPOSITORY / "docs" / "learn" / "README.md").read_text(encoding="utf-8")


def test_the_first_kernel_of_the_page(capsys):
    """The message that the page shows, and the lines that it adds."""
    assert learn(1) == 1
    shown = PAGE.partition("says what is wrong with it:\n\n```\n")[2].partition("```")[0]
    assert " ".join(shown.split()) in words(capsys)
    added = PAGE.partition("```python\n")[2].partition("```")[0]
    wrong = "    nisa.tensor_tensor(dst=sum_sb, data1=a_hbm, data2=b_hbm, op=nl.add)\n"
    copy = copy_of(FIRST)
    assert wrong in copy.read_text()
    copy.write_text(copy.read_text().replace(wrong, added))
    assert learn(1) == 0


def test_the_page_lists_every_lesson():
    rows = re.findall(r"^\| (\d+) \| \[([^]]+)\] \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert rows == [(str(one.number), one.title, one.teaches) for one in LESSONS]
    links = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", PAGE, re.MULTILINE))
    found = {
        title: (REPOSITORY / "docs" / "learn" / link).resolve() for title, link in links.items()
    }
    assert found == {one.title: one.page for one in LESSONS}
