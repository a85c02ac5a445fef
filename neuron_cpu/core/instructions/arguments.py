"""Arguments of ``nki.isa`` functions that several of them share: checks, enumerations."""

import math
import re
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from typing import Any

import numpy as np

from ..device import target, written
from ..device.dtypes import FLOAT32
from ..device.errors import refuse, type_name
from ..device.spec import CORE, Engine
from ..device.unknown import Affine, Listed
from ..program import trace
from ..program.index import DynamicIndex, Mask, is_integer
from ..program.view import View, called
from .alu import ARITHMETIC, BITWISE, COMPARISONS
from .entry import form


def no_tensor(value: Any, what: str, expected: str) -> Exception:
    """The refusal of an operand that is none, with what turns it into one."""
    mend = "turn numbers into tiles with nisa.memset and index expressions with nisa.iota"
    name, _, word = what.removeprefix("nl.").partition(" ")
    if value is not None and (word.startswith("dst") or word.endswith("_res")):
        mend = (
            "make it before, nl.ndarray(shape, dtype, buffer=nl.sbuf), or with "
            "buffer=nl.shared_hbm where the kernel returns it"
        )
    elif isinstance(value, bool):
        mend = "compare with nl.equal(x, y), nl.greater(x, y): of tiles == and not are Python's own"
    elif is_integer(value) or isinstance(value, float):
        if name in ("minimum", "maximum"):
            mend = f"of numbers write Python's {name[:3]}(...), of a tile nisa.tensor_scalar"
        elif name == "where":
            mend = "give the tile first, nl.where(condition, tile, number), for the other condition"
        elif hasattr(math, name):
            mend = f"compute with numbers in Python, math.{name}({value})"
        elif word == "data":
            mend = "give the tile as data= and the number as operand0="
        elif name == "tensor_tensor":
            first = ", reverse0=True" * (word == "data1")
            mend = f"write nisa.tensor_scalar with data=tile, op0= for op=, operand0={value}{first}"
    elif isinstance(value, Mask):
        mend = "choose by conditions of indices with nisa.affine_select"
    elif isinstance(value, (Affine, DynamicIndex, slice)):
        mend = "index a tensor, tensor[rows, columns], or make a tile of numbers with nisa.iota"
    elif hasattr(value, "__self__"):
        mend = f"call it, .{value.__name__}(...)"
    elif callable(value):
        mend = "name its arguments, as op=nl.exp and data=tile"
    elif value is None:
        mend = "give a tensor: None is what stores return, and functions without return"
    elif type(value).__name__ == "ShapeDtypeStruct" or (  # of JAX: no values to load
        isinstance(value, tuple) and all(map(is_integer, value))
    ):
        mend = "make a tile of that shape with nl.ndarray(shape, dtype, buffer=nl.sbuf)"
    elif isinstance(value, (list, tuple, dict)) and any(
        isinstance(one, View) for one in (value.values() if isinstance(value, dict) else value)
    ):
        mend = f"name one of the {len(value)} tiles that it holds, as tiles[k] in a loop"
    elif isinstance(value, (str, list, tuple, dict, memoryview)):
        mend = "give tensors one by one, to the kernel as numpy arrays or torch tensors"
    elif getattr(value, "shape", ()):
        mend = "pass it to the kernel and load it with nl.load, or make constants with nl.zeros"
    return refuse(
        "sim_operand_type", f"{what} got a {type_name(value)}, expected {expected}; {mend}"
    )


def _rows(src: View, dst: View) -> str:
    """What stands for a single row of HBM on the other side of a tile, if rows are meant."""
    hbm, tile = sorted((src, dst), key=lambda view: view.on_chip)
    if hbm.on_chip or not tile.on_chip or not hbm.size == tile.free_size < tile.size:
        return ""
    count, name = tile.shape[0], called(hbm)
    told = [f"{count} rows are {name}[k:k + {count}], with k = i * {count} in a loop over tiles"]
    told = told if hbm.storage.size >= tile.size else []
    told += [f"a single row goes to all partitions from {as_row(hbm)}.broadcast(0, {count})"] * (
        hbm is src
    )
    return ", and ".join(told)


def as_row(hbm: View) -> str:
    """What has the elements of one axis in HBM as a row, with a partition axis."""
    name = called(hbm)
    return f"{name}.reshape((1, {hbm.size}))" if hbm.is_full() else f"{name}[i:i + 1]"


def common_part(dst: View, src: View) -> str:
    """How two operands become equally large: a part of the larger, or both of one shape."""
    smaller, larger = sorted((dst, src), key=lambda view: view.size)
    name, both = called(larger), f"make both of one shape, {smaller.shape} or {larger.shape}"
    if rows := _rows(src, dst):
        return rows
    if not smaller.size:
        return f"write a range with elements: {_empty(written.argument(called(smaller)))}"
    if smaller is src and larger.shape[1:] == smaller.shape:
        where = f"{written.argument(name)}[i]"
        return f"write {called(src)} to {where}, in a loop over range({larger.shape[0]})"
    if smaller is src and src.scalar_offsets_anywhere and larger.shape[:-1] == src.shape:
        last = f"({src.ndim}, {larger.shape[-1]})"
        return f"stretch it, {called(src)}.expand_dim({src.ndim}).broadcast{last}"
    if larger.shape[: smaller.ndim] == smaller.shape:
        return f"reduce its axes from {smaller.ndim} on, too, or take one of them, {name}[..., 0]"
    made, own = dst.storage.shape, called(dst)
    if dst.on_chip and dst.shape[:1] == (1,) != src.shape[:1] == made[1:2]:
        turned = (made[1], made[0], *made[2:])
        return f"put the partitions first: make {own} of shape {turned}, and take {own}[:, i]"
    if smaller.ndim != larger.ndim:
        return f"slice both alike, or {both}"
    text = written.argument(name)
    part = f"[{', '.join(f'0:{min(sizes)}' for sizes in zip(smaller.shape, larger.shape))}]"
    if text != name:  # a part of that part would lose where it begins
        uneven = [k for k in range(larger.ndim) if smaller.shape[k] != larger.shape[k]]
        sizes = [f"{smaller.shape[k]} instead of {larger.shape[k]} along axis {k}" for k in uneven]
        part, name = " and ".join(sizes), text
    return f"take {part} of {name} if a part is meant, or {both}"


def _empty(text: str) -> str:
    """Why a part of a tensor has no elements, and what to take in its place."""
    if not (negative := re.fullmatch(r"(\w+)\[:, -(\w+):(.+)\]", text)):
        return f"that of {text} ends where it begins"
    name, shift, end = negative.groups()
    return (
        f"a negative start counts from the end, so {text} has none; take {name}[:, 0:{end}], and "
        f"[:, {shift}:] of the others"
    )


def number(value: Any) -> Any:
    """A numpy scalar as the Python number it holds."""
    return value.item() if isinstance(value, np.generic) else value


def stretched(value: View, data: View, what: str) -> View:
    """A (P, 1) operand stretched over the free axes of ``data`` (zero stride)."""
    if value.shape[0] != data.shape[0]:
        raise refuse(
            "err_num_partition_mismatch",
            f"{what} {value.label()} has {value.shape[0]} partitions, expected {data.shape[0]} "
            f"like {data.label()}; {as_column(value, data, what)}",
        )
    if value.free_size != 1:
        raise refuse(
            "sim_vector_operand",
            f"{what} {value.label()} has {value.free_size} elements per partition, expected 1; "
            + as_column(value, data, what),
        )
    return (value if value.ndim == 2 else value.reshape((value.shape[0], 1))).widened(data.shape)


def as_column(value: View, data: View, what: str = "") -> str:
    """What to do with an operand that is no vector of the partitions, such as a row."""
    if what.startswith("select"):
        return f"choose between tiles with nl.where(predicate, {called(data)}, {called(value)})"
    if value.shape[0] == data.shape[0]:
        return (
            f"combine whole tiles with nisa.tensor_tensor, of data1={called(data)} and "
            f"data2={called(value)}, or slice a column, {called(value)}[:, 0:1]"
        )
    if value.shape[0] == 1 and value.free_size == data.free_size:
        return f"a row is an operand of nisa.tensor_tensor, as {spread(value, data)}"
    if value.size == 1:
        return f"one number goes to all partitions with {spread(value, data)}"
    if value.shape[0] == 1 and value.storage.shape[0] == data.shape[0]:
        return f"a column, one number for each partition, is {called(value)}[:, k:k + 1]"
    if value.shape[0] == 1 and value.free_size == data.shape[0]:
        return f"make it a column where it is loaded, from x_hbm.reshape(({data.shape[0]}, 1))"
    rows = min(value.shape[0], data.shape[0])
    return f"give both the same partitions, as with [0:{rows}] on each"


def no_number(value: Any) -> str:
    """What to write for a value that is neither a number nor a tile."""
    if value is None or isinstance(value, (bool, str, list, tuple)):
        return "write a number, 1.0, without quotes or brackets, or leave the argument out"
    return "pass arrays to the kernel, and combine whole tiles with nisa.tensor_tensor"


def spread(row: View, data: View) -> str:
    """The call that copies a row to the partitions of ``data``; both languages have it."""
    return f"nl.broadcast_to({called(row)}, {(data.shape[0], *row.shape[1:])})"


def column(value: Any, data: View, what: str, exact: bool = True) -> View:
    """A (P, 1) operand, of fp32 if ``exact``, stretched over the free axes of ``data``."""
    if not isinstance(value, View):
        raise no_tensor(value, what, "a tensor made with nl.ndarray or a parameter of the kernel")
    if exact and value.dt is not FLOAT32:
        raise refuse(
            "sim_vector_type",
            f"{what} {value.label()} is {value.dt}, expected float32; make {called(value)} with "
            "dtype=nl.float32, or copy it into such a tile with nisa.tensor_copy",
        )
    return stretched(value, data, what)


def free_axes(axis: Any, ndim: int, what: str) -> tuple[int, ...]:
    """Sorted numbers of the free axes that ``axis`` names."""
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not all(map(is_integer, axes)):
        raise refuse(
            "sim_reduce_axis",
            f"{what} over an axis of type {type_name(axis)}, expected integers from 1 to "
            f"{ndim - 1}; give axis=1, and two tiles to nl.maximum, nl.minimum or nl.add",
        )
    axes = tuple(sorted(int(a) + ndim if a < 0 else int(a) for a in axes))
    if 0 in axes or any(a >= ndim for a in axes):
        raise refuse(
            "sim_reduce_axis",
            f"{what} over axes {axes} of a tile of rank {ndim}, expected free axes 1 to "
            f"{ndim - 1}; "
            + (
                "axis=1 goes along each row, while axis 0 lies on partitions: take axis=1 of "
                "nl.copy(nl.transpose(x)) and turn the result back in the same way, or sum over "
                "partitions with nisa.nc_matmul of a tile of ones, "
                f"({CORE.partitions}, 1), as stationary, and compare two with nl.maximum(x, y)"
                if 0 in axes
                else f"give axis={ndim - 1} for the last one"
            ),
        )
    return axes


def on_bits(operator: str, views: Iterable[View]) -> bool:
    """Whether an operator is bitwise; bitwise operators need integer operands."""
    if operator not in BITWISE:
        return False
    for view in views:
        if not view.dt.is_int:
            raise refuse(
                "sim_bitwise_on_float",
                f"{operator} got {view.label()}, expected an integer type; load it as one, or "
                f"nl.copy({called(view)}, dtype=nl.int32) of whole numbers, or take .view(nl.int32)"
                " for a number's bits, and use nl.logical_not, nl.logical_and and nl.logical_or "
                "for conditions",
            )
    return True


def check_operator(operator: str, what: str) -> None:
    """Refuse a value that is no operator of the ALU."""
    if operator not in BITWISE and operator not in ARITHMETIC:
        raise refuse(
            "sim_unknown_operator",
            f"{what} with operator nl.{operator}, expected an ALU operator; give it a line of its "
            f"own, nisa.activation with op=nl.{operator} and data=, which ScalarE runs",
        )


def check_reduction(operator: str, what: str, allowed: Iterable[str]) -> None:
    """Refuse an operator that an instruction does not reduce with."""
    if operator not in allowed:
        mend = f"write nl.{next(iter(allowed))} or another of them"
        plain = {"abs_max": "maximum", "abs_min": "minimum"}.get(operator, "")
        if plain in allowed:
            mend = f"give it nl.abs(x) of its data x, and op=nl.{plain}"
        elif operator in ("maximum", "minimum", "add", "multiply"):
            mend = (
                "leave it out, and reduce the result on a line behind it, "
                f"nisa.tensor_reduce(dst=m, op=nl.{operator}, data=result, axis=1)"
            )
        raise refuse(
            "sim_reduce_operator",
            f"{what} with reduction operator '{operator}', expected one of {', '.join(allowed)}; "
            f"{mend}",
        )


def check_second(op1: Any, operand1: Any, reverse1: Any, what: str) -> None:
    """Refuse the operand of a second step without its operator: the step would be left out."""
    if op1 is None and (operand1 is not None or reverse1):
        raise refuse(
            "sim_unknown_operator",
            f"{what} got {'reverse1' if operand1 is None else 'operand1'}= without op1=, expected "
            "both or neither: without an operator the second step is left out; add op1=",
        )


def check_comparison(operator: str, what: str) -> None:
    """Refuse an operator that is no comparison."""
    if operator not in COMPARISONS:
        raise refuse(
            "sim_unknown_operator",
            f"{what} with nl.{operator}, expected one of {', '.join(COMPARISONS)}; write "
            "cmp_op=nl.greater_equal or another of them",
        )


def check_total(total: View, partitions: int, what: str) -> None:
    """Refuse a tile of another size for a second result."""
    if total.shape[0] != partitions or total.free_size != 1:
        raise refuse(
            "sim_reduce_res_shape",
            f"{what} reduce_res {total.label()}, expected shape ({partitions}, 1); make it "
            f"with nl.ndarray(({partitions}, 1), nl.float32, nl.sbuf)",
        )


# --- numbers --------------------------------------------------------------------------------------
def _told(value: Any) -> str:
    return value.label() if isinstance(value, View) else type(value).__name__


def real(value: Any, what: str) -> float:
    """``value`` as a float."""
    value = number(value)
    if isinstance(value, (int, float)):
        return float(value)
    raise refuse(
        "sim_number",
        f"{what} is a {_told(value)}, expected a number; give it as a Python number, and combine "
        "tiles with nisa.tensor_copy or nisa.tensor_tensor",
    )


def whole(value: Any, what: str) -> int:
    """``value`` as an int, known while building."""
    if is_integer(value) or isinstance(value, bool):
        return int(value)
    raise refuse(
        "sim_number",
        f"{what} is a {_told(value)}, expected an integer; "
        + (
            f"write int({value}), or divide with // where it is computed"
            if isinstance(value, float)
            else "compute it with // from shapes, or write the number"
        ),
    )


def flag(value: Any, what: str) -> bool:
    """``value`` as True or False, known while building."""
    if isinstance(value, bool) or is_integer(value):
        return bool(value)
    raise refuse(
        "sim_number",
        f"{what} is a {_told(value)}, expected True or False; name arguments behind the operands",
    )


def several(value: Any, what: str) -> Sequence[Any]:
    """``value`` as a list or tuple of values."""
    if isinstance(value, (list, tuple)):
        return value
    raise refuse(
        "sim_sequence",
        f"{what} is a {_told(value)}, expected a list or tuple; write the values in brackets, a "
        "pattern as [[step, count]]",
    )


def wholes(value: Any, what: str) -> list[int]:
    """``value`` as integers."""
    return [whole(one, what) for one in several(value, what)]


def pairs(pattern: Any, what: str) -> list[tuple[int, int]]:
    """``[[step, num], ...]`` as pairs of integers."""
    found: list[tuple[int, int]] = []
    for pair in several(pattern, what):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise refuse(
                "sim_sequence",
                f"{what} is {pattern}, expected pairs [step, count]; write [[1, n]] for n steps "
                "of one",
            )
        step, num = pair
        if not type(step) is type(num) is int:
            step, num = whole(step, f"step of {what}"), whole(num, f"count of {what}")
        found.append((step, num))
    return found


unknown_engine = None
tensor_engine = Engine.TENSOR
vector_engine = Engine.VECTOR
scalar_engine = Engine.SCALAR
gpsimd_engine = Engine.GPSIMD
dma_engine = Engine.DMA


# --- enumerations and constants of ``nki.isa`` ----------------------------------------------------
class engine:
    """``nisa.engine`` of SDK 2.22: the same choices as attributes."""

    unknown = None
    tensor = Engine.TENSOR
    vector = Engine.VECTOR
    scalar = Engine.SCALAR
    gpsimd = Engine.GPSIMD
    dma = Engine.DMA
    sync = Engine.DMA


class nc_version(IntEnum, metaclass=Listed):
    """NeuronCore generations, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class reduce_cmd(Enum, metaclass=Listed):
    """An instruction's use of ScalarE's running sums (SDK 2.22)."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3


class dge_mode(Enum, metaclass=Listed):
    """Who makes the descriptors of a DMA: GpSimdE, a block of hardware, which NeuronCore-v2 lacks,
    or the host in advance (SDK 2.23)."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum, metaclass=Listed):
    """A DMA's treatment of run-time indices out of bounds (SDK 2.23)."""

    error = 0
    skip = 1


class fp32:
    """Range of fp32 (SDK 2.23)."""

    min = float(np.finfo(np.float32).min)
    max = float(np.finfo(np.float32).max)


@form("neuronxcc.nki.isa", None)
def get_nc_version() -> nc_version:
    """The generation that kernels are traced for; outside of kernels the environment's."""
    core = CORE if trace.active() is not None else target.chosen(target.DEFAULT_BEFORE)
    return nc_version(core.number)
