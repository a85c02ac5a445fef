"""What the hour asks of a compiler: every construct that no public run shows, and every kernel."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from harness.device import calls, model, plan
from harness.device.probes import PROBES
from neuron_cpu.core import NkiError
from neuron_cpu.core.check import provenance

NO_PROBE = {
    "nisa.builtin_custom_op": "runs a program of which no source tells the format",
    "nisa.dma_engine": "no instruction of that language takes it",
    "nisa.range_select": "its page is for a later chip than the language's kernels here",
    "nl.gemm_grid": "no page tells its arguments",
    "nl.gemm_stationary_grid": "no page tells its arguments",
    "ncc.psum.kind": "the stand-in's own", "ncc.sbuf.kind": "the stand-in's own",
}  # fmt: skip


def unseen() -> set[str]:
    """Constructs of `neuronxcc.nki` that a table calls documented or unproven."""
    rows = provenance.table().items()
    return {
        construct for construct, row in rows
        if row.status != provenance.SEEN and not construct.startswith(("nki.", "neuronxcc."))
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # a probe may be doubtful
def test_every_construct_that_no_public_run_shows_has_a_probe_that_the_simulator_takes(
    tmp_path, monkeypatch
):
    shown: set[str] = set()
    for number, (name, probe) in enumerate(PROBES.items()):
        file = tmp_path / f"probe_{number}.py"
        file.write_text(probe.text)
        for target in ("trn1", "trn2"):
            monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
            try:
                found = model.constructs(probe.call | {"module": str(file)})
                break
            except NkiError as error:
                refused = error
        else:
            raise AssertionError(f"{name}: {refused}")
        assert found, f"{name} shows nothing that is not seen; drop it"
        shown |= set(found)
    assert unseen() - shown == set(NO_PROBE)


def test_what_llama_uses_and_no_run_shows_is_probed_first():
    used = provenance.in_source((calls.ROOT / calls.SUBMISSIONS[False]).read_text())
    findings = provenance.judge(used)
    open_ones = {one.construct for one in findings if one.status != provenance.SEEN}
    first = [entry.name for entry in plan.entries({}) if entry.kind == plan.CONSTRUCT]
    shown: set[str] = set()
    for name in first[: len(open_ones)]:
        shown |= set(provenance.in_source(PROBES[name.removeprefix("construct ")].text))
    assert open_ones <= shown


def jitted(file: str) -> Iterator[str]:
    """Kernels of a submission."""
    for node in ast.parse((calls.ROOT / file).read_text()).body:
        if "nki.jit" in map(ast.unparse, getattr(node, "decorator_list", ())):
            yield node.name


def test_every_kernel_of_llama_is_timed_in_every_bucket_and_its_numbers_are_compared():
    """Graphs of a length are one bucket each; the first two are traced here."""
    traced = {name: model.graph(name) for name in plan.FIRST}
    asked = [call for graph in traced.values() for call in graph["kernels"]]
    assert {call["kernel"] for call in asked} == set(jitted(calls.SUBMISSIONS[False]))
    every = list(plan.entries(traced))
    for kind in (plan.KERNEL, plan.NUMBERS):
        had = [entry.call for entry in every if entry.kind == kind]
        assert all(call in had for call in asked)
    names = {entry.name for entry in every}
    lengths = {name: {int(g.split("-")[1]) for g in plan.GRAPHS_OF_1B if g.startswith(name)}
               for name in ("prefill", "decode")}  # fmt: skip
    assert lengths["prefill"] >= {64, 128, 512, 640, 1024, 2048} >= lengths["decode"]
    assert {f"whole graphs of {length}" for length in lengths["decode"]} <= names


@pytest.mark.parametrize("today", [False, True])
def test_whole_graphs_come_before_what_differs_in_keywords_alone(today):
    names = [entry.name for entry in plan.entries({}, today)]
    late = [names.index(name) for name in names if name.endswith("by keywords")]
    assert all(names.index("whole graphs of 2048") < place for place in late)
    assert bool(late) != today
