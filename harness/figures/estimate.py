"""Estimates a graph's time on Trainium: schedules its kernels, bounds everything else.

A graph is the sequence of what one rank runs: kernel calls, collectives and PyTorch operators. Only
shapes are needed: the model is traced on the meta device as compile traces it. Equal layers share
one Program, which is scheduled once and repeated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import is_refusal, words_of
from harness.figures import tracing
from harness.figures.graphs import CHUNK, DECODE, PREFILL, prompt_calls, sizes
from harness.figures.tracing import Bucket
from harness.processes.worker import Host, Role
from harness.settings import Settings
from harness.simulator import COMPILER_ORDER, Program, Schedule, bands, cost, report, schedule, spec
from harness.swapping import running as swapping
from harness.swapping.running import Ids
from neuron_cpu.console import progress
from neuron_cpu.runtime import outside, recording
from neuron_cpu.runtime.graph import trace
from neuron_cpu.runtime.recording import Event

MICROSECOND = 1e3  # nanoseconds
KERNEL, COLLECTIVE, TORCH = "NKI kernel", "collective", "PyTorch"
TURNED = "turned operands of "  # and the kernel that reads them


@dataclass
class Operator:
    """Equal events of one graph.

    Attributes:
        kind: KERNEL, COLLECTIVE or TORCH.
        name: kernel or operator.
        where: module path, layer numbers as ``*``.
        first: module path of the first one.
        count: times per graph.
        time_ns: one event, overheads included.
        bytes: that one event moves.
        macs: of one event, transposes excluded.
        profile: figures of a kernel.
    """

    kind: str
    name: str
    where: str
    count: int
    time_ns: float
    bytes: int
    macs: int
    profile: report.Profile | None = None
    first: str = ""

    @property
    def total_ns(self) -> float:
        return self.count * self.time_ns


@dataclass
class GraphEstimate:
    """One sub-model and bucket on one rank.

    Attributes:
        submodel, bucket, batch: which graph.
        operators: in order of first appearance.
        launch_ns: launch of one execution and the host's work around it.
        schedules: of the distinct kernels, in order of first appearance.
        steps: (kind, name, module, nanoseconds) of everything in order.
        prior: cached tokens that a prompt's graph reads, tiles of them in a chunk.
    """

    submodel: str
    bucket: int
    batch: int
    operators: list[Operator]
    launch_ns: float
    schedules: list[Schedule] = field(default_factory=list)
    steps: list[tuple[str, str, str, float]] = field(default_factory=list)
    prior: int = 0

    @property
    def sizes(self) -> str:
        """The bucket in words."""
        return sizes(self.bucket, self.prior)

    @property
    def latency_ns(self) -> float:
        return self.launch_ns + sum(op.total_ns for op in self.operators)

    @property
    def band_ns(self) -> tuple[float, float]:
        """Shortest and longest time of a device that fit the estimate: each kernel by the band of
        its class, other operators by the band of all kernels, the launch without a band."""
        low = high = self.launch_ns
        for op in self.operators:
            if op.profile is not None:
                first, last = op.profile.band_ns
                around = op.time_ns - op.profile.time_ns
                first, last = first + around, last + around
            else:
                first, last = bands.load()[bands.ALL].measured(op.time_ns)
            low += op.count * first
            high += op.count * last
        return low, high

    def figures(self) -> dict[str, float]:
        """The graph's figures under the Neuron profiler's names."""
        time = self.latency_ns
        kernels = [(op.count, op.profile) for op in self.operators if op.profile is not None]

        def total(name: str) -> float:
            return sum(count * profile.metrics[name] for count, profile in kernels)

        rows = total("dma_transfer_count")
        macs = sum(op.count * op.macs for op in self.operators)
        moved = sum(op.count * op.bytes for op in self.operators if op.kind != COLLECTIVE)
        tensor = total("tensor_engine_active_time")
        turned = (
            count * profile.metrics["transpose_time_percent"] * profile.time_ns
            for count, profile in kernels
        )
        water = [profile.metrics["sbuf_high_water_bytes"] for _, profile in kernels]
        return {
            "total_time": time,
            **{f"{key}_active_time": total(f"{key}_active_time") for key in report.ENGINE_KEYS},
            "model_flops": 2 * macs,
            "mfu_estimated_percent": 100 * macs / (spec.GEN2.peak_macs_per_ns * time),
            "mbu_estimated_percent": 100 * moved / (spec.GEN2.hbm_bytes_per_ns * time),
            "hbm_read_bytes": total("hbm_read_bytes"),
            "hbm_write_bytes": total("hbm_write_bytes"),
            "dma_transfer_average_bytes": total("dma_transfer_bytes") / rows if rows else 0.0,
            "transpose_share_of_tensor_engine_percent": sum(turned) / tensor if tensor else 0,
            "sbuf_high_water_bytes": max(water, default=0),
        }


@dataclass
class PromptEstimate:
    """A prompt of so many tokens, fed in chunks: graphs, and how often each runs."""

    calls: list[tuple[GraphEstimate, int]]
    tokens: int
    chunk: int

    @property
    def latency_ns(self) -> float:
        return sum(graph.latency_ns * count for graph, count in self.calls)


# --- tracing --------------------------------------------------------------------------------------
_KINDS = {recording.KERNEL: KERNEL, recording.COLLECTIVE: COLLECTIVE, recording.TORCH: TORCH}


def events_of(record: recording.GraphRecord) -> list[Event]:
    """The events of a traced graph in order, without those that only rename data."""
    return [
        event
        for event in record.events
        if event.kind != recording.TORCH or event.name not in recording.METADATA_ONLY
    ]


def logits_rows(record: recording.GraphRecord, vocabulary: int) -> float:
    """Rows of logits fp32 of a sequence that a call of the graph sends to the host, or as many
    bytes in another type; tokens count as one row."""
    last = record.events[-1].outputs if record.events else ()
    logits = [tensor for tensor in last if tensor.shape and tensor.shape[-1] == vocabulary]
    if not logits or len(logits[0].shape) < 2:
        return 1.0
    return logits[0].shape[-2] * logits[0].dtype.itemsize / 4


def graph_milliseconds(host: Host, role: str, submodel: str, bucket: int) -> dict[str, Any]:
    """One execution of a bucket under the default assumptions, beside the submission.

    Returns `ms`: the estimate, and the shortest and longest time of a device that fit it; `macs`:
    all, and those in kernels; `programs`: calls of each program of a kernel, by fingerprint.
    """
    model, settings = host.models[Role(role)], host.job.settings
    wrapper = next(wrapper for wrapper in model.models if wrapper.tag == submodel)
    estimator = _estimator(settings, cost.DEFAULT_PROFILE, cost.Overheads())
    with host.told_as_the_submission("The model cannot be traced"):
        record = tracing.record(model, wrapper, bucket, host.job.scratch)
    events = events_of(record)
    rows = logits_rows(record, model.config.vocab_size)
    found = estimator.graph(submodel, bucket, settings.batch_size, events, rows)
    inside = sum(event.macs for event in events if event.kind == recording.KERNEL)
    return {
        "ms": [time / 1e6 for time in (found.latency_ns, *found.band_ns)],
        "macs": [sum(event.macs for event in events), inside],
        "programs": Counter(row["program"] for row in record.operators if row["in_kernel"]),
    }


@dataclass
class Estimates:
    """The estimates of one model.

    Attributes:
        graphs: one for each sub-model and bucket asked for.
        prompt: the longest prompt, where prompts may come in chunks: every call with its graph.
    """

    graphs: list[GraphEstimate]
    prompt: PromptEstimate | None = None


def graphs(host: Host, role: str, dma_profile: str) -> Estimates:
    """The estimates that the settings ask for."""
    settings, model = host.job.settings, host.models[Role(role)]
    estimator = _estimator(settings, dma_profile, overheads(settings))
    wrappers = {wrapper.tag: wrapper for wrapper in model.models}
    known: dict[tuple[str, str], GraphEstimate] = {}

    def graph(tag: str, bucket: Bucket) -> GraphEstimate:
        key = tag, str(bucket)
        if key not in known:
            record = tracing.record(model, wrappers[tag], bucket, host.job.scratch)
            logits = logits_rows(record, model.config.vocab_size)
            rows = settings.ctx_batch_size if tag == PREFILL else None
            size, prior = recording.sizes(bucket)
            known[key] = estimator.graph(
                tag, size, rows or settings.batch_size, events_of(record), logits
            )
            known[key].prior = prior
            progress.report("graphs", min(len(known), total), total)
        return known[key]

    buckets = {tag: list(wrapper.neuron_config.buckets) for tag, wrapper in wrappers.items()}
    shown = [(tag, bucket) for tag, own in buckets.items() for bucket in _telling(own)]
    runs = _runs(settings, buckets)
    total = len({(tag, str(bucket)) for tag, bucket in [*shown, *runs]})
    progress.report("graphs", 0, total)
    found = [graph(*call) for call in shown]
    if settings.speculation is not None and settings.speculation.own_draft and role != Role.DRAFT:
        step = next(
            graph
            for graph in reversed(graphs(host, Role.DRAFT, dma_profile).graphs)
            if graph.submodel == DECODE
        )
        found.append(replace(step, submodel=f"draft_{DECODE}"))
    if not runs or settings.prefill_chunk is None:
        return Estimates(found)
    steps = [(graph(*call), count) for call, count in runs.items()]
    return Estimates(found, PromptEstimate(steps, settings.seq_len, settings.prefill_chunk))


def _runs(settings: Settings, buckets: dict[str, list[Bucket]]) -> Counter[tuple[str, Bucket]]:
    """How often the longest prompt in chunks runs each graph; empty where none comes in chunks."""
    chunk = settings.prefill_chunk
    if CHUNK not in buckets or chunk is None or settings.speculation is not None:
        return Counter()
    longest, most = (recording.sizes(buckets[tag][-1])[0] for tag in (PREFILL, DECODE))
    return Counter(
        (tag, next(bucket for bucket in buckets[tag] if recording.sizes(bucket)[0] >= length))
        for tag, length in prompt_calls(settings.seq_len, longest, chunk, most)
    )


def _telling(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The graphs to show: the largest ones. With prefixes these are the longest prompt without a
    prefix, and the shortest behind the longest prefix, which show what a hit saves."""
    pairs = [bucket for bucket in buckets if not isinstance(bucket, int) and bucket[1] == 0]
    if not pairs:
        return [buckets[-1]]
    most = max(bucket[1] for bucket in buckets if not isinstance(bucket, int))
    return [pairs[-1], [pairs[0][0], most]]


def overheads(settings: Settings) -> cost.Overheads:
    """Costs outside of kernels, the command line's on top of the defaults."""
    given = {name: us for name, us in vars(settings).items() if name.endswith("_us")}
    values = {
        f"{name.split('_')[0]}_ns": us * MICROSECOND for name, us in given.items() if us is not None
    }
    if settings.collective_gb_per_s is not None:
        values["collective_bytes_per_ns"] = settings.collective_gb_per_s  # GB/s = bytes per ns
    measured = cost.dma_profile(settings.dma_profile or cost.DEFAULT_PROFILE).around
    return cost.Overheads(**{**measured, **values})


# --- estimating -----------------------------------------------------------------------------------
@dataclass
class Estimator:
    """Turns recorded graphs into times; equal programs are scheduled once.

    Attributes:
        dma_profile: name of the DMA profile.
        order: in which order engines take their instructions (``schedule.ORDERS``).
        overheads: costs outside of kernels.
        ranks: tensor-parallel degree.
        runs_ahead: a decode step begins while the host looks at the last one (async_mode).
        samples: the graph does, so that tokens come to the host instead of logits.
    """

    dma_profile: str
    overheads: cost.Overheads
    ranks: int
    order: str = COMPILER_ORDER
    runs_ahead: bool = False
    samples: bool = False
    _known: dict[int, tuple[Schedule, report.Profile]] = field(default_factory=dict)

    def _kernel(self, program: Program) -> tuple[Schedule, report.Profile]:
        """Schedule and figures of a program."""
        found = self._known.get(id(program))
        if found is None:
            made = schedule(program, self.dma_profile, self.order)
            found = self._known[id(program)] = made, report.profile(made)
        return found

    def time(self, event: Event, modular: bool) -> float:
        """Nanoseconds of one event by itself."""
        if event.kind == recording.COLLECTIVE:
            return self.overheads.collective(outside.moved(event), self.ranks, event.name)
        if event.program is not None:
            alone = self._kernel(event.program)[0].total
            return alone + self.overheads.kernel_ns + self.turning(event, modular)
        start = self.overheads.cache_ns if event.name in outside.ROWS else 0.0
        if self.dma_profile == cost.UPPER_BOUND:  # under which elements pass beside products
            moved, core = outside.moved(event) if event.macs or start else 0, spec.CORE
            return start + max(moved / core.hbm_bytes_per_ns, event.macs / core.peak_macs_per_ns)
        # the compiler has a pass, DeConcat, behind which products read the parts
        return start + outside.work(event).ns(modular) * (modular or event.name != "cat")

    def turning(self, event: Event, modular: bool) -> float:
        """Nanoseconds in which operands of a kernel that are no contiguous rows are copied for it.

        For a decode step weights have their layout since they were loaded.
        """
        return _copied(event, modular).ns(modular) if event.program is not None else 0.0

    def _times(self, events: Sequence[Event], submodel: str) -> list[float]:
        """Nanoseconds of each event."""
        times = [self.time(event, submodel == PREFILL) for event in events]
        for at, (before, event) in enumerate(zip(events, events[1:]), 1):
            # Weights that data choose are read once, by the product behind them: NxDI compiles
            # experts with --internal-enable-dge-levels vector_dynamic_offsets.
            reads = before.name in outside.ROW_READS and event.macs
            if reads and 2 * outside.moved(event) >= outside.moved(before):
                times[at - 1] = min(times[at - 1], self.overheads.cache_ns)
        return times

    def graph(
        self, submodel: str, bucket: int, batch: int, events: Sequence[Event], logits: float = 1.0
    ) -> GraphEstimate:
        """The estimate of one graph from its recorded events; `logits_rows` that it sends."""
        rows: dict[tuple, Operator] = {}
        plans: dict[int, Schedule] = {}
        steps = []
        modular = submodel == PREFILL
        for event, time in zip(events, self._times(events, submodel)):
            # equal layers count as one row
            where, kind, moved = event.where, _KINDS[event.kind], outside.moved(event)
            place = ".".join("*" if part.isdigit() else part for part in where.split("."))
            turning = self.turning(event, modular)
            if event.program is not None and any(_copied(event, True)):
                name = TURNED + event.name
                if turning:
                    steps.append((TORCH, name, where, turning))
                dma = spec.CORE.dma
                size = round(_copied(event, modular).dma * dma.engines * dma.bytes_per_ns)
                row = Operator(TORCH, name, place, 0, turning, size, 0, first=where)
                rows.setdefault((name, place, turning), row).count += 1
                time -= turning
            steps.append((kind, event.name, where, time))
            key = (kind, event.name, place, moved, event.macs, time, id(event.program))
            if key in rows:
                rows[key].count += 1
                continue
            size = moved if time else 0
            made = Operator(kind, event.name, place, 1, time, size, event.macs, first=where)
            if event.program is not None:
                plan, made.profile = self._kernel(event.program)
                plans[id(event.program)] = plan
                figures = made.profile.metrics
                made.bytes = int(figures["hbm_read_bytes"] + figures["hbm_write_bytes"])
            rows[key] = made
        return GraphEstimate(
            submodel,
            bucket,
            batch,
            list(rows.values()),
            self._around(submodel, batch, sum(row.total_ns for row in rows.values()), logits),
            list(plans.values()),
            steps,
        )

    def _around(self, submodel: str, batch: int, device_ns: float, logits: float) -> float:
        """The time that launch and host add to the device's: each row has its logits, or of a call
        of several tokens more."""
        if self.runs_ahead and submodel == DECODE:
            return self.overheads.exposed_ns(device_ns)
        rows = 0 if self.samples else batch
        return self.overheads.step_ns(rows) + rows * (logits - 1) * self.overheads.logits_ns


def _estimator(settings: Settings, dma_profile: str, costs: cost.Overheads) -> Estimator:
    """The estimator of the graphs that the settings ask for."""
    ranks, samples = settings.tp_degree or 1, settings.on_device_sampling
    ahead = bool(settings.async_mode)
    return Estimator(dma_profile, costs, ranks, runs_ahead=ahead, samples=samples)


def _copied(event: Event, modular: bool) -> outside.Work:
    """What turns a kernel's operands; for a step weights lie as they do since they were loaded."""
    return outside.turning([one for one in event.inputs if modular or not one.weight])


def swapped(
    host: Host, ids: Ids, lengths: Sequence[int], plan: Sequence[str], swapped: bool
) -> dict[str, Any]:
    """One execution by the cost model, on shapes alone.

    Returns `ms`: the swapped, and the shortest and longest time of a device that fit it. Returns
    `why_not` where no swapped can be made.
    """
    model = swapping.prepared(host, swapped, 1)  # no scores are kept on shapes alone: eager
    try:
        with swapping.changed(host, model, plan, swapped):
            tokens, *mask = swapping.inputs(ids, lengths)
            # some models look at the mask's values: here it is known
            record = trace(swapping.Hidden(model, *mask), (tokens,), "model", len(ids[0]))
    except Exception as error:
        if not is_refusal(error):
            error = RuntimeError(host.where(error))
        return {"ms": [], "why_not": words_of(error)[:400]}
    finally:
        swapping.forget_model()  # its parameters are shapes from here on
    estimator = Estimator(cost.DEFAULT_PROFILE, cost.Overheads(), 1)
    found = estimator.graph("model", len(ids[0]), 1, events_of(record))
    return {"ms": [ns / 1e6 for ns in (found.latency_ns, *found.band_ns)], "why_not": ""}
