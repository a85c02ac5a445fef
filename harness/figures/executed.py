"""Compares a graph's work on data with the work that was traced and is counted.

A submission can tell tracing from execution. So MACs and estimates count only where graphs ran the
kernels and products that were traced, with their shapes and programs, in every call of the accuracy
check and in the warm-up. No other operator may have run more often or on more elements.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness import sdk
from harness.figures import graphs
from harness.figures.graphs import Graph
from harness.processes.worker import Host, Role
from harness.processes.workers import SubmissionFailed
from harness.session.building import Loaded
from neuron_cpu.runtime.recording import sizes

_CALLS = "harness.figures.executed:calls"


def calls(host: Host, role: str, needed: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Records of the graphs' runs since they were loaded; a graph that varies has several. Graphs
    of `needed` (submodel, bucket, prior) that no prompt has reached run once, on zeros."""
    import torch  # which the driver lacks

    from neuron_cpu.runtime.executed import watching

    model = host.models[Role(role)]
    real = None if sdk.real_libraries() is None else model.traced_model.graphs()
    found = []
    for wrapper in model.models:
        buckets = wrapper.neuron_config.buckets
        examples = wrapper.input_generator() if real is None else buckets
        for number, (bucket, example) in enumerate(zip(buckets, examples)):
            size, prior = sizes(bucket)
            if real is not None:
                graph = real[wrapper.tag][number]
                if [wrapper.tag, size, prior] in needed and not graph.executed:
                    with watching():  # warm-up of NxDI 0.1 runs no graph of several tokens
                        forms = graph.tape.input_types
                        graph.forward([torch.zeros(shape, dtype=kind) for shape, kind in forms])
                kept = graph.executed
            else:
                ran = wrapper.model.executed
                if [wrapper.tag, size, prior] in needed and not ran.get(str(bucket)):
                    with watching():
                        wrapper.model(bucket, *example)
                kept = ran.get(str(bucket), [])
            head = {"submodel": wrapper.tag, "bucket": size, "prior": prior}
            found += [head | counts.as_json() for counts in kept]
    model.reset()
    return found


def check(loaded: Loaded, traced: Sequence[Graph], used: Sequence[tuple[str, int]]) -> None:
    """Refuse a model whose runs differ from its traces. The check takes graphs of a sub-model up to
    the longest bucket that is `used`; no figure counts longer ones."""
    if not sdk.platform().simulates:
        return
    what = "The graphs that ran cannot be held against those that were traced"
    longest = {name: max(n for other, n in used if other == name) for name, _ in used}
    counted = [g for g in traced if g.prior or g.bucket <= longest.get(g.submodel, g.bucket)]
    needed = [list(_key(graph)) for graph in counted]
    try:
        ran = graphs.from_records({"graphs": loaded.call(_CALLS, what, needed=needed).body})
    except ValueError as error:
        raise SubmissionFailed(f"{what}: expected records, got something else.") from error
    for graph in counted:
        of_it = [one for one in ran if _key(one) == _key(graph)]
        others = allowed(graph, [one for one in traced if one.submodel == graph.submodel])
        told = [difference(one, graph, others) for one in of_it] or ["it did not run"]
        if any(told):
            raise SubmissionFailed(
                f"{graph.submodel}, bucket {graph.sizes}: {next(filter(None, told))}; run the "
                "traced work on data, since its MACs and time are counted."
            )


def allowed(graph: Graph, kin: Sequence[Graph]) -> dict[str, tuple[int, int]]:
    """Bounds on the runs and elements of PyTorch's other operators in a graph. A constant that a
    module makes at its first call (frequencies of a rotation) may belong to any graph of the same
    sub-model: the first traced and the first run may differ."""
    found = dict(graph.others)
    for other in kin:
        for name, (count, elements) in other.others.items():
            own, largest = found.get(name, (0, 0))
            if count > own:
                found[name] = count, largest + elements
    return found


def difference(ran: Graph, traced: Graph, others: Mapping[str, tuple[int, int]]) -> str | None:
    """How a run differs from the trace, in words; None where it does not."""
    here, there = _rows(ran), _rows(traced)
    for row in {**there, **here}:
        if here[row] != there[row]:
            in_kernel, name, shapes, macs, program = row
            kind = f"program {program} of the kernel" if in_kernel else "product"
            return (
                f"the {kind} {name} of {list(map(list, shapes))} ({macs:,} MACs) ran "
                f"{here[row]} times on data, expected {there[row]} times as it was traced"
            )
    for name, (count, elements) in ran.others.items():
        most, largest = others.get(name, (0, 0))
        if count > most or elements > largest:
            return (
                f"PyTorch's {name} ran {count} times on data and made {elements:,} elements, "
                f"expected at most {most} times and {largest:,}, as it was traced"
            )
    return None


def _key(graph: Graph) -> tuple[str, int, int]:
    return graph.submodel, graph.bucket, graph.prior


def _rows(graph: Graph) -> Counter:
    """(in a kernel, name, shapes, MACs, program) -> times, of kernels and products."""
    found: Counter = Counter()
    for row in graph.operators:
        if row.macs or row.in_kernel:
            found[row.in_kernel, row.name, row.shapes, row.macs, row.program] += row.count
    return found
