"""Pages are what docs/generate.py makes of the sources, in short sentences with links that lead."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys

import pytest
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from PIL import Image

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "functions.md"
NOTES = REPOSITORY / "lab" / "docs"
PRODUCT = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = [*PRODUCT, *sorted(NOTES.glob("*.md"))]


def test_generated_blocks_are_up_to_date(run_script):
    done = run_script("docs/generate.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.speed
def test_the_picture_of_the_first_page_shows_today_s_estimate():
    path = REPOSITORY / "docs" / "picture.py"
    spec = importlib.util.spec_from_file_location("picture", path)
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert Image.open(picture.PICTURE).text[picture.ESTIMATE] == picture.profiled(), (
        "run python docs/picture.py"
    )


def test_lines_of_prose_and_tables_fit():
    """What a page quotes from a program, between fences, has the width that it has there."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert [line for line in text.splitlines() if len(line) > 120] == [], page.name


def sentences(page):
    """Sentences of a page's own prose: without tables, headings, quotations and what is made."""
    begin = r"<!-- (?:generated|make real|trn\d|samples|[\w ]+: begin)"
    made = rf"^```.*?^```|^{begin}.*?<!-- [\w ]*:? ?end|^\[[^]]+\]: .*?$"
    page = re.sub(made, "", page, flags=re.DOTALL | re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", page):
        lines = (line.strip() for line in block.splitlines())
        text = " ".join(line for line in lines if not line.startswith(("|", "#", ">", "<!--")))
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", text))
        found += re.split(r"^(?:[-*]|\d+\.) |(?<=[.!?])[\"*)]*\s+(?=[\"*(A-Z0-9])", text)
    return found


def test_sentences_are_short_and_no_page_begins_with_a_table():
    """At most 40 words, a name in code counted as one; on the laboratory's pages one in a hundred
    may be longer."""
    notes: list[str] = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if path.is_relative_to(NOTES):
            notes += sentences(text)
        else:
            assert [one for one in sentences(text) if len(one.split()) > 40] == [], path.name
        first = next(line for line in text.splitlines() if line and not line.startswith("#"))
        assert not first.startswith("|"), path.name
    assert sum(len(one.split()) > 40 for one in notes) <= len(notes) / 100


def anchor(heading):
    """What GitHub makes of a heading: lower case, words joined by hyphens, no other signs."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_product_s_pages_are_at_most_45_000_words():
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PRODUCT[1:]) <= 45_000


def test_links_between_pages_lead_to_a_file_and_a_heading():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        links = re.findall(r"\]\((?!https?:)((?:[^)#\s]+\.\w+)?)(?:#([^)\s]+))?\)", text)
        for name, place in links:
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), (page.name, name)
            if place:
                headings = re.findall(
                    r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE
                )
                assert place in map(anchor, headings), (page.name, name, place)


MODEL_FILES = [
    "llama.py",
    *(f"models/{file.name}" for file in (REPOSITORY / "models").glob("*.py")),
]


def test_names_on_the_kernels_page_are_those_of_the_submission():
    page = (REPOSITORY / "docs" / "kernels.md").read_text(encoding="utf-8")
    source = "".join((REPOSITORY / name).read_text(encoding="utf-8") for name in MODEL_FILES)
    named = set(re.findall(r"`(\w+)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", source)] == []


@pytest.mark.parametrize("name", MODEL_FILES)
def test_functions_of_a_submission_fit_a_screen(name):
    """50 lines of code beside docstrings and comments, and nine arguments but for kernels, whose
    tensors come one by one."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        first = function.body[1 if ast.get_docstring(function) and function.body[1:] else 0]
        body = (line.strip() for line in lines[first.lineno - 1 : function.end_lineno])
        code = [line for line in body if line and not line.startswith("#")]
        assert len(code) <= 50, (function.name, len(code))
        kernel = function.name == "decode_step_kernel" or any(  # `kernel_of` decorates it
            ast.unparse(decorator) == "nki.jit" for decorator in function.decorator_list
        )
        given = [*function.args.args, *function.args.kwonlyargs]
        assert kernel or len([a for a in given if a.arg not in ("self", "cls")]) <= 9, function.name


def test_every_function_is_listed_and_documented():
    text = PAGE.read_text(encoding="utf-8")
    for prefix, module in (("nl", nl), ("nisa", nisa)):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                assert re.search(rf"^- `{prefix}\.{name}`", text, re.MULTILINE), name
                assert inspect.getdoc(value), name


@pytest.fixture(scope="module")
def known():
    """The identifiers of docs/identifiers.py."""
    sys.path.insert(0, str(REPOSITORY / "docs"))
    try:
        import identifiers
    finally:
        sys.path.pop(0)
    return [rule.identifier for rule in identifiers.rules(REPOSITORY / "neuron_cpu")]


def test_every_identifier_that_a_test_expects_is_listed_and_the_reverse(known):
    """Some tests ask for the beginning of one."""
    listed = " ".join(known)
    folders = [REPOSITORY / "tests" / name for name in ("core", "nki", "torch_device")]
    tests = [path for folder in folders for path in folder.glob("test_*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in tests)
    expected = set(re.findall(r"\b(?:err|sim)_[a-z0-9_]+", text)) - {"sim_test"}  # invented
    for identifier in expected:
        assert re.search(rf"\b{identifier}", listed), identifier
    untested = sorted(set(known) - expected)
    assert not untested


def test_checks_that_the_table_of_refusals_names_exist(known):
    file = REPOSITORY / "neuron_cpu" / "core" / "device" / "refusals.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    for one in (*table["refusals"], *table["defects"]):
        named = re.findall(r"\b(?:sim|err)_\w+", one.get("by", ""))
        assert set(named) <= set(known) and (one.get("by") or one["why"]), one


def test_every_section_of_the_readme_with_estimates_leads_to_the_hour_on_a_device():
    """A picture of a kernel's time, and every time or share."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.M)
    shown = [one for one in sections if re.search(r"!\[|\d ?(ms|µs|%)(?!\w)", one)]
    assert len(shown) > 1
    assert [one.splitlines()[0] for one in shown if "(lab/docs/device_report.md)" not in one] == []
