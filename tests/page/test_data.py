"""What stands in a page: the report's own figures, source text, limits, arrows."""

from __future__ import annotations

import html.parser
import json
import linecache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_cpu.core.program import regions
from neuron_cpu.core.report import report
from neuron_cpu.page import data, sources, write


@pytest.fixture(scope="module")
def run(matmul):
    return data.run("mine", matmul)


def test_figures_are_those_of_the_report(matmul, run):
    found = report.profile(matmul)
    assert {name: value for name, value, _ in run["figures"]} == found.metrics
    assert (run["time_ns"], run["band_ns"], run["bound"]) == (
        found.time_ns,
        found.band_ns,
        found.bound,
    )
    assert run["dma_profile"] == found.dma_profile and run["dma_profile_note"]
    assert {line["place"] for line in run["lines"]} == {line.place for line in found.lines}
    for line in found.lines:
        (mine,) = [one for one in run["lines"] if one["place"] == line.place]
        assert mine["critical"] == pytest.approx(line.critical, abs=0.1)
        assert mine["busy"] == pytest.approx(list(line.busy.values()), abs=0.1)
        assert mine["bytes"] == line.dma_bytes


def test_source_is_the_kernel_as_it_was_written(matmul, run):
    (file,) = run["files"]
    source = matmul.program.instructions[0].source
    assert source is not None and file["name"] == "kernels.py"
    text = linecache.getlines(source.file)
    assert [row[1] for row in file["rows"]] == [text[n - 1].rstrip() for n, _, _ in file["rows"]]
    assert file["rows"][0][1] == "@nki.jit" and file["rows"][-1][1] == "    return out_hbm"
    used = {n: position for n, _, position in file["rows"] if position >= 0}
    assert used == {line["number"]: at for at, line in enumerate(run["lines"])}


def test_regions_are_the_elements_of_the_operands(matmul, run):
    columns = run["instructions"]
    for at, instruction in enumerate(matmul.program.instructions):
        told = columns["regions"][columns["text"][at]]
        views = [*((1, v) for v in instruction.dst), *((0, v) for v in instruction.src)]
        assert len(told) == len(views)
        for (_, chip, rows, width, offset, shape, strides, written, chosen), (role, view) in zip(
            told, views
        ):
            found = {offset}
            for size, step in zip(shape, strides):
                found = {start + step * k for start in found for k in range(size)}
            assert found == set(regions.elements(view, np.ones(view.shape, bool)).tolist())
            assert min(found) >= 0 and max(found) < rows * width == view.storage.size
            assert (written, chosen, chip) == (role, 0, view.storage.on_chip)
            assert not chip or rows % 128 == 0


# --- limits ---------------------------------------------------------------------------------------
def test_a_long_program_is_cut_with_a_sentence(matmul, run):
    cut = data.run("mine", matmul, most=10)
    count = len(matmul.program)
    assert f"first 10 of {count} instructions" in cut["notes"][0] and not run["notes"]
    columns = cut["instructions"]
    lengths = {
        len(columns[name]) for name in columns if name not in ("opcodes", "texts", "regions")
    }
    assert lengths == {10}
    assert (cut["figures"], cut["lines"]) == (run["figures"], run["lines"])
    for short, long in zip(cut["rows"], run["rows"]):
        assert set(short[2::3]) <= {*range(10), -1}
        assert short[:1] == long[:1] and short[-2:-1] == long[-2:-1]


@given(st.lists(st.tuples(st.integers(0, 3999), st.integers(0, 50)), min_size=1, max_size=60))
def test_slices_keep_the_largest_use(steps):
    steps = sorted({time: use for time, use in steps}.items())
    found = data.largest([(float(time), use) for time, use in steps], 1.0)
    for time, use in found[:-1]:
        before = [u for t, u in steps if t < time][-1:]
        inside = [u for t, u in steps if t == time]
        assert use == max([*before, *inside, 0])


# --- source text ----------------------------------------------------------------------------------
def test_source_lines_of_functions_and_gaps(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(
        "a = 1\n\n\ndef f():\n    def g():\n        return 1\n    return g\n\n\n"
        "def unused():\n    pass\n\n\n@len\ndef h():\n    pass\n"
    )
    numbers = [n for n, _ in sources.shown_lines(str(path), [6, 16])]
    assert numbers == [4, 5, 6, 7, 0, 14, 15, 16]
    assert [n for n, _ in sources.shown_lines(str(path), [1])] == [1, 2, 3]
    assert sources.shown_lines("<typed by somebody>", [1]) == []
    path.write_text("def f(:\n    x\n    y\n    z\n    u\n")
    linecache.checkcache(str(path))
    assert [n for n, _ in sources.shown_lines(str(path), [2])] == [1, 2, 3, 4]


# --- the page -------------------------------------------------------------------------------------
class Scripts(html.parser.HTMLParser):
    """The text of every script of a page, as a browser splits it."""

    def __init__(self, page):
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag == "script":
            self.texts.append("")

    def handle_data(self, text):
        if self.cdata_elem == "script":
            self.texts[-1] += text


def test_data_survive_source_text_that_ends_scripts(run):
    texts = ["</script>", "<!--", "@DATA@", "\u2028", "\ud800", "&lt;"]
    page = write.page("a</script>b", [run], sentences=texts)
    scripts = Scripts(page)
    assert len(scripts.texts) == 2 and not scripts.addresses
    content = json.loads(scripts.texts[0])
    assert content["title"] == "a</script>b" and content["sentences"] == texts
    assert content["runs"] == json.loads(json.dumps([run]))
    assert "document.title" in scripts.texts[1]


# --- arrows ---------------------------------------------------------------------------------------


def test_arrows_of_a_trace_hold_on_to_bars(matmul):
    events = report.perfetto("one", matmul)["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(map(bool, report.producers(matmul))) > 0
    bars = [event for event in events if event["ph"] == "X"]

    def held(arrow):
        return [
            bar["name"]
            for bar in bars
            if bar["tid"] == arrow["tid"] and bar["ts"] <= arrow["ts"] <= bar["ts"] + bar["dur"]
        ]

    pairs = set()
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"] and ends[number]["bp"] == "e"
        (source,), (target,) = held(begin), held(ends[number])
        pairs.add((source, target))
    assert {("dma_copy", "nc_matmul"), ("nc_matmul", "activation"), ("activation", "dma_copy")} <= (
        pairs
    )
