"""The record of an instruction: one entry holds what every consumer asks of it.

Every device instruction has one entry; nothing else in the project compares names of instructions.
Who asks what:

- tracing: `attrs`, `engines`, `check` (memories, shapes, `rules`); the validator of records that
  others wrote: `misfit`, too (`operands`, `results`, `engines`, domains of `attrs`, `generation`);
- execution and the search for undefined data: `compute`, `flow`, `multiplies`, `meets`, `macs`;
- time: `cycles`, `engine`, `serves_as_well`, `tiles`, `rate`, `fills`; reports: `published`;
- warnings about values: `compares`, `scaled`;
- names that the languages export, their releases and generations, and stubs: `FORMS`, `forms`;
- pages: `note`, `forms`; what a device has shown of it: `evidence`.

A new function of `nki.isa` is an entry, its semantics, a function under ``@isa(ENTRY)`` and a test.

Sources: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa (rules and costs of each instruction),
general/nki/arch/trainium_inferentia2_arch.rst (memories, access patterns).

Compute functions take and return torch tensors that may have any number of *leading batch axes*, so
that all iterations of an independent loop can run as one call. Arithmetic inputs arrive as fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import torch

from ..device import evidence, written
from ..device.dtypes import Tensors
from ..device.errors import refuse, warn, warned
from ..device.spec import CORE, Engine
from ..program.attributes import Attrs
from ..program.program import Instruction
from ..program.view import View, called, form_of

SBUF, PSUM = "sbuf", "psum"
ON_CHIP = (SBUF, PSUM)
ANY_HBM = ("hbm", "shared_hbm")
FOUR_BYTE_FLOATS = ("float32", "tfloat32")
MANY = 1 << 20  # operands, where nothing limits their number


TABLE: dict[str, OpSpec] = {}  # every entry by name


@dataclass(frozen=True)
class OpSpec:
    """One instruction of the device; making one adds it to ``TABLE``.

    Attributes:
        name: the ``nki.isa`` name.
        flow: how an undefined input element spreads: ``elementwise``, ``reduce`` (over the last
            axes), ``matmul``, ``transpose``, ``scan``, ``all`` (to every output element of the same
            partition), ``copy``, ``fill`` (no inputs) or another entry of ``undefined.FLOW``.
        attrs: class of its attributes.
        compute: values of the result(s) from ``(attrs, inputs)``; None for products, which
            ``run/execute.py`` joins into large ones.
        cycles: engine cycles it occupies the engine; 0 for DMA, whose time is bytes and rows.
        engine: engine that runs it unless ``engine_of`` says otherwise per instruction.
        reads: memories that operands may lie in.
        writes: memories that results may lie in.
        rules: checks besides memory, partition count and access pattern.
        note: one line for the generated documentation.
        same_partitions: all operands take as many partitions as the result.
        indirect: operands may have rows or offsets that an index tile chooses.
        box_mend: how to do without a mask that is no box; None where every mask is legal.
        multiplies: a product on TensorE, which PSUM can accumulate.
        macs: multiply-accumulates on TensorE, those that only move data included.
        moves: whether TensorE only moves data with them.
        updates: operator and the operands that an instruction ``x = x operator y`` may update in
            place; None where it is no such instruction.
        serves_as_well: the engine that runs it as well where the kernel chose none (floats only).
        serves_if: of which instructions that holds; None for all.
        cycles_there: cycles on that engine, where they are others.
        by_element: its DMA descriptors move single elements.
        limited: whether the function is stated for a range of arguments only; ``compute`` warns of
            others where it knows the kernel's line.
        meets: ranks meet in it, so that it runs once for each recording, in the order recorded.
        engines: that a kernel may choose among; empty where it has no choice.
        generation: the first NeuronCore that has it.
        operands: least and largest number of operands.
        results: largest number of results; the least is one.
        published: whether somebody publishes its cycles; else ``cycles`` is a guess.
        tiles: operands of full size that VectorE streams in faster modes from gen3 on: 1 counts
            types and places (ARCH3, performance modes), 2 whether both lie in SBUF; 0 for none.
        rate: elements a cycle after gen2, as measured, relative to ``cycles``.
        fills: every element becomes one constant, whose pipeline is shorter.
        compares: where a NaN leaves open what comes out: ``operands``, ``results``, or
            ``reduction`` for results that are reduced.
        scaled: operands of a byte may be scales, which lie at four places of a quadrant.
    """

    name: str
    flow: str
    attrs: type[Attrs]
    compute: Callable[[Any, Tensors], Any] | None
    cycles: Callable[[Instruction], float]
    _: KW_ONLY
    engine: Engine = Engine.VECTOR
    reads: tuple[str, ...] = ON_CHIP
    writes: tuple[str, ...] = ON_CHIP
    rules: Callable[[Instruction], None] | None = None
    note: str = ""
    same_partitions: bool = True
    indirect: bool = False
    box_mend: str | None = None
    multiplies: bool = False
    macs: Callable[[Instruction], int] | None = None
    moves: Callable[[Instruction], bool] | None = None
    updates: Callable[[Instruction], tuple[str, tuple[View, ...]] | None] | None = None
    serves_as_well: Engine | None = None
    serves_if: Callable[[Instruction], bool] | None = None
    cycles_there: Callable[[Instruction], float] | None = None
    by_element: bool = False
    limited: Callable[[Any], bool] | None = None
    meets: bool = False
    engines: tuple[Engine, ...] = ()
    generation: int = 2
    operands: tuple[int, int] = (1, 1)
    results: int = 1
    published: bool = True
    tiles: int = 0
    rate: float = 1.0
    fills: bool = False
    compares: str = ""
    scaled: bool = False

    def __post_init__(self) -> None:
        TABLE[self.name] = self

    @property
    def forms(self) -> list[Form]:
        """The functions of both languages that record it, the imported ones."""
        return [one for forms in FORMS.values() for one in forms.values() if one.entry is self]

    def evidence(self, language: str) -> dict[evidence.Use, list[evidence.Source]]:
        """What public runs on devices show of its operands and results in a language."""
        return evidence.uses(self.name, language)

    def misfit(self, instruction: Instruction) -> str:
        """What of a record no kernel's call makes; empty where all of it is as calls make it.

        ``check`` refuses what compilers and hardware refuse of a call; this is for records that
        somebody else has written.
        """
        attrs, core = instruction.attrs, CORE.number
        least, most = self.operands
        if type(attrs) is not self.attrs:
            return f"constants {type(attrs).__name__}, expected {self.attrs.__name__}"
        if core < self.generation:
            return f"generation {core}, expected {self.generation} or later"
        if attrs.engine not in (None, *self.engines):
            return f"engine {attrs.engine}, expected {self.engines or 'none'}"
        if not least <= len(instruction.src) <= most:
            return f"{len(instruction.src)} operands, expected {least} to {most}"
        if not 1 <= len(instruction.dst) <= self.results:
            return f"{len(instruction.dst)} results, expected 1 to {self.results}"
        return attrs.misfit()

    @property
    def is_dma(self) -> bool:
        return self.engine is Engine.DMA

    @property
    def is_copy(self) -> bool:
        """Moves elements one to one, with a cast where types differ."""
        return self.flow == "copy"

    def engine_of(self, instruction: Instruction) -> Engine:
        return instruction.attrs.engine or self.engine

    def choice(self, instruction: Instruction) -> Engine | None:
        """The other engine that the compiler may choose; None where it has no choice."""
        if self.serves_as_well is None or instruction.attrs.engine is not None:
            return None
        fits = self.serves_if is None or self.serves_if(instruction)
        return self.serves_as_well if fits and instruction.src[0].dt.is_float else None

    def cycles_on(self, instruction: Instruction, engine: Engine) -> float:
        """Engine cycles on one of the engines that run it."""
        if self.cycles_there is not None and engine is self.serves_as_well:
            return self.cycles_there(instruction)
        return self.cycles(instruction)

    def check(self, instruction: Instruction, legal: set[tuple] | None = None) -> None:
        """Refuse what compiler or hardware would refuse of this single instruction.

        Args:
            legal: forms that the same program has had without a warning, and this one where it is;
                every rule treats equal ones alike. Data that place an operand, and results in what
                the kernel was given, have none.
        """
        dst, before = instruction.dst, -1
        if legal is not None:
            forms = tuple(map(form_of, (*dst, *instruction.src)))
            if 0 not in forms and dst[0].storage.role != "input":
                form = (self.name, instruction.attrs, len(dst), forms)
                if form in legal:
                    return
                before = warned()
        self._check(instruction)
        if legal is not None and warned() == before:
            legal.add(form)

    def check_memories(self, given: Mapping[str, Any]) -> None:
        """The part of `check` that needs a call's names alone: the memories."""
        for name, view in given.items():
            writes = name.startswith("dst") or name.endswith("_res")
            if isinstance(view, View) and (writes or not view.on_chip):
                role, memories = ("result", self.writes) if writes else ("operand", self.reads)
                _check_memory(self, view, memories, role)

    def _check(self, instruction: Instruction) -> None:
        assert type(instruction.attrs) is self.attrs, (self.name, type(instruction.attrs))
        for view in instruction.src:
            _check_operand(self, view, self.reads, "operand")
        if self.rules is not None:  # before the result: its size follows from the operands
            self.rules(instruction)
        for view in instruction.dst:
            _check_operand(self, view, self.writes, "result")
            if 0 in view.strides and not instruction.attrs.accumulate:
                _check_overlap(self, view, len(instruction.dst) > 1)
            if view.storage.role == "input" and not view.storage.mutable:
                raise refuse(
                    "err_cannot_update_immutable_parameter",
                    f"{self.name} writes kernel input {view.label()}, expected a tensor made in "
                    "the kernel; copy it to an nl.shared_hbm tensor and write that, or annotate "
                    "the parameter nt.mutable_tensor",
                )
        if self.same_partitions:
            _check_partitions(self, instruction)
        if self.engine_of(instruction) is Engine.GPSIMD:
            _check_sbuf_only(instruction)


# --- the languages' functions ---------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """A function of a kernel language: how an instruction is called there, and since when.

    Attributes:
        module: ``nki.isa``, ``nki.collectives`` or ``neuronxcc.nki.isa``.
        function: its name, signature and docstring are those of the language.
        entry: the instruction; None where it records none of its own.
        came: the first release that has it; empty for the first one of the language.
        keywords: first releases of keywords that came later.
        former: what keywords of SDK 2.27 and 2.28 are called now; None where they may be left out.
        order: parameters in their order before 2.29, where it was another.
        named: takes a label as its last parameter, ``name``.
    """

    module: str
    function: Callable
    entry: OpSpec | None
    came: str = ""
    keywords: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str | None] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    named: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def generation(self) -> int:
        return self.entry.generation if self.entry is not None else 2


FORMS: dict[str, dict[str, Form]] = {}  # by module and name
F = TypeVar("F", bound=Callable)


def form(module: str, entry: OpSpec | None, **facts: Any) -> Callable[[F], F]:
    """Enter the decorated function as a form of ``entry``; ``facts`` are fields of `Form`."""

    def entered(function: F) -> F:
        FORMS.setdefault(module, {})[function.__name__] = Form(
            module=module, function=function, entry=entry, **facts
        )
        return function

    return entered


# --- checks of an entry ---------------------------------------------------------------------------
def _check_overlap(op: OpSpec, view: View, sink: bool) -> None:
    """Refuse results in which several elements share one place.

    If an instruction has a second result, the first may be such a ``sink``: AWS's library reads the
    reduction alone.
    """
    one = view.by_data is None and any(n > 1 and not s for n, s in zip(view.shape, view.strides))
    if one and not sink:
        raise refuse(
            "sim_broadcast_result",
            f"{op.name} writes {view.label()}, a broadcast whose elements share a place, expected "
            "a result with elements of its own; write the element that it repeats",
        )


# --- checks that every instruction shares ---------------------------------------------------------
def _check_operand(op: OpSpec, view: View, memories: tuple[str, ...], role: str) -> None:
    storage = view.storage
    if view.by_data is not None:
        one, anywhere = view.by_data[0].size == 1, view.scalar_offsets_anywhere
        if not (op.indirect or anywhere and (one or op.is_dma)):
            raise _indirect_refusal(op, view, role)
        if anywhere:
            _warn_of_placed(op, view, role)
    _check_memory(op, view, memories, role)
    if not storage.on_chip:
        return
    if not storage.free_size:
        raise refuse(
            "sim_empty_slice",
            f"{op.name} got {role} {view.label()}, which has no elements, expected some; leave the "
            "instruction out",
        )
    _check_tile(op, view)


def _check_memory(op: OpSpec, view: View, memories: tuple[str, ...], role: str) -> None:
    if memories and view.storage.buffer not in memories:
        raise refuse(
            "err_unsupported_memory",
            f"{op.name} got {role} {view.label()}, expected memory {' or '.join(memories)}; "
            f"{_memory_mend(op, view, memories, role)}",
        )


def _warn_of_placed(op: OpSpec, view: View, role: str) -> None:
    """Kernels of `nki` on gen2: engines took no operand at a run-time offset, transfers did.

    NCC_IBIR829 and NCC_IBIR040 of SDK 2.32 on trn1 (foxl-ai/kiln, docs/neuron-notes.md).
    """
    if CORE.number == 2 and not (op.is_dma or op.indirect) and view.storage.on_chip:
        warn(
            "sim_placed_operand",
            f"{op.name} got {role} {view.label()} at a run-time offset: the compiler of SDK 2.32 "
            "failed on such operands of engines for gen2, expected an offset that is known while "
            "tracing; copy the part with nisa.dma_copy first, whose addresses may be data",
        )


def _indirect_refusal(op: OpSpec, view: View, role: str) -> Exception:
    if op.is_copy:
        return refuse(
            "err_copy_dynamic_indirect_indices_not_natively_supported",
            f"copy with {role} {view.label()} at an index known only at run time, expected affine "
            "indices; use nisa.tensor_copy_dynamic_src, or load the rows from HBM with nl.load",
        )
    return refuse(
        "err_indirect_indices_are_not_supported_with_nki_api",
        f"{op.name} got {role} {view.label()} indexed by data, expected affine indices; gather the "
        "rows into a tile with nl.load first",
    )


def _memory_mend(op: OpSpec, view: View, memories: tuple[str, ...], role: str) -> str:
    buffer, name = view.storage.buffer, called(view)
    if op.name == "tensor_copy" and buffer in ANY_HBM and hasattr(view, "current_language"):
        return "write nisa.dma_copy for nisa.tensor_copy: it moves data between HBM and SBUF"
    if role == "result" and memories == (PSUM,):
        return (
            f"make {name} with buffer=nl.psum if it is the result, which comes first, and copy it "
            "to SBUF with nisa.tensor_copy behind"
        )
    if role == "result" and memories != ANY_HBM:
        how = f"store that, nl.store({name}, tile)" if buffer in ANY_HBM else "copy it from there"
        return f"write to a tile with buffer=nl.sbuf, and {how}"
    if buffer in ANY_HBM:
        rows = "" if view.shape[0] <= CORE.partitions else f"[0:{CORE.partitions}]"
        if view.ndim == 1:
            rows = f".reshape((1, {view.size}))"
        name = name if rows else written.argument(name)
        if op.name == "nc_transpose":
            return f"turn it while it is loaded, tile = nl.load_transpose2d({name}{rows})"
        return f"load it first, tile = nl.load({name}{rows}), and give that tile"
    if memories == ANY_HBM:
        return "the other side of a load or store is an HBM tensor"
    if buffer == PSUM:
        return f"copy it to SBUF first, tile = nl.copy({name}), and give that tile"
    return "place the tensor with buffer=nl.psum or nl.sbuf as the instruction needs"


def _check_tile(op: OpSpec, view: View) -> None:
    """Tile shape, partition axis, start partition and access pattern of an on-chip operand."""
    storage = view.storage
    if view.paxis != 0:
        raise refuse(
            "err_failed_to_infer_tile_from_local_tensor",
            f"{op.name} got {view.label()} whose partition axis is axis {view.paxis}, expected it "
            "first; index the block axes before it with integers",
        )
    size = view.shape[0]
    if size > CORE.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {size} exceeds architecture limitation of "
            f"{CORE.partitions} in {op.name} of {view.label()}; tile the partition axis",
        )
    step = view.strides[0]
    if (
        size > 1
        and step not in (0, storage.free_size)
        and (not op.is_dma or step % storage.free_size)
    ):
        raise refuse(
            "sim_partition_stride",
            f"{op.name} got {view.label()} whose first axis is not the partition axis in steps of "
            "one, expected consecutive partitions; put the partition index on the first axis",
        )
    limit = CORE.sbuf_instruction_free_max
    if storage.buffer == PSUM:
        limit = CORE.psum_instruction_free_max
    held = view.free_size
    if view.scalar_offsets_anywhere:  # nki: AWS's library repeats 320 sums in PSUM 24 times
        held = math.prod(n for n, stride in zip(view.shape[1:], view.strides[1:]) if stride)
    if held > limit and not op.is_dma:  # a DMA's descriptors take any
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"{op.name} of {view.label()} takes {held} elements per partition, expected "
            f"at most {limit}; split the free axis",
        )
    if not op.is_dma:
        _check_start(op, view)
        _check_pattern(op, view)


def _check_start(op: OpSpec, view: View) -> None:
    """Engines reach groups of partitions at multiples of the group's size only."""
    size, start = view.shape[0], view.start_partition
    legal = CORE.start_partitions(size)
    if size <= 4 and op.scaled:  # scales: deep-dives/mxfp-matmul
        legal = tuple(first + k for first in legal for k in (0, 4, 8, 12))
    if start not in legal:
        warn(
            "sim_start_partition",
            f"{op.name} of {view.label()} starts at partition {start}, expected one of {legal} for "
            f"{size} partitions; bring the rows to one of them with nisa.dma_copy, or pad",
        )


def _check_pattern(op: OpSpec, view: View) -> None:
    """Engines walk the free axes with a fixed number of counters.

    The architecture guide states the hardware's limit, and compilers end with "Too many strides"
    on kernels beyond it, but whether one may split the instruction instead is not public: a
    warning.
    """
    axes = pattern_axes(view)
    limit = CORE.access_pattern_axes
    if axes > limit:
        warn(
            "sim_access_pattern_axes",
            f"{op.name} of {view.label()} walks {axes} free axes with strides of their own, "
            f"expected at most {limit}; index an axis with an integer, or copy in several steps",
        )


def pattern_axes(view: View) -> int:
    """Free axes of the access pattern, axes that continue each other counted as one."""
    count, step = 0, -1
    for size, stride in zip(view.shape[1:], view.strides[1:]):
        if size == 1:
            continue
        count += step != size * stride
        step = stride
    return count


def _check_partitions(op: OpSpec, instruction: Instruction) -> None:
    want = instruction.dst[0].shape[0]
    for view in instruction.src:
        if view.shape[0] != want:
            raise refuse(
                "err_num_partition_mismatch",
                f"{op.name} got {view.label()} with {view.shape[0]} partitions, expected {want} "
                "like its other operands; slice the partition axis to equal sizes",
            )


# --- checks that some entries share ---------------------------------------------------------------
def check_free_size(what: str, view: View, limit: int, mend: str = "") -> None:
    """Refuse an operand with more than ``limit`` elements per partition.

    Args:
        mend: what else to do, with the columns of a step as {part}.
    """
    if view.free_size > limit:
        size = next(n for n in range(limit, 0, -1) if view.free_size % n == 0)
        part = f"i * {size}:(i + 1) * {size}"
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"{what} operand {view.label()} has free size {view.free_size}, expected at most "
            f"{limit}; "
            + (
                blocks_first(view)
                or f"tile the free axis: take [:, {part}] of {called(view)} in a loop over "
                f"range({view.free_size // size}){mend.format(part=part)}"
            ),
        )


def blocks_first(view: View) -> str:
    """What mends a block of a tile whose first axis counts blocks; "" where it is none."""
    first, *free = view.storage.shape
    if view.shape[0] != 1 or len(free) < 2 or view.free_size != math.prod(free):
        return ""
    if not view.scalar_offsets_anywhere:
        return f"make {called(view)} ({first}, nl.par_dim({free[0]}), ...): blocks come first"
    tile = (free[0], first, *free[1:])
    return f"axis 0 of a tile is its partitions: make {called(view)} {tile}, and take tile[:, i]"


def _check_sbuf_only(i: Instruction) -> None:
    """Refuse PSUM operands of an instruction on GpSimdE."""
    for view in (*i.src, *i.dst):
        if view.storage.buffer == PSUM:
            raise refuse(
                "err_unsupported_memory",
                f"{i.op.name} on GpSimdE got {view.label()}, expected sbuf: GpSimdE has no PSUM "
                "port; copy it to SBUF with nisa.tensor_copy first",
            )


def one_psum_operand(i: Instruction) -> None:
    """Refuse two full operands from PSUM."""
    a, b = i.src[:2]
    if a.storage.buffer == PSUM and b.storage.buffer == PSUM:
        raise refuse(
            "sim_two_psum_operands",
            f"{i.op.name} reads both {a.label()} and {b.label()} from PSUM, expected at most one; "
            f"write nl.copy({called(b)}) for {called(b)}, and sum products in place, nc_matmul "
            "with dst=acc of nki, acc += nisa.nc_matmul(...) of neuronxcc.nki",
        )


# --- semantics that some entries share ------------------------------------------------------------
def first_operand(attrs: Attrs, xs: Tensors) -> torch.Tensor:
    """A copy: the cast is the executor's."""
    return xs[0]


def flat(x: torch.Tensor, free_axes: int) -> torch.Tensor:
    """[..., P, F...] -> [..., P, N]."""
    return x.flatten(-free_axes) if free_axes > 1 else x


# --- cycle formulas -------------------------------------------------------------------------------
def no_cycles(instruction: Instruction) -> float:
    """Cycles of an instruction without an engine: DMA takes time by bytes and rows."""
    return 0.0


def free_elements(instruction: Instruction) -> int:
    """Elements per partition of the widest operand: the N of the documented formulas."""
    return max(v.free_size for v in (*instruction.dst, *instruction.src))


def stride_factor(instruction: Instruction) -> float:
    """2 where an operand's innermost stride is beyond 16 bytes (arch guide, access patterns)."""
    return 2.0 if any(wide_stride(view) for view in (*instruction.dst, *instruction.src)) else 1.0


def wide_stride(view: View) -> bool:
    """True where engines read the innermost axis at half the rate."""
    for axis in range(len(view.shape) - 1, 0, -1):
        if view.shape[axis] > 1:
            return view.strides[axis] * view.dt.itemsize > 16
    return False


def streaming(per_element: float = 1.0, extra: float = 0.0) -> Callable[[Instruction], float]:
    """max(min_ii, per_element * N) + extra, doubled for wide strides."""

    def cycles(i: Instruction) -> float:
        return max(CORE.min_ii, per_element * free_elements(i) * stride_factor(i)) + extra

    return cycles


def streaming_with_sums(i: Instruction) -> float:
    """An element each cycle; a second result costs one more instruction that reads it out."""
    more = CORE.sums_cycles if i.op.engine is Engine.SCALAR else CORE.min_ii
    return streaming()(i) + (more if i.attrs.reduce_axes else 0)
