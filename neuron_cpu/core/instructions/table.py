"""The instruction table: one entry per device instruction, with everything there is to know of it.

An entry holds engine, memories it may read and write, the checks on its operands, what it computes
and how many engine cycles it occupies. ``isa.py`` records instructions, ``execute.py`` and
``schedule.py`` read their entries. Sources: aws-neuron-sdk v2.21.1, general/nki/api/nki/isa (the
rules and costs of each instruction), general/nki/arch/trainium_inferentia2_arch.rst (memories).

Compute functions take and return torch tensors that may have any number of *leading batch axes*, so
that all iterations of an independent loop can run as one call. Arithmetic inputs arrive as fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..device.errors import refuse, warn
from ..device.spec import GEN2, Engine, legal_start_partitions
from ..language.tensor import Tensor
from ..program import trace
from ..program.program import Instruction

MIN_II = 64  # engine cycles between instructions (nki.isa docstrings)
SBUF, PSUM, HBM = "sbuf", "psum", "hbm"
ON_CHIP = (SBUF, PSUM)
ANY_HBM = ("hbm", "shared_hbm")


@dataclass(frozen=True)
class OpSpec:
    """One instruction of the device.

    Attributes:
        name: the ``nki.isa`` name.
        engine: engine that runs it unless ``engine_of`` says otherwise per instruction.
        reads: memories that operands may lie in.
        writes: memories that the result may lie in.
        flow: how an undefined input element spreads: ``elementwise``, ``reduce`` (over the last
            ``attrs["axes"]`` axes), ``matmul``, ``transpose``, ``scan``, ``all`` (to every output
            element of the same partition), ``copy``, ``fill`` (no inputs) or another entry of
            ``undefined.FLOW``.
        compute: values of the result(s) from ``(attrs, inputs)``.
        rules: checks besides memory, partition count and access pattern.
        cycles: engine cycles it occupies the engine.
        note: one line for the generated documentation.
        same_partitions: all operands take as many partitions as the result.
        indirect: operands may have rows or offsets that an index tile chooses.
    """

    name: str
    engine: Engine
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flow: str
    compute: Callable[[dict[str, Any], list[torch.Tensor]], Any]
    cycles: Callable[[Instruction], float]
    rules: Callable[[Instruction], None] | None = None
    note: str = ""
    same_partitions: bool = True
    indirect: bool = False
    aliases: tuple[str, ...] = field(default=())

    def engine_of(self, instruction: Instruction) -> Engine:
        return instruction.attrs.get("engine") or self.engine

    def check(self, instruction: Instruction) -> None:
        """Refuse what compiler or hardware would refuse of this single instruction."""
        for view in instruction.src:
            _check_operand(self, view, self.reads, "operand")
        if self.rules is not None:  # before the result: its size follows from the operands
            self.rules(instruction)
        for view in instruction.dst:
            _check_operand(self, view, self.writes, "result")
            if view.storage.role == "input" and not view.storage.mutable:
                raise refuse(
                    "err_cannot_update_immutable_parameter",
                    f"{self.name} writes kernel input {view.label()}, expected a tensor made in "
                    "the kernel; copy it to an nl.shared_hbm tensor and write that, or annotate "
                    "the parameter nt.mutable_tensor",
                )
        if self.same_partitions:
            _check_partitions(self, instruction)


TABLE: dict[str, OpSpec] = {}


def define(name: str, **kwargs: Any) -> OpSpec:
    """Add an entry to the table."""
    entry = OpSpec(name=name, **kwargs)
    TABLE[name] = entry
    return entry


# --- checks that every instruction shares ---------------------------------------------------------
_legal_views: set[tuple] = set()  # (shape, strides, start, storage geometry) already found legal


def _check_operand(op: OpSpec, view: Tensor, memories: tuple[str, ...], role: str) -> None:
    storage = view.storage
    if view.indirect is not None and not op.indirect:
        raise _indirect_refusal(op, view, role)
    if storage.buffer not in memories:
        raise refuse(
            "err_unsupported_memory",
            f"{op.name} got {role} {view.label()}, expected memory {' or '.join(memories)}; "
            f"{_memory_mend(storage.buffer, memories)}",
        )
    if not storage.on_chip:
        return
    start = view.offset // storage.free_size
    key = (view.shape, view.strides, start, storage.free_size, storage.buffer, view.paxis)
    if key in _legal_views:
        return
    if _check_tile(op, view):
        _legal_views.add(key)


def _indirect_refusal(op: OpSpec, view: Tensor, role: str) -> Exception:
    if op.name == "tensor_copy":
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


def _memory_mend(buffer: str, memories: tuple[str, ...]) -> str:
    if buffer in ANY_HBM:
        return "load it with nl.load first"
    if memories == ANY_HBM:
        return "the other side of a load or store is an HBM tensor"
    if buffer == PSUM:
        return "copy it to SBUF with nisa.tensor_copy first"
    return "place the tensor with buffer=nl.psum or nl.sbuf as the instruction needs"


def _check_tile(op: OpSpec, view: Tensor) -> bool:
    """Tile shape, partition axis and start partition of an on-chip operand.

    Returns:
        True where no later use of the same region needs a look: engines have rules for the first
        partition, DMA has none.
    """
    storage = view.storage
    if view.paxis != 0:
        raise refuse(
            "err_failed_to_infer_tile_from_local_tensor",
            f"{op.name} got {view.label()} whose partition axis is axis {view.paxis}, expected it "
            "first; index the block axes before it with integers",
        )
    size = view.shape[0]
    if size > GEN2.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {size} exceeds architecture limitation of "
            f"{GEN2.partitions} in {op.name} of {view.label()}; tile the partition axis",
        )
    if size > 1 and view.strides[0] not in (0, storage.free_size):
        raise refuse(
            "sim_partition_stride",
            f"{op.name} got {view.label()} whose first axis is not the partition axis in steps of "
            "one, expected consecutive partitions; put the partition index on the first axis",
        )
    start = view.start_partition
    legal = start in legal_start_partitions(size)
    if not legal and op.engine is not Engine.DMA:
        warn(
            "sim_start_partition",
            f"{op.name} of {view.label()} starts at partition {start}, expected one of "
            f"{legal_start_partitions(size)} for {size} partitions; move the rows or pad",
        )
    limit = GEN2.sbuf_instruction_free_max
    if storage.buffer == PSUM:
        limit = GEN2.psum_instruction_free_max
    if view.free_size > limit:
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"{op.name} of {view.label()} takes {view.free_size} elements per partition, expected "
            f"at most {limit}; split the free axis",
        )
    return legal


def _check_partitions(op: OpSpec, instruction: Instruction) -> None:
    want = instruction.dst[0].shape[0]
    for view in instruction.src:
        if view.shape[0] != want:
            raise refuse(
                "err_num_partition_mismatch",
                f"{op.name} got {view.label()} with {view.shape[0]} partitions, expected {want} "
                "like its other operands; slice the partition axis to equal sizes",
            )


# --- cycle formulas -------------------------------------------------------------------------------
def free_elements(instruction: Instruction) -> int:
    """Elements per partition of the widest operand: the N of the documented formulas."""
    return max(v.free_size for v in (*instruction.dst, *instruction.src))


def stride_factor(instruction: Instruction) -> float:
    """2 where an operand's innermost stride is beyond 16 bytes (arch guide, access patterns)."""
    views = (*instruction.dst, *instruction.src)
    return 2.0 if any(_wide_stride(view) for view in views) else 1.0


def _wide_stride(view: Tensor) -> bool:
    for axis in range(len(view.shape) - 1, 0, -1):
        if view.shape[axis] > 1:
            return view.strides[axis] * view.dt.itemsize > 16
    return False


def streaming(per_element: float = 1.0, extra: float = 0.0) -> Callable[[Instruction], float]:
    """max(MIN_II, per_element * N) + extra, doubled for wide strides."""

    def cycles(i: Instruction) -> float:
        return max(MIN_II, per_element * free_elements(i) * stride_factor(i)) + extra

    return cycles


# --- operators (nki.api.shared.rst, supported math operators) -------------------------------------
def _logical(fn: Callable) -> Callable:
    return lambda a, b: fn(a != 0, b != 0).to(torch.float32)


def _compare(fn: Callable) -> Callable:
    return lambda a, b: fn(a, b).to(torch.float32)


ARITHMETIC: dict[str, Callable] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "power": lambda a, b: torch.pow(a.double(), b.double()).to(a.dtype),  # the same in any place
    "equal": _compare(torch.eq),
    "not_equal": _compare(torch.ne),
    "greater": _compare(torch.gt),
    "greater_equal": _compare(torch.ge),
    "less": _compare(torch.lt),
    "less_equal": _compare(torch.le),
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "logical_xor": _logical(torch.logical_xor),
    "rsqrt": lambda a, b: torch.rsqrt(a + b),
    "abs": lambda a, b: torch.abs(a),
    "reciprocal": lambda a, b: torch.reciprocal(a),
    "logical_not": lambda a, b: (a == 0).to(torch.float32),
    "mod": torch.remainder,
    "fmod": torch.fmod,
}
BITWISE: dict[str, Callable] = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
    "invert": lambda a, b: torch.bitwise_not(a),
}
REDUCTIONS: dict[str, Callable] = {
    "add": lambda x, d: x.sum(dim=d),
    "subtract": lambda x, d: x.narrow(-1, 0, 1).squeeze(-1) * 2 - x.sum(dim=d),
    "multiply": lambda x, d: _fold(torch.mul, x, d),
    "maximum": lambda x, d: x.amax(dim=d),
    "minimum": lambda x, d: x.amin(dim=d),
    "logical_and": lambda x, d: (x != 0).flatten(-len(d)).all(dim=-1).to(torch.float32),
    "logical_or": lambda x, d: (x != 0).flatten(-len(d)).any(dim=-1).to(torch.float32),
    "logical_xor": lambda x, d: ((x != 0).sum(dim=d) % 2).to(torch.float32),
    "bitwise_and": lambda x, d: _fold(torch.bitwise_and, x, d),
    "bitwise_or": lambda x, d: _fold(torch.bitwise_or, x, d),
    "bitwise_xor": lambda x, d: _fold(torch.bitwise_xor, x, d),
}


def _fold(fn: Callable, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    flat = x.flatten(-len(dims)) if len(dims) > 1 else x
    total = flat[..., 0]
    for k in range(1, flat.shape[-1]):
        total = fn(total, flat[..., k])
    return total


def reduce_last(op: str, x: torch.Tensor, axes: int) -> torch.Tensor:
    """Reduce the last ``axes`` axes with ALU operator ``op``."""
    if op == "subtract" and axes > 1:
        x, axes = x.flatten(-axes), 1
    return REDUCTIONS[op](x, tuple(range(-axes, 0)))


def alu(op: str, a: torch.Tensor, b: Any) -> torch.Tensor:
    """One ALU step; ``b`` is a tensor or a number."""
    fn = BITWISE.get(op) or ARITHMETIC[op]
    if not isinstance(b, torch.Tensor):
        b = torch.tensor(b, dtype=a.dtype)
    return fn(a, b)


# --- activation functions (nki.api.shared.rst, supported activation functions) --------------------
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


# torch.sigmoid, softplus, mish and gelu give other last bits in vector lanes than in the scalar
# tail of a loop: a value's result would depend on where it lies, and merged loops would differ.
# These are built from functions that do not (exp, log1p, tanh, erf); they stay within 2e-7 of
# float64 (relative; gelu absolute).
def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(1.0 + torch.exp(-x))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))  # beyond 20 both round to x


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_apprx_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))


def _gelu_dx(x: torch.Tensor) -> torch.Tensor:
    cdf = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu_apprx_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x * _sigmoid(1.702 * x)


def _silu_dx(x: torch.Tensor) -> torch.Tensor:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _sin(x: torch.Tensor) -> torch.Tensor:
    """Sine inside [-pi, pi]; outside, the odd polynomial that fits it there runs away.

    Later documentation gives sin(9) as about 27.65 on ScalarE. The polynomial's coefficients are
    not public; the Taylor polynomial of degree 11 (sin(9) = -1144) has the same character: values
    outside are visibly wrong, not a wrapped sine.
    """
    inside = x.abs() <= math.pi + 1e-6
    if bool(inside.all()):
        return torch.sin(x)
    square = x * x
    series = x * (1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72))))
    return torch.where(inside, torch.sin(x), series)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda x: x,
    "square": torch.square,
    "sigmoid": _sigmoid,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": _gelu_apprx_tanh,
    "gelu_apprx_sigmoid": _gelu_apprx_sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "softplus": _softplus,
    "mish": lambda x: x * torch.tanh(_softplus(x)),
    "erf": torch.erf,
    "erf_dx": lambda x: 2.0 / math.sqrt(math.pi) * torch.exp(-x * x),
    "sin": _sin,
    "arctan": torch.atan,
    "sign": torch.sign,
    "abs": torch.abs,
}


# Inputs for which ScalarE's polynomials are stated (nki.api.shared.rst, v2.22 and later), as
# magnitudes for SIGNED_INPUTS. sqrt(0) is 0 on every implementation and common: zero passes there.
ACTIVATION_RANGES: dict[str, tuple[float, float]] = {
    "sin": (0.0, math.pi),
    "arctan": (0.0, math.pi / 2),
    "log": (2.0**-64, 2.0**64),
    "sqrt": (0.0, 2.0**100),
    "rsqrt": (2.0**-87, 2.0**97),
    "reciprocal": (2.0**-42, 2.0**42),
}
SIGNED_INPUTS = frozenset({"sin", "arctan", "reciprocal"})


def _check_range(op: str, x: torch.Tensor) -> None:
    """Warn of inputs outside of a function's stated range (eager mode; NaN stands for garbage)."""
    limits = ACTIVATION_RANGES.get(op)
    if limits is None or trace.active() is None:
        return
    low, high = limits
    size = x.abs() if op in SIGNED_INPUTS else x
    slack = 1 + 2.0**-20  # pi itself rounds up in fp32
    outside = (size < low) | (size > high * slack)
    if bool(outside.any()):
        sign = "+-" if op in SIGNED_INPUTS else ""
        got = float(x[outside].flatten()[0])
        warn(
            "sim_activation_range",
            f"{op} of {got:.6g}, expected {sign}[{low:.6g}, {high:.6g}], outside of which ScalarE "
            "is not specified; reduce the argument or clamp it first",
        )


# --- data movement --------------------------------------------------------------------------------
def _same(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0]


def _no_cycles(i: Instruction) -> float:
    return 0.0  # DMA time is bytes and descriptors, see schedule.py


def _dma_rules(i: Instruction) -> None:
    for view in (*i.dst, i.src[0]):
        if view.storage.on_chip and len(view.shape) < 2:
            raise refuse("sim_rank", f"Insufficient rank: {view.label()}, expected at least 2 axes")
        if view.storage.on_chip and view.shape[0] > GEN2.partitions:
            raise refuse(
                "err_num_partition_exceed_arch_limit",
                f"Size of partition dimension {view.shape[0]} exceeds architecture limitation of "
                f"{GEN2.partitions} in dma of {view.label()}; tile the partition axis",
            )


DMA_COPY = define(
    "dma_copy", engine=Engine.DMA, reads=("hbm", "shared_hbm", SBUF), writes=(*ANY_HBM, SBUF),
    flow="copy", compute=_same, cycles=_no_cycles, rules=_dma_rules, same_partitions=False,
    indirect=True,
    note="HBM/SBUF to HBM/SBUF with cast; nl.load and nl.store; rows may be indirect",
)  # fmt: skip


def _transpose_dma(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    nd = len(attrs["axes_order"])
    lead = xs[0].ndim - nd
    return xs[0].permute(*range(lead), *(lead + a for a in attrs["axes_order"]))


DMA_TRANSPOSE = define(
    "dma_transpose", engine=Engine.DMA, reads=("hbm", "shared_hbm", SBUF), writes=(SBUF,),
    flow="permute", compute=_transpose_dma, cycles=_no_cycles, same_partitions=False,
    note="element-granular descriptors: very slow on this core",
)  # fmt: skip


def _copy_cycles(i: Instruction) -> float:
    return max(MIN_II, free_elements(i) * stride_factor(i))


def _copy_rules(i: Instruction) -> None:
    if i.attrs.get("engine") is Engine.GPSIMD:
        _no_psum(i, "tensor_copy on GpSimdE")


def _no_psum(i: Instruction, what: str) -> None:
    for view in (*i.src, *i.dst):
        if view.storage.buffer == PSUM:
            raise refuse(
                "err_unsupported_memory",
                f"{what} got {view.label()}, expected sbuf: GpSimdE has no PSUM port; copy it to "
                "SBUF with nisa.tensor_copy first",
            )


TENSOR_COPY = define(
    "tensor_copy", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="copy",
    compute=_same, cycles=_copy_cycles, rules=_copy_rules,
    note="bit-exact between equal types on VectorE and GpSimdE, else through fp32",
)  # fmt: skip


def _fill_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    half = i.attrs["value"] == 0 and i.dst[0].dt.itemsize == 2
    return max(MIN_II, n / 2 if half else n)


def _fill(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(attrs["value"])


MEMSET = define(
    "memset", engine=Engine.VECTOR, reads=(), writes=ON_CHIP, flow="fill", compute=_fill,
    cycles=_fill_cycles, note="N/2 cycles for zeros of 2-byte types",
)  # fmt: skip


def _iota(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.as_tensor(attrs["values"].copy())


IOTA = define(
    "iota", engine=Engine.GPSIMD, reads=(), writes=(SBUF,), flow="fill", compute=_iota,
    cycles=lambda i: 150 + i.dst[0].free_size, note="affine expression of aranges, int32 inside",
)  # fmt: skip


# --- TensorE --------------------------------------------------------------------------------------
FOUR_BYTE_FLOATS = ("float32", "tfloat32")


def _matmul(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    ns, nm = attrs.get("free_axes", (1, 1))
    stationary = xs[0].flatten(-ns) if ns > 1 else xs[0]
    moving = xs[1].flatten(-nm) if nm > 1 else xs[1]
    return torch.matmul(stationary.transpose(-1, -2), moving)


def _matmul_rules(i: Instruction) -> None:
    stationary, moving = i.src
    _limit("nc_matmul stationary", stationary, stationary.free_size, GEN2.stationary_free_max)
    _limit("nc_matmul moving", moving, moving.free_size, GEN2.moving_free_max)
    if stationary.shape[0] != moving.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"nc_matmul contracts {stationary.label()} with {moving.label()}, expected equal "
            f"partition counts, got {stationary.shape[0]} and {moving.shape[0]}; slice both to the "
            "same contraction rows",
        )
    wide = [v.dt.name in FOUR_BYTE_FLOATS for v in i.src]
    if wide[0] != wide[1]:
        raise refuse(
            "sim_matmul_mixed_types",
            f"nc_matmul mixes {stationary.dt} with {moving.dt}, expected both of 4 bytes or both "
            "narrower; cast one operand",
        )
    for view in i.src:
        if not view.dt.is_float:
            raise refuse(
                "sim_matmul_type",
                f"nc_matmul got {view.label()}, expected a floating-point type; cast it first",
            )
    out = i.dst[0]
    if not i.attrs.get("is_transpose") and out.dt.name != "float32":
        raise refuse(
            "sim_matmul_output_type",
            f"nc_matmul writes {out.label()}, expected float32: PSUM accumulates in fp32; cast "
            "while copying to SBUF",
        )


def _limit(what: str, view: Tensor, got: int, limit: int) -> None:
    if got > limit:
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"{what} operand {view.label()} has free size {got}, expected at most {limit}; tile "
            "the free axis",
        )


def _matmul_cycles(i: Instruction) -> float:
    stationary, moving = i.src
    n_stationary = stationary.free_size
    load = math.ceil(n_stationary / 4)  # LoadStationary runs up to 4 times faster (arch guide)
    load *= 2 if _wide_stride(stationary) else 1
    stream = moving.free_size * (2 if _wide_stride(moving) else 1)
    rate = 4 if stationary.dt.name in FOUR_BYTE_FLOATS else 1
    if rate == 4 and (i.attrs.get("stationary_onezero") or i.attrs.get("moving_onezero")):
        rate = 2
    return rate * max(load, MIN_II, stream)


NC_MATMUL = define(
    "nc_matmul", engine=Engine.TENSOR, reads=(SBUF,), writes=(PSUM,), flow="matmul",
    compute=_matmul, cycles=_matmul_cycles, rules=_matmul_rules, same_partitions=False,
    note="out[M, N] = stationary[K, M].T @ moving[K, N], accumulated in fp32 in PSUM",
)  # fmt: skip


def _transpose(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    free = attrs.get("free_axes", 1)
    flat = xs[0].flatten(-free) if free > 1 else xs[0]
    return flat.transpose(-1, -2)


def _transpose_rules(i: Instruction) -> None:
    data = i.src[0]
    on_vector = i.attrs.get("engine") is Engine.VECTOR
    limit = GEN2.vector_transpose_max if on_vector else GEN2.partitions
    for size in (data.shape[0], data.free_size):
        if size > limit:
            raise refuse(
                "err_size_of_dimension_exceed_arch_limit",
                f"nc_transpose of {data.label()} has an axis of {size}, expected at most {limit} "
                "on this engine; transpose in blocks",
            )
    memories = ON_CHIP if on_vector else (SBUF,)
    if data.storage.buffer not in memories:
        raise refuse(
            "err_unsupported_memory",
            f"nc_transpose on TensorE got {data.label()}, expected sbuf; copy it to SBUF first",
        )
    if not on_vector and i.dst[0].storage.buffer != PSUM:
        raise refuse(
            "err_unsupported_memory",
            f"nc_transpose on TensorE writes {i.dst[0].label()}, expected psum; assign the result "
            "to a PSUM tile and copy it",
        )


def _transpose_cycles(i: Instruction) -> float:
    data = i.src[0]
    if i.attrs.get("engine") is Engine.VECTOR:
        return max(MIN_II, data.free_size)
    rate = 4 if data.dt.name in FOUR_BYTE_FLOATS else 1
    return rate * max(data.shape[0], min(64, data.free_size), MIN_II)


NC_TRANSPOSE = define(
    "nc_transpose", engine=Engine.TENSOR, reads=ON_CHIP, writes=ON_CHIP, flow="transpose",
    compute=_transpose, cycles=_transpose_cycles, rules=_transpose_rules, same_partitions=False,
    note="TensorE: 128 x 128, SBUF to PSUM, finite values only; VectorE: 32 x 32",
)  # fmt: skip


# --- ScalarE --------------------------------------------------------------------------------------
def _activation(attrs: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    x = xs[0]
    scale = xs[attrs["scale_at"]] if "scale_at" in attrs else attrs.get("scale", 1.0)
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        x = x * scale
    if "bias_at" in attrs:
        x = x + xs[attrs["bias_at"]]
    _check_range(attrs["op"], x)
    y = ACTIVATIONS[attrs["op"]](x)
    if "reduce_axes" not in attrs:
        return y
    # summed before the cast to the output type: the text implies the fp32 pipeline value
    total = y.sum(dim=tuple(range(-attrs["reduce_axes"], 0)))
    return y, total.reshape(*total.shape, *attrs["reduce_pad"])


def _activation_rules(i: Instruction) -> None:
    op = i.attrs["op"]
    if op not in ACTIVATIONS:
        raise refuse(
            "sim_activation_function",
            f"activation function '{op}' does not exist on ScalarE, expected one of "
            f"{', '.join(sorted(ACTIVATIONS))}; compose it from those (cos(x) = sin(x + pi/2))",
        )


ACTIVATION = define(
    "activation", engine=Engine.SCALAR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_activation, rules=_activation_rules,
    cycles=lambda i: streaming(extra=MIN_II if "reduce_axes" in i.attrs else 0)(i),
    note="op(data * scale + bias) in fp32; optionally the sum over the free axes",
    aliases=("activation_reduce",),
)  # fmt: skip


# --- VectorE --------------------------------------------------------------------------------------
def _tensor_reduce(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    x = xs[0]
    if "order" in attrs:  # middle axes moved last
        lead = x.ndim - len(attrs["order"])
        x = x.permute(*range(lead), *(lead + a for a in attrs["order"]))
    total = reduce_last(attrs["op"], x, attrs["axes"])
    return -total if attrs.get("negate") else total


def _reduce_cycles(i: Instruction) -> float:
    n = i.src[0].free_size
    both_bf16 = i.src[0].dt.name == i.dst[0].dt.name == "bfloat16"
    fast = both_bf16 and i.attrs["op"] in ("add", "maximum")
    return max(MIN_II, (n / 2 if fast else n) * stride_factor(i))


TENSOR_REDUCE = define(
    "tensor_reduce", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="reduce",
    compute=_tensor_reduce, cycles=_reduce_cycles,
    note="over the last free axes; N/2 cycles for bf16 add and max",
)  # fmt: skip


def _tensor_tensor(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return alu(attrs["op"], xs[0], xs[1])


def _not_both_psum(i: Instruction, a: Tensor, b: Tensor) -> None:
    if a.storage.buffer == PSUM and b.storage.buffer == PSUM:
        raise refuse(
            "sim_two_psum_operands",
            f"{i.op.name} reads both {a.label()} and {b.label()} from PSUM, expected at most one; "
            "copy one operand to SBUF first",
        )


def _tensor_tensor_rules(i: Instruction) -> None:
    _not_both_psum(i, i.src[0], i.src[1])
    if i.attrs["op"] == "power":
        _no_psum(i, "tensor_tensor(power) on GpSimdE")


def _tensor_tensor_cycles(i: Instruction) -> float:
    n = i.dst[0].free_size
    one_psum = PSUM in (i.src[0].storage.buffer, i.src[1].storage.buffer)
    all_bf16 = all(v.dt.name == "bfloat16" for v in (*i.src, *i.dst))
    fast = one_psum or (all_bf16 and i.attrs["op"] in ("add", "multiply", "subtract"))
    return max(MIN_II, (n if fast else 2 * n) * stride_factor(i))


TENSOR_TENSOR = define(
    "tensor_tensor", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_tensor_tensor, cycles=_tensor_tensor_cycles, rules=_tensor_tensor_rules,
    note="equal shapes; 2N cycles unless one operand is in PSUM or all are bf16",
)  # fmt: skip


def _tensor_scalar(attrs: dict[str, Any], xs: list[torch.Tensor]) -> Any:
    x = xs[0]
    for k in ("0", "1"):
        op = attrs.get("op" + k)
        if op is None:
            continue
        at = attrs.get("at" + k)
        other = attrs["value" + k] if at is None else xs[at]
        if not isinstance(other, torch.Tensor):
            other = torch.tensor(other, dtype=x.dtype)
        x = alu(op, other, x) if attrs.get("reverse" + k) else alu(op, x, other)
    if "reduce_axes" not in attrs:
        return x
    total = reduce_last(attrs["reduce_op"], x, attrs["reduce_axes"])
    return x, total.reshape(*total.shape, *attrs["reduce_pad"])


TENSOR_SCALAR = define(
    "tensor_scalar", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_tensor_scalar,
    cycles=lambda i: streaming(extra=MIN_II if "reduce_axes" in i.attrs else 0)(i),
    note="(data op0 operand0) op1 operand1 with constants or (P, 1) vectors",
    aliases=("tensor_scalar_reduce",),
)  # fmt: skip


def _reciprocal(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.reciprocal(xs[0])


def _reciprocal_cycles(i: Instruction) -> float:
    n = free_elements(i) * stride_factor(i)
    return max(MIN_II, n if i.op.engine_of(i) is Engine.SCALAR else 8 * n)


RECIPROCAL = define(
    "reciprocal", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_reciprocal, cycles=_reciprocal_cycles, note="VectorE 8N cycles, ScalarE N",
)  # fmt: skip


def _select(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    other = xs[2] if len(xs) > 2 else torch.tensor(attrs["on_false"], dtype=xs[1].dtype)
    return torch.where(xs[0] != 0, xs[1], other)


SELECT = define(
    "select", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="elementwise",
    compute=_select, cycles=streaming(2.0),
    note="nl.where: predicate, value if nonzero, value or constant otherwise",
)  # fmt: skip


def _scan(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    """One ALU step pair per column, each on the fp32 value of the column before."""
    state: Any = xs[2][..., 0] if attrs.get("initial_at") else torch.tensor(attrs["initial"])
    columns = []
    for a, b in zip(xs[0].unbind(-1), xs[1].unbind(-1)):
        step = alu(attrs["op0"], state, a) if attrs.get("reverse0") else alu(attrs["op0"], a, state)
        state = alu(attrs["op1"], b, step) if attrs.get("reverse1") else alu(attrs["op1"], step, b)
        columns.append(state)
    return torch.stack(columns, -1)


def _scan_rules(i: Instruction) -> None:
    _not_both_psum(i, i.src[0], i.src[1])


TENSOR_TENSOR_SCAN = define(
    "tensor_tensor_scan", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="scan",
    compute=_scan, cycles=streaming(2.0), rules=_scan_rules,
    note="result[i] = (data0[i] op0 result[i - 1]) op1 data1[i] along the free axis",
)  # fmt: skip


def _bn_stats(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    flat = xs[0].flatten(-attrs["free_axes"])
    parts = []
    for half in (flat[..., 0::2], flat[..., 1::2]):  # NeuronCore keeps even and odd positions apart
        count = half.shape[-1]
        mean = half.sum(-1) / max(count, 1)
        spread = ((half - mean[..., None]) ** 2).sum(-1)
        parts += [torch.full_like(mean, count), mean, spread]
    return torch.stack(parts, -1)


def _bn_stats_rules(i: Instruction) -> None:
    _limit("bn_stats", i.src[0], i.src[0].free_size, GEN2.bn_stats_free_max)


BN_STATS = define(
    "bn_stats", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="all",
    compute=_bn_stats, cycles=streaming(), rules=_bn_stats_rules,
    note="count, mean and variance * count of the even elements, then of the odd ones",
)  # fmt: skip


def _bn_aggr(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    flat = xs[0].flatten(-attrs["free_axes"])
    count, mean, spread = flat[..., 0::3], flat[..., 1::3], flat[..., 2::3]
    total = count.sum(-1)
    overall = (count * mean).sum(-1) / total
    around = (spread + count * (mean - overall[..., None]) ** 2).sum(-1) / total
    return torch.stack([overall, around], -1)


def _bn_aggr_rules(i: Instruction) -> None:
    if i.src[0].free_size % 3:
        raise refuse(
            "sim_bn_aggr_size",
            f"bn_aggr got {i.src[0].label()} with {i.src[0].free_size} elements per partition, "
            "expected a multiple of 3: count, mean and variance * count of each group",
        )


BN_AGGR = define(
    "bn_aggr", engine=Engine.VECTOR, reads=ON_CHIP, writes=ON_CHIP, flow="all",
    compute=_bn_aggr, cycles=streaming(13 / 3), rules=_bn_aggr_rules,
    note="mean and population variance from the columns of bn_stats",
)  # fmt: skip


# --- GpSimdE --------------------------------------------------------------------------------------
def _affine_select(attrs: dict[str, Any], xs: list[torch.Tensor]) -> torch.Tensor:
    keep = torch.as_tensor(attrs["keep"].copy())
    return torch.where(keep, xs[0], torch.tensor(attrs["on_false"], dtype=xs[0].dtype))


AFFINE_SELECT = define(
    "affine_select", engine=Engine.GPSIMD, reads=(SBUF,), writes=(SBUF,), flow="elementwise",
    compute=_affine_select, cycles=lambda i: 150 + free_elements(i),
    note="keeps elements where an affine comparison holds, else a constant",
)  # fmt: skip
