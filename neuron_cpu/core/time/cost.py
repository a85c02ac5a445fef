"""The cost of one instruction: engine time, DMA rows, collectives.

Engine cycles stand in the instruction table; this module turns them into nanoseconds and holds the
two things that the table does not know: how a DMA transfer breaks into rows and how long a row
takes under each DMA profile. Sources of every constant: spec.py.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..device import spec
from ..device.errors import refuse
from ..device.spec import CORE, Engine, NeuronCore, in_force, using
from ..instructions.copies import DMA_SUM
from ..instructions.ranks import moved_bytes
from ..program.program import Instruction
from ..program.view import View


# --- DMA profiles ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class DmaProfile:
    """How long one DMA engine takes for one row (descriptor).

    Attributes:
        name: what ``profile=`` names.
        note: what it stands for.
        row_ns: nanoseconds of one row of the given number of contiguous bytes.
        issued: hardware makes the descriptors where the generation has it, transfer by transfer.
        keeps: the compiler of that release keeps tiles that are loaded again (passes/keep.py).
        generation, constants: of a measured device, what differs from `spec.py` (`with_constants`).
        around: of such a device, fields of `Overheads`.
    """

    name: str
    note: str
    row_ns: Callable[[int], float]
    issued: bool = True
    keeps: bool = True
    generation: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)
    around: Mapping[str, float] = field(default_factory=dict)

    def core(self, core: NeuronCore) -> NeuronCore:
        """The generation as this profile has it."""
        return with_constants(core, self.constants) if core.name == self.generation else core

    def bandwidth(self, row_bytes: int) -> float:
        """GB/s of the whole core with rows of this size on all engines."""
        return row_bytes / self.row_ns(row_bytes) * CORE.dma.engines

    @property
    def peak(self) -> float:
        """GB/s of the whole core with long rows, as far as its share of HBM goes."""
        return min(self.bandwidth(1 << 20), CORE.hbm_bytes_per_ns)


def with_constants(core: NeuronCore, values: Mapping[str, float]) -> NeuronCore:
    """The generation with other constants: ``min_ii``, ``clock_hz.VectorE``, ``dma.start_ns``."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        part, _, rest = name.partition(".")
        if part == "dma":
            dma: Any = fields.get(part, core.dma)
            fields[part] = replace(dma, **{rest: value})
        elif rest:
            fields.setdefault(part, dict(getattr(core, part)))[Engine(rest)] = value
        else:
            fields[name] = value
    return replace(core, **fields)


def _before_2_24(size: int) -> float:
    # proportional up to the row that takes as long as a long one's share, never faster than that
    flat = max(size, CORE.dma.flat_row_bytes) / CORE.dma.flat_bytes_per_ns
    knee = CORE.dma.flat_row_most_bytes / CORE.dma.flat_bytes_per_ns
    return min(flat, max(knee, size / CORE.dma.bytes_per_ns + CORE.dma.row_ns))


def _since_2_24(size: int) -> float:
    least = CORE.dma.row_2_24_ns if size >= CORE.dma.word_bytes else CORE.dma.part_word_ns
    return max(least, size / CORE.dma.bytes_per_ns)


def _of_today(size: int) -> float:
    dma = CORE.dma
    if size < dma.word_bytes:
        return dma.half_word_ns if size < 4 else dma.part_word_ns
    short = size / dma.today_bytes_per_ns + dma.today_row_ns
    return min(short, size / dma.bytes_per_ns + dma.row_ns)


PROFILES = {
    p.name: p
    for p in (
        DmaProfile(
            "sdk2.21",
            "SDK 2.23 and before: rows of 256 B to 1 KiB move at 104 GB/s per core, longer ones at "
            "up to 272 GB/s",
            _before_2_24,
            keeps=False,
        ),
        DmaProfile(
            "sdk2.25",
            "SDK 2.24 and later: long rows move at the generation's full rate, short ones take "
            "their engine some 20 ns",
            _since_2_24,
        ),
        DmaProfile(
            "row-rule",
            "the bandwidth curve of the DMA overview: every row takes its engine at least 145 ns",
            lambda n: max(CORE.dma.short_row_ns, n / CORE.dma.bytes_per_ns + CORE.dma.row_ns),
        ),
        DmaProfile(
            "static",
            "as sdk2.25, descriptors made before the kernel starts (--disable-dge): from gen3 on a "
            "transfer takes no time to issue",
            _since_2_24,
            issued=False,
        ),
        DmaProfile(
            "hbm-peak",
            "the core's share of HBM, whatever the rows",
            lambda size: size * CORE.dma.engines / CORE.hbm_bytes_per_ns,
        ),
    )
}
MEASURED = Path(__file__).resolve().with_name("measured")  # profiles of devices (make calibrate)


def read_profile(told: Mapping[str, Any]) -> DmaProfile:
    """A profile of a device: fields of `DmaProfile`, ``rows`` the profile whose rows it has."""
    fields = {name: value for name, value in told.items() if name != "rows"}
    return replace(PROFILES[told["rows"]], **fields)


for _path in sorted(MEASURED.glob("*.json")):
    _found = read_profile(json.loads(_path.read_text(encoding="utf-8")))
    PROFILES[_found.name] = _found
# The contest's entries move their weights at this rate: under sdk2.21 its winner would take twice
# as long as its second place did (docs/cost_model.md, DMA profiles).
DEFAULT_PROFILE = "sdk2.25"
UPPER_BOUND = "hbm-peak"
RELEASES = tuple(name for name in PROFILES if name.startswith("sdk"))
APART = 0.10  # reports show the other releases' times where they differ by more


def dma_profile(name: str) -> DmaProfile:
    """The profile of that name, or the refusal that lists the names."""
    found = PROFILES.get(name)
    if found is None:
        raise refuse(
            "sim_dma_profile",
            f"DMA profile '{name}' does not exist, expected one of {', '.join(PROFILES)}; "
            "pass one of those names",
        )
    return found


def in_language(profile: DmaProfile, today: bool) -> DmaProfile:
    """The profile as kernels of `nki` meet it: from gen3 on their descriptors are made at run time,
    where the profile has no rule of its own."""
    if today and profile.row_ns is _since_2_24 and profile.issued and CORE.dma.today_bytes_per_ns:
        return replace(profile, row_ns=_of_today)
    return profile


# --- DMA transfers --------------------------------------------------------------------------------
class Transfer(NamedTuple):
    """The rows of one DMA instruction.

    Attributes:
        rows: number of rows (descriptors).
        row_bytes: contiguous bytes of a row, counted on the wider side where the types differ.
        lanes: rows that each of the 16 engines moves; parts of one inside of HBM.
        hbm_read, hbm_written: bytes on the HBM side.
        share: of the rate of rows, what a transpose by the engine itself leaves.
        apart_ns: of a collective, which queues of its own move: its time, if no engine delays it.
        built_ns: of GpSimdE, which makes the descriptors when it runs where data choose the rows.
    """

    rows: int
    row_bytes: int
    lanes: tuple[float, ...]
    hbm_read: int
    hbm_written: int
    share: float = 1.0
    apart_ns: float = 0.0
    built_ns: float = 0.0

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


def lane_ns(profile: DmaProfile, moved: Transfer, rows: float) -> float:
    """Nanoseconds that ``rows`` rows of a transfer take one DMA engine."""
    row_ns = max(profile.row_ns(moved.row_bytes) / moved.share, _memory_ns(moved))
    if moved.rows == 1 and moved.row_bytes < CORE.dma.lone_row_bytes:  # nothing to overlap with
        return max(CORE.dma.lone_row_ns, row_ns)
    return rows * row_ns


def _memory_ns(moved: Transfer) -> float:
    """What a row takes of HBM's share, a sixteenth of which serves an engine. A copy inside of HBM
    passes it twice."""
    passes = (moved.hbm_read > 0) + (moved.hbm_written > 0)
    return passes * moved.row_bytes * CORE.dma.engines / CORE.hbm_bytes_per_ns


def lanes_ns(
    profile: DmaProfile, moved: Transfer, known: dict[Transfer, list[float]]
) -> list[float]:
    """`lane_ns` of each engine's rows; ``known`` holds what was found for this profile."""
    found = known.get(moved)
    if found is None:  # engines mostly move equal numbers of rows, and transfers are few and equal
        each = {rows: lane_ns(profile, moved, rows) for rows in set(moved.lanes)}
        found = known[moved] = [each[rows] for rows in moved.lanes]
    return found


_transfers: dict[tuple, Transfer] = {}


def transfer(instruction: Instruction, fixed: bool = False) -> Transfer:
    """How a dma_copy or dma_transpose breaks into rows and over the engines.

    Args:
        fixed: partitions have fixed places on them, where the generation has such.
    """
    if instruction.op.meets:
        return _collective(instruction)
    src, dst = _source(instruction), instruction.dst[0]
    key = (
        CORE.number,
        instruction.op.name,
        _form(src),
        _form(dst),
        fixed and CORE.dma.fixed_lanes,
        CORE.dma.transposed,
        CORE.dma.transposed_on_chip,
    )
    found = _transfers.get(key)
    if found is None:
        found = _transfers[key] = _transfer(instruction, src, dst, fixed)
    return found


def _source(instruction: Instruction) -> View:
    """The operand that is moved; of a sum one on chip, whose partitions the engines share."""
    if instruction.op is DMA_SUM:
        return next((v for v in instruction.src if v.storage.on_chip), instruction.src[0])
    return instruction.src[0]


def _collective(instruction: Instruction) -> Transfer:
    """A rank's part of a collective: a start, then the bytes that it sends, in rows of a partition
    or packets of HBM, which all DMA engines share."""
    sent, source = moved_bytes(instruction), instruction.src[0]
    time = CORE.collective_ns + sent / CORE.collective_bytes_per_ns
    row = CORE.dma.packet_bytes
    if source.storage.on_chip:
        row = source.free_size * source.dt.itemsize
    rows = math.ceil(sent / row)
    return Transfer(rows, row, _shared_lanes(rows), 0, 0, apart_ns=time)


def _shared_lanes(rows: int) -> tuple[int, ...]:
    """Rows per engine, as evenly as can be."""
    whole, rest = divmod(rows, CORE.dma.engines)
    return tuple(whole + (lane < rest) for lane in range(CORE.dma.engines))


def _dealt(rows: int, run: int, item: int) -> tuple[int, int, tuple[float, ...]]:
    """Rows and elements of each, as the engines share a copy inside of HBM: no partition belongs to
    an engine there, so each moves a sixteenth in rows of at least ``least_part_bytes``."""
    engines, least = CORE.dma.engines, math.ceil(CORE.dma.least_part_bytes / item)
    if rows >= engines:
        return rows, run, (rows / engines,) * engines
    part = max(least, math.ceil(rows * run / engines))
    parts = math.ceil(rows * run / part)
    return parts, part, _shared_lanes(parts)


def _whole_blocks(rows: int, run: int, out: View) -> tuple[int, int]:
    """Rows and elements of each with those that a transpose leaves empty: all engines write blocks
    of 128 partitions by 16 elements together (ARCH3)."""
    partitions = math.ceil(out.shape[0] / CORE.partitions) * CORE.partitions
    free = math.ceil(out.free_size / 16) * 16
    return math.ceil(rows * free / out.free_size), math.ceil(run * partitions / out.shape[0])


def _form(view: View) -> tuple:
    """All of an operand that its transfer's time depends on."""
    first = view.start_partition if view.storage.on_chip else -1
    buffer, size = view.storage.buffer, view.dt.itemsize
    return view.shape, view.strides, buffer, size, _built_ns(view, 1), first


def _transfer(instruction: Instruction, src: View, dst: View, fixed: bool) -> Transfer:
    item = max(src.dt.itemsize, dst.dt.itemsize)
    share = 1.0
    if not instruction.op.by_element:
        run = _contiguous_run(src, dst)
    elif CORE.dma.transposed:
        run = _contiguous_run(src, src, first=1)  # one row of the source at least for each engine
        share = CORE.dma.transposed_on_chip if src.storage.on_chip else CORE.dma.transposed
    else:  # a descriptor per element: nothing stays contiguous on both sides
        run = 1
    rows = dst.size // run
    lanes: tuple[float, ...] = ()
    chip = dst if dst.storage.on_chip else src
    if instruction.op.by_element and CORE.dma.transposed:
        rows, run = _whole_blocks(rows, run, dst)
        lanes = _shared_lanes(rows)  # by all engines together
    elif chip.storage.on_chip:
        lanes = _partition_lanes(chip, rows, fixed)
    elif run * item >= CORE.dma.least_part_bytes:
        rows, run, lanes = _dealt(rows, run, item)
    else:
        lanes = _shared_lanes(rows)
    moved = dst.size
    return Transfer(
        rows,
        run * item,
        lanes,
        0 if src.storage.on_chip else moved * src.dt.itemsize,
        0 if dst.storage.on_chip else moved * dst.dt.itemsize,
        share,
        built_ns=max(_built_ns(src, rows), _built_ns(dst, rows)),
    )


def _built_ns(view: View, rows: int) -> float:
    if view.by_data and CORE.dma.one_index_ns and view.by_data[0].size == 1:
        return CORE.dma.one_index_ns
    return rows * CORE.dma.descriptor_ns if view.by_data else 0.0


def _contiguous_run(src: View, dst: View, first: int = 0) -> int:
    """Elements that lie side by side in both views; axes before ``first`` and partitions do not."""
    first = 1 if src.storage.on_chip or dst.storage.on_chip else first
    if src.shape != dst.shape:  # reshaped on the way: only whole contiguous tensors join
        return min(src.shape[-1], dst.shape[-1]) if src.shape else 1
    run = 1
    for axis in range(len(src.shape) - 1, first - 1, -1):
        if src.shape[axis] == 1:
            continue
        if src.strides[axis] != run or dst.strides[axis] != run:
            break
        run *= src.shape[axis]
    return run


def _partition_lanes(chip: View, rows: int, fixed: bool) -> tuple[int, ...]:
    """Rows per engine: neighbouring partitions go to one engine, as evenly as they can.

    Few partitions use as many engines, but for `neuronxcc.nki` on gen3 (docs/cost_model.md).
    """
    partitions, engines = chip.shape[0], CORE.dma.engines
    first = chip.start_partition // CORE.dma_partitions
    lanes = [0] * engines
    per = rows // partitions
    if CORE.dma.fixed_lanes and fixed:
        for partition in range(chip.start_partition, chip.start_partition + partitions):
            lanes[partition // CORE.dma_partitions] += per
        return tuple(lanes)
    whole, rest = divmod(partitions, engines)
    for k in range(min(partitions, engines)):
        lanes[(first + k) % engines] = per * (whole + (k < rest))
    return tuple(lanes)


# --- engines --------------------------------------------------------------------------------------
def engine_ns(instruction: Instruction, engine: Engine) -> float:
    """Nanoseconds that a compute instruction occupies its engine.

    The documented cycles of an element-wise instruction count elements only; the pipeline's start
    comes on top, but none is shorter than the initiation interval (an instruction of three columns
    takes 66 cycles, one of 384 took 437 in a published profile).
    """
    cycles, start = _streamed_cycles(instruction, engine), CORE.engine_start_cycles[engine]
    if engine is Engine.TENSOR:
        cycles *= CORE.half_rows_pace if _half_rows(instruction) else CORE.tensor_pace
    if engine in CORE.result_cycles and engine is Engine.GPSIMD is instruction.op.engine:
        start = 0  # the entry's cycles have it
    return max(CORE.min_ii, cycles + start) / CORE.clock_hz[engine] * 1e9


def result_ns(instruction: Instruction, engine: Engine) -> float:
    """From the end of an instruction's occupancy until another one may read its result."""
    hz, op = CORE.clock_hz[engine] / 1e9, instruction.op
    if engine not in CORE.result_cycles:
        return CORE.dependent_cycles / hz
    behind = CORE.fill_cycles if op.fills else CORE.result_cycles[engine]
    if op.engine is engine is Engine.SCALAR:
        behind += CORE.bias_cycles
    through = (_streamed_cycles(instruction, engine) + behind) / hz
    return max(0.0, through - engine_ns(instruction, engine))


def _streamed_cycles(instruction: Instruction, engine: Engine) -> float:
    """Cycles in which an instruction's elements pass."""
    cycles = instruction.op.cycles_on(instruction, engine)
    if cycles <= CORE.min_ii:
        with using(replace(in_force(), min_ii=0)):  # which the entry's cycles have
            cycles = min(cycles, instruction.op.cycles_on(instruction, engine))
    return cycles / _elements_a_cycle(instruction, engine)


def array_use(instruction: Instruction) -> float:
    """Share of TensorE's rows that an instruction fills; 0 where it is always slow."""
    if _half_rows(instruction):
        return 0.0
    return instruction.src[0].shape[0] / CORE.partitions


def _half_rows(instruction: Instruction) -> bool:
    """Whether a product leaves half of the array's rows empty, where that slows it down."""
    if not instruction.op.multiplies or CORE.half_rows_pace == CORE.tensor_pace:
        return False
    return instruction.src[0].shape[0] <= CORE.partitions // 2


def _elements_a_cycle(instruction: Instruction, engine: Engine) -> float:
    """How many elements of a partition the engine takes at once, after NeuronCore-v2, relative to
    the cycles that the instruction table states for that core.

    VectorE runs instructions of one tile faster: 16-bit floats four a cycle with both sides in SBUF
    and contiguous, two with either (ARCH3, performance modes), fp32 two with both. Instructions of
    two tiles, of every type, read both from SBUF at once; gen2 reads one after the other.
    """
    op = instruction.op
    tiles = [v for v in (*instruction.dst, *instruction.src) if not _is_column(v)]
    least = CORE.vector_least_bytes if engine is Engine.VECTOR else 1
    floats = all(least <= v.dt.itemsize and v.dt.is_float for v in tiles)
    narrow = floats and all(v.dt.itemsize <= 2 for v in tiles)
    if engine is Engine.SCALAR:
        return CORE.scalar_narrow_rate if narrow else 1
    if engine is Engine.VECTOR and op.tiles == 2 and CORE.vector_modes:  # wherever the result goes
        return 2 if all(v.storage.buffer == "sbuf" for v in instruction.src) else 1
    if engine is not Engine.VECTOR or not CORE.vector_modes:
        return 1
    if op.tiles != 1 or not floats:
        return op.rate
    in_sbuf = all(v.storage.buffer == "sbuf" for v in tiles)
    contiguous = all(v.strides[-1] == 1 or v.shape[-1] == 1 for v in tiles)
    if in_sbuf and contiguous:
        return 4 if narrow else 2
    return 2 if narrow and (in_sbuf or contiguous) else 1


def _is_column(view: View) -> bool:
    """Whether an operand is a (P, 1) column that an instruction stretches over its tile."""
    return view.free_size > 1 and not any(view.strides[1:])


# --- outside of kernels ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Overheads:
    """Costs outside of kernels, in nanoseconds; sources, or that there is none, in spec.py.

    Attributes:
        kernel_ns: between two kernels of one graph.
        graph_ns: one execution of a graph from the host.
        cache_ns: start of one operator that reads or writes rows of a table or cache.
        logits_ns: logits of a row from the device to the host.
        argmax_ns: arg-maximum of a row over the vocabulary on the host.
        host_ns: everything else that the host does between two graphs.
        collective_ns: start of a collective between the cores of a chip.
        collective_bytes_per_ns: rate of its data.
    """

    kernel_ns: float = spec.KERNEL_LAUNCH_NS
    graph_ns: float = spec.GRAPH_LAUNCH_NS
    cache_ns: float = spec.CACHE_UPDATE_NS
    logits_ns: float = spec.LOGITS_NS
    argmax_ns: float = spec.ARGMAX_NS
    host_ns: float = spec.HOST_STEP_NS
    collective_ns: float = field(default_factory=lambda: CORE.collective_ns)
    collective_bytes_per_ns: float = spec.COLLECTIVE_BYTES_PER_NS

    def step_ns(self, rows: int = 1) -> float:
        """One execution of a graph and the host's work around it, with logits of so many rows; none
        where the device samples."""
        return self.graph_ns + rows * (self.logits_ns + self.argmax_ns) + self.host_ns

    def exposed_ns(self, device_ns: float) -> float:
        """What the host adds to a step that it has submitted while the last one ran, the tokens
        staying on the device: as far as launch and work take longer than the device's time."""
        return max(0.0, self.graph_ns + self.host_ns - device_ns)

    def collective(self, size: int, ranks: int, name: str = "all-reduce") -> float:
        """Nanoseconds of a collective whose whole tensor has ``size`` bytes; free on one rank.

        Around a ring each rank sends (ranks - 1) / ranks of the tensor for a reduce-scatter and as
        much for an all-gather; an all-reduce is one after the other (Patarasu and Yuan 2009).
        """
        if ranks == 1:
            return 0.0
        passes = 2 if name.startswith("all-reduce") else 1
        sent = passes * size * (ranks - 1) / ranks
        return self.collective_ns + sent / self.collective_bytes_per_ns
