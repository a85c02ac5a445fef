"""Profiles of graphs as terminal tables, JSON, a Perfetto trace and a page."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.figures import estimate
from harness.processes.worker import Host
from harness.settings import PROFILE_FILES, Settings
from harness.simulator import COMPILER_ORDER, Schedule, cost, report, spec, tables
from neuron_cpu.console import terminal
from neuron_cpu.files import write_text_atomically
from neuron_cpu.page import data
from neuron_cpu.page.write import as_table
from neuron_cpu.page.write import write as write_page

# Columns that a narrow terminal does without, the first one first.
EXPENDABLE = ("MFU", "GB/s", "MB each", "times", "µs each", "bound by")
ELSEWHERE = "a wider terminal or --profile-output shows them"
PAGE_INSTRUCTIONS = 15_000  # of each kernel that the page lists: it has some ten kernels
_PLAIN = "submodel", "bucket", "prior", "batch", "latency_ns"  # of a graph
SOURCE_LINES = 8  # of a kernel that are printed
SMALL = 0.005  # operators below this share of the graph are printed as one row


def headline(graph: estimate.GraphEstimate) -> str:
    """One sentence: what, how long, and the rate that users know."""
    milliseconds = graph.latency_ns / 1e6
    rate = graph.batch / graph.latency_ns * 1e9
    if graph.prior:
        says = f"{milliseconds:.3f} ms for the tokens behind what is cached"
    elif "context" in graph.submodel:
        says = f"TTFT {milliseconds:.3f} ms, {rate * graph.bucket:,.0f} prompt tokens/s"
    elif graph.submodel.endswith("speculation_model"):
        says = f"{milliseconds:.3f} ms for several tokens"
    elif graph.submodel.endswith("token_generation_model"):
        says = f"{rate:,.1f} tokens/s, {milliseconds:.3f} ms a token"
    else:
        says = f"{milliseconds:.3f} ms for one execution"
    low, high = (time / 1e6 for time in graph.band_ns)
    return (
        f"{graph.submodel}, bucket {graph.sizes}, batch {graph.batch}: {says} (estimated; "
        f"{low:.3f} to {high:.3f} ms on a device by the calibration's bands)"
    )


def binding(graph: estimate.GraphEstimate) -> str:
    """The graph's bound, in the words of the operator that takes most of its time; the launch
    stands first where it takes more."""
    worst = max(graph.operators, key=lambda op: op.total_ns)
    share = worst.total_ns / graph.latency_ns
    words = (
        worst.profile.binding if worst.profile is not None else f"{worst.kind}, outside of kernels"
    )
    where = f" ({worst.where})" if worst.where else ""
    told = f"{share:.0%} in {worst.name}{where}: {words}"
    if graph.launch_ns > worst.total_ns:
        told = f"{graph.launch_ns / graph.latency_ns:.0%} in launch and host; {told}"
    return told


def assumed(settings: Settings) -> str:
    """The name of the DMA profile; an unknown one is refused."""
    name = settings.dma_profile or cost.DEFAULT_PROFILE
    cost.dma_profile(name)
    return name


def profile(host: Host, role: str, width: int, styled: bool) -> str:
    """Estimate the graphs of the settings, in the submission's process.

    Returns the tables as text of `width` columns; writes `PROFILE_FILES` to the process's folder.
    """
    settings = host.job.settings
    name = assumed(settings)
    with host.told_as_the_submission("The model cannot be traced"):
        found = estimate.graphs(host, role, name)
    text = io.StringIO()
    out = terminal.written_to(text, width, styled)
    show(found.graphs, name, out)
    if found.prompt is not None:
        terminal.print_table(out, _calls(found.prompt))
    if settings.profile_output:
        write(found, name, host.job.scratch)
    return text.getvalue()


def show(graphs: Sequence[estimate.GraphEstimate], dma_profile: str, out: Console) -> None:
    """Print every graph, then every distinct kernel by source line."""
    out.print(f"{tables.estimate_note(dma_profile)}; schedule {COMPILER_ORDER}")
    seen: set[int] = set()
    for graph in graphs:
        out.print(f"\n{headline(graph)}", style="bold")
        out.print(f"bound by {binding(graph)}")
        title = "figures; those of engines, DMA and HBM count the NKI kernels"
        terminal.print_table(out, tables.figure_table(title, graph.figures()))
        terminal.print_table(out, _operators(graph), EXPENDABLE, "bound by", ELSEWHERE)
        out.print(included(graph))
    for graph in graphs:
        for op in graph.operators:
            if op.profile is None or id(op.profile) in seen or not op.profile.lines:
                continue
            seen.add(id(op.profile))
            time = tables.microseconds(op.profile.time_ns)
            where = f"({'; '.join(filter(None, (op.where, graph.submodel)))})"
            out.print(Text(f"\n{op.name}", "bold") + f" {where}: {time} µs")
            out.print(f"bound by {op.profile.binding}")
            for words in op.profile.spills:
                out.print(words)
            lines = tables.line_table(op.profile.lines, op.profile.time_ns, SOURCE_LINES)
            terminal.print_table(
                out, lines, tables.expendable(op.profile.lines), "bound by", ELSEWHERE
            )


def _calls(prompt: estimate.PromptEstimate) -> Table:
    """A long prompt, call by call of equal graphs."""
    title = (
        f"\nprompt of {prompt.tokens:,} tokens in chunks of {prompt.chunk}: "
        f"TTFT {prompt.latency_ns / 1e6:,.3f} ms (estimated)"
    )
    table = terminal.table_of("sub-model|>bucket|>times|>ms each|>total ms", title)
    for graph, count in prompt.calls:
        one, total = (f"{time / 1e6:,.3f}" for time in (graph.latency_ns, count * graph.latency_ns))
        table.add_row(graph.submodel, str(graph.bucket), str(count), one, total)
    return table


def _operators(graph: estimate.GraphEstimate) -> Table:
    """Operators by their share of the graph's time."""
    columns = "~operator and module|~runs as|>times|>µs each|>total µs|>share|>MB each|>GB/s|"
    table = terminal.table_of(f"{columns}>MFU|~bound by", "\noperators of one rank")
    ordered = sorted(graph.operators, key=lambda op: -op.total_ns)
    shown = [
        op
        for op in ordered
        if op.kind == estimate.KERNEL
        or op.total_ns > SMALL * graph.latency_ns
        or op.name.startswith(estimate.TURNED)
    ]
    for op in shown:
        table.add_row(_label(op, shown), *_operator_cells(op, graph.latency_ns))
    rest = sum(op.total_ns for op in ordered) - sum(op.total_ns for op in shown)
    names = f"{len(ordered) - len(shown)} smaller ones", "launch and host"
    for name, time in zip(names, (rest, graph.launch_ns)):
        cells = tables.microseconds(time), f"{time / graph.latency_ns:.1%}"
        table.add_row(name, "", "", "", *cells, "", "", "", "reports" if name in names[1:] else "")
    return table


def included(*graphs: estimate.GraphEstimate) -> str:
    """The parts of an operator's time beside the kernel's own."""
    operators = [op for graph in graphs for op in graph.operators]
    own = (op.time_ns - op.profile.time_ns for op in operators if op.profile is not None)
    start = tables.microseconds(max(own, default=0.0))
    said = (
        f"A kernel's µs include up to {start} for its launch and collectives; its own profile and "
        f"page are of the kernel alone. nki.benchmark adds {spec.GRAPH_START_NS / 1e3:g} µs for a "
        "graph of its own."
    )
    turned = [op for op in operators if op.name.startswith(estimate.TURNED)]
    if turned:
        said += (
            " Turned operands are views that are no contiguous rows, such as weight.transpose(0, 1)"
            ": they are copied before the kernel reads them. Give it tensors that are contiguous, "
            "or turn weights when they are loaded."
        )
    if not all(op.time_ns for op in turned):
        said += (
            " Weights take no time in token generation: NxDI lays them out for it when it loads "
            "them. In context encoding the same views are copied."
        )
    return said


def _label(op: estimate.Operator, shown: Sequence[estimate.Operator]) -> str:
    """Name and module; of a single one beside others of its name, the module that it is in."""
    alike = [other for other in shown if (other.name, other.where) == (op.name, op.where)]
    return f"{op.name} {op.first if op.count == 1 and len(alike) > 1 else op.where}".rstrip()


def _operator_cells(op: estimate.Operator, total: float) -> list[str]:
    time = op.time_ns or 1.0
    words = op.profile.binding if op.profile is not None else ""
    if op.kind != estimate.KERNEL:
        words = "assumed" if op.kind == estimate.COLLECTIVE else "engines' work"
        words = words if op.time_ns else "laid out when loaded"
    return [
        op.kind,
        str(op.count),
        tables.microseconds(op.time_ns),
        tables.microseconds(op.total_ns),
        f"{op.total_ns / total:.1%}",
        f"{op.bytes / 1e6:.2f}",
        f"{op.bytes / time:.0f}",
        f"{op.macs / (spec.GEN2.peak_macs_per_ns * time):.1%}" if op.macs else "",
        words,
    ]


# --- files ----------------------------------------------------------------------------------------
def as_json(found: estimate.Estimates, dma_profile: str) -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    return {
        "prompt": None if found.prompt is None else _prompt_json(found.prompt),
        "estimated": True,
        "dma_profile": dma_profile,
        "dma_profile_note": cost.dma_profile(dma_profile).note,
        "schedule_order": COMPILER_ORDER,
        "graphs": [
            {
                **{name: getattr(g, name) for name in _PLAIN},
                "band_ns": list(g.band_ns),
                "binding": binding(g),
                "figures": g.figures(),
                "operators": [
                    vars(op) | {"profile": op.profile and op.profile.to_json()}
                    for op in g.operators
                ],
            }
            for g in found.graphs
        ],
    }


def _prompt_json(found: estimate.PromptEstimate) -> dict[str, Any]:
    calls = [
        {"submodel": g.submodel, "bucket": g.bucket, "times": count, "latency_ns": g.latency_ns}
        for g, count in found.calls
    ]
    return {**vars(found), "latency_ns": found.latency_ns, "calls": calls}


def write(found: estimate.Estimates, dma_profile: str, folder: Path) -> list[Path]:
    """profile.json, trace.json (for ui.perfetto.dev) and page.html; their paths."""
    graphs = found.graphs
    written = [folder / name for name in PROFILE_FILES]
    contents = json.dumps(as_json(found, dma_profile), indent=1), trace(graphs, dma_profile)
    write_text_atomically(written[0], contents[0])
    write_text_atomically(written[1], json.dumps(contents[1]))
    write_page(
        written[2],
        "Kernels of " + ", ".join(f"{g.submodel} {g.sizes}" for g in graphs),
        [data.run(label, made, PAGE_INSTRUCTIONS) for label, made in _by_time(graphs)],
        tables=[as_table(_operators(g)) | {"title": headline(g)} for g in graphs],
        sentences=[included(*graphs)],
    )
    return written


def trace(graphs: Sequence[estimate.GraphEstimate], dma_profile: str) -> dict[str, Any]:
    """For ui.perfetto.dev: a process for each graph with every operator in order, and one for each
    distinct kernel with its engines and DMA queues."""
    events: list[dict[str, Any]] = []
    for pid, graph in enumerate(graphs, start=1):
        label = f"{graph.submodel}, bucket {graph.sizes}, batch {graph.batch}"
        events.append(report.meta_event("process_name", pid, 0, label))
        kinds = (estimate.KERNEL, estimate.COLLECTIVE, estimate.TORCH)
        events += [report.meta_event("thread_name", pid, k, kind) for k, kind in enumerate(kinds)]
        clock = graph.launch_ns
        for kind, name, where, time in graph.steps:
            if time:
                events.append(
                    report.slice_event(name, pid, kinds.index(kind), clock, time, {"module": where})
                )
            clock += time
    for number, (label, schedule) in enumerate(_distinct(graphs), start=len(graphs) + 1):
        events += report.trace_events(schedule, number, label)
    return report.trace_file(events, dma_profile)


def _by_time(graphs: Sequence[estimate.GraphEstimate]) -> list[tuple[str, Schedule]]:
    """The distinct kernels, first the one that takes most of a run's graphs: a page opens on it."""
    times: dict[str, float] = {}
    for graph in graphs:
        for kind, name, _, time in graph.steps:
            if kind == estimate.KERNEL:
                label = _kernel_label(graph, name)
                times[label] = times.get(label, 0.0) + time
    return sorted(_distinct(graphs), key=lambda one: -times.get(one[0], 0.0))


def _kernel_label(graph: estimate.GraphEstimate, kernel: str) -> str:
    return f"{graph.submodel} {graph.sizes}: {kernel}"


def _distinct(graphs: Sequence[estimate.GraphEstimate]) -> list[tuple[str, Schedule]]:
    """Every distinct kernel once, labelled with the graph that runs it."""
    found: dict[int, tuple[str, Schedule]] = {}
    for graph in graphs:
        for schedule in graph.schedules:
            label = _kernel_label(graph, schedule.program.name)
            found.setdefault(id(schedule), (label, schedule))
    return list(found.values())
