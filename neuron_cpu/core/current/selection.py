"""``nki.isa``: index patterns, selections by place, searches, segments and random numbers."""

import math
from typing import Any

import numpy as np

from ..device.dtypes import FLOAT32, INT32
from ..device.errors import refuse, warn
from ..device.spec import CORE, Engine
from ..device.target import needs
from ..instructions import gpsimd
from ..instructions.arguments import check_comparison, column, fp32, pairs, real, whole
from ..instructions.copies import FIND8, MAX8, REPLACE8, TENSOR_COPY, SearchAttrs, copy_attrs
from ..instructions.vector import RANGE_SELECT, ranging
from ..program import trace
from ..program.attributes import Attrs
from ..program.view import View, called
from .accumulators import VECTOR, Reduction, reducing
from .control import VirtualRegister
from .operands import NkiInstruction, alike, choose, engine, isa, operator, put, reduce_cmd, tensor

MAX_PAIRS = 4


# --- index patterns -------------------------------------------------------------------------------
def _affine(what: str, dst: View, pattern: Any, offset: Any, channel_multiplier: int) -> np.ndarray:
    """``offset + p * channel_multiplier + sum of index * step`` in int32, in the shape of dst."""
    steps = pairs(pattern, f"{what} pattern")
    if len(steps) > MAX_PAIRS or math.prod(num for _, num in steps) != dst.free_size:
        raise refuse(
            "sim_pattern",
            f"{what} of {dst.label()} with pattern {pattern}, expected at most {MAX_PAIRS} pairs "
            f"[step, num] whose nums multiply to {dst.free_size}; write "
            f"pattern=[[1, {dst.free_size}]] for a step of one from column to column",
        )
    if isinstance(offset, VirtualRegister):
        offset = offset.value(f"offset of {what}")
    partitions = dst.shape[0]
    first = whole(offset, f"{what} offset")
    across = whole(channel_multiplier, f"{what} channel_multiplier")
    total = first + np.arange(partitions, dtype=np.int64)[:, None] * across
    for step, num in steps:
        line = step * np.arange(num, dtype=np.int64)
        total = (total[:, :, None] + line).reshape(partitions, -1)
    return total.astype(np.int32).reshape(dst.shape)


@isa(gpsimd.IOTA)
def iota(dst: View, pattern: Any, offset: Any = 0, channel_multiplier: int = 0) -> NkiInstruction:
    """``offset + p * channel_multiplier + sum of index * step`` over ``[[step, num], ...]``."""
    values = _affine("iota", dst, pattern, offset, channel_multiplier)
    return put(gpsimd.IOTA, (dst,), (), gpsimd.IotaAttrs(values=values))


_ORDER = "dst pattern offset channel_multiplier on_true_tile on_false_value cmp_op name"


@isa(gpsimd.AFFINE_SELECT, order=tuple(_ORDER.split()))
def affine_select(
    dst: View,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: View,
    on_false_value: Any,
    cmp_op: Any = None,
    offset: Any = 0,
) -> NkiInstruction:
    """Keep elements whose affine value compares with 0 as ``cmp_op`` says (default: equal)."""
    what = "affine_select"
    dst, on_true_tile = alike(what, dst, on_true_tile)
    code = "equal" if cmp_op is None else operator(cmp_op, what)
    check_comparison(code, what)
    keep = getattr(np, code)(_affine(what, dst, pattern, offset, channel_multiplier), 0)
    attrs = gpsimd.KeepAttrs(keep=keep, on_false=real(on_false_value, f"{what} on_false_value"))
    return put(gpsimd.AFFINE_SELECT, (dst,), (on_true_tile,), attrs)


@isa(RANGE_SELECT)
def range_select(
    dst: View,
    on_true_tile: View,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = None,
    range_start: float = 0,
    on_false_value: float = fp32.min,
) -> NkiInstruction:
    """Keep columns whose number lies between two bounds of each partition; gen3."""
    what = "range_select"
    dst, on_true_tile = alike(what, dst, on_true_tile)
    bounds = [column(b, on_true_tile, f"{what} bound") for b in (bound0, bound1)]
    join = "maximum" if reduce_op is None else operator(reduce_op, what)
    first = real(range_start, f"{what} range_start")
    least = real(on_false_value, f"{what} on_false_value")
    codes = operator(comp_op0, what), operator(comp_op1, what)
    attrs = ranging(on_true_tile, codes, first, least, join)
    how = Reduction(VECTOR, "maximum", on_true_tile.shape[0], what)
    return reducing(how, reduce_cmd, reduce_res, RANGE_SELECT, dst, (on_true_tile, *bounds), attrs)


@isa(gpsimd.SEQUENCE_BOUNDS)
def sequence_bounds(dst: View, segment_ids: View) -> NkiInstruction:
    """(1, n) segment ids to (1, 2, n): first index and end of each element's segment; 0 pads."""
    what = "sequence_bounds"
    if (
        segment_ids.shape[0] != 1
        or segment_ids.dt not in (FLOAT32, INT32)
        or dst.size != 2 * segment_ids.size
    ):
        raise refuse(
            "sim_sequence_bounds",
            f"{what} of {segment_ids.label()} into {dst.label()}, expected fp32 or int32 "
            "(1, n) and a dst of (1, 2, n); make them of these shapes",
        )
    n = segment_ids.free_size
    views = dst.reshape((1, 2, n)), segment_ids.reshape((1, n))
    return put(gpsimd.SEQUENCE_BOUNDS, views[:1], views[1:], Attrs())


# --- the eight largest ----------------------------------------------------------------------------
@isa(MAX8)
def max8(dst: View, src: View) -> NkiInstruction:
    """The 8 largest elements of each partition, descending, to (P, 8)."""
    dst = _eight(dst, "max8", src)
    return put(MAX8, (dst,), (src,), SearchAttrs(free_axes=src.ndim - 1))


def _eight(view: View, what: str, other: View | None = None) -> View:
    if view.free_size != 8:
        mend = f"make it nl.ndarray(({view.shape[0]}, 8), dtype=nl.{view.dt}, buffer=nl.sbuf)"
        if other is not None and other.free_size == 8:
            mend = f"exchange dst and src: {called(other)} has 8"
        raise refuse(
            "sim_search_values",
            f"{what} got {view.label()}, expected 8 elements per partition; {mend}",
        )
    return view if view.ndim == 2 else view.reshape((view.shape[0], 8))


def _searching(data: View, vals: View, replacement: float = 0.0) -> SearchAttrs:
    return SearchAttrs(
        free_axes=data.ndim - 1, value_axes=vals.ndim - 1, replacement=replacement, successive=True
    )


@isa(FIND8)
def nc_find_index8(dst: View, data: View, vals: View) -> NkiInstruction:
    """Index of the first occurrence of each of 8 values; equal values take successive ones.

    A value that does not occur gives all ones.
    """
    what = "nc_find_index8"
    dst = _eight(dst, what)
    if dst.dt.name not in ("uint32", "uint16"):
        raise refuse(
            "sim_search_types",
            f"{what} into {dst.label()}, expected uint32 or uint16; make it with nl.uint32",
        )
    return put(FIND8, (dst,), (data, vals), _searching(data, vals))


@isa(REPLACE8)
def nc_match_replace8(
    dst: View, data: View, vals: View, imm: float, dst_idx: Any = None
) -> NkiInstruction:
    """``data`` with the first occurrence of each of 8 values replaced by ``imm``.

    ``dst_idx`` (P, 8) receives their indices. Values are taken from the last to the first.
    """
    what = "nc_match_replace8"
    dst, data = alike(what, dst, data)
    attrs = _searching(data, vals, real(imm, f"{what} imm"))
    if dst_idx is not None:
        put(FIND8, (_eight(tensor(dst_idx, what), what),), (data, vals), _searching(data, vals))
    return put(REPLACE8, (dst,), (data, vals), attrs)


@isa(gpsimd.TOPK, came="2.32")
def topk(val_dst: View, idx_dst: View, src: View, n: int) -> NkiInstruction:
    """The largest bf16 elements of each group of 16 partitions, ascending, and their numbers.

    Element e of a group lies at partition e % 16, column e // 16; ``n`` of them count. Results are
    the same on all partitions of the group here; the documentation does not say where they are.
    """
    what, n = "topk", whole(n, "topk n")
    k, each = val_dst.free_size, CORE.gpsimd_partitions
    wrong = ""
    if src.dt.name != "bfloat16" or val_dst.dt is not src.dt or idx_dst.dt.name != "uint32":
        wrong = "bf16 data and values, uint32 indices"
    elif not 8 <= n < 65536 or not 1 <= k <= min(n, 32767):
        wrong = "8 <= n < 65536 and at most n values"
    elif src.shape[0] % each or src.free_size < -(-n // each):
        wrong = f"a multiple of {each} partitions with at least n / {each} columns"
    elif not val_dst.shape[0] == idx_dst.shape[0] == src.shape[0] or idx_dst.free_size != k:
        wrong = "destinations with the partitions of src and equal sizes"
    if wrong:
        raise refuse(
            "sim_topk",
            f"{what} of {src.label()} into {val_dst.label()} and {idx_dst.label()} with n={n}, "
            f"expected {wrong}; make the tiles of these shapes and types",
        )
    warn(
        "sim_topk_place",
        f"{what} into {val_dst.label()}: sources leave open on which of 16 partitions results "
        "stand, expected no need to know; here they stand on all of them",
        advice=True,
    )
    return put(gpsimd.TOPK, (val_dst, idx_dst), (src,), gpsimd.TopKAttrs(n=n, k=k, ndim=src.ndim))


# --- random numbers -------------------------------------------------------------------------------
# Bit streams are not documented; these repeat in every run.
def _warn_of_stream(what: str) -> None:
    warn(
        "sim_random_stream",
        f"{what} draws random numbers: their streams are not published, expected results "
        "that do not depend on single numbers; here they repeat in every run",
        advice=True,
    )


@isa(gpsimd.RANDOM_BITS)
def rng(dst: View, engine: engine = engine.vector) -> NkiInstruction:
    """Random bits of an integer type on VectorE, from gen3 on also GpSimdE."""
    choice = choose(engine, "rng", gpsimd.RANDOM_BITS.engines)
    if choice is Engine.GPSIMD:
        needs("rng on GpSimdE", 3)
    if not dst.dt.is_int:
        raise refuse(
            "sim_random_type",
            f"rng into {dst.label()}, expected an integer type; make it with dtype=nl.uint32",
        )
    return _random_bits("rng", dst, engine=choice)


def _random_bits(what: str, dst: View, **choice: Any) -> NkiInstruction:
    src: list[View] = []
    _warn_of_stream(what)
    attrs = gpsimd.random_source(src, bits=True, shape=dst.shape, **choice)
    return put(gpsimd.RANDOM_BITS, (dst,), tuple(src), attrs)


@isa(None)
def set_rng_seed(src_seeds: View) -> None:
    """Seed of VectorE's generator: a (1, 1) tile of 32 bits."""
    src_seeds = tensor(src_seeds, "set_rng_seed src_seeds")
    if src_seeds.size != 1 or src_seeds.dt.itemsize != 4:
        raise refuse(
            "sim_random_seed",
            f"set_rng_seed of {src_seeds.label()}, expected (1, 1) of 32 bits; "
            "make a tile (1, 1) with dtype=nl.uint32",
        )
    _reseed(src_seeds)


def _reseed(seeds: View) -> None:
    """The random instructions that follow depend on a copy of the seed."""
    tracer = trace.current("a random seed")
    held = tracer.whole(tracer.storage((1, 1), seeds.dt, "sbuf", name="seed"))
    first = seeds.slice_box(tuple(slice(0, 1) for _ in seeds.shape)).reshape((1, 1))
    put(TENSOR_COPY, (held,), (first,), copy_attrs(held.dt, first.dt))
    tracer.random = (held, 0)


_STATE = {Engine.GPSIMD: (6, 3), Engine.VECTOR: (24, 4)}  # values of a partition, first generation


@isa(None)
def rand_set_state(src_seeds: View, engine: engine = engine.gpsimd) -> None:
    """State of a generator of gen3 (GpSimdE) or gen4 (VectorE): uint32, 6 or 24 a partition."""
    _check_state(src_seeds, engine, "rand_set_state")
    _reseed(src_seeds)


@isa(gpsimd.RANDOM_BITS)
def rand_get_state(dst: View, engine: engine = engine.gpsimd) -> NkiInstruction:
    """The state of a generator, as ``rand_set_state`` takes it."""
    _check_state(dst, engine, "rand_get_state")
    return _random_bits("rand_get_state", dst)


def _check_state(view: View, given: Any, what: str) -> None:
    choice = choose(given, what, (Engine.GPSIMD, Engine.VECTOR)) or Engine.GPSIMD
    values, first = _STATE[choice]
    needs(f"{what} on {choice.value}", first)
    if view.free_size != values or view.dt.name != "uint32":
        raise refuse(
            "sim_random_state",
            f"{what} of {view.label()}, expected uint32 with {values} values per partition; "
            "make one of that shape with nl.ndarray",
        )


@isa(gpsimd.UNIFORM)
def rand2(dst: View, min: Any, max: Any) -> NkiInstruction:
    """Uniform fp32 numbers between two bounds on VectorE of gen4."""
    src: list[View] = []
    places: list[int | None] = []
    for bound in (min, max):
        places.append(len(src) if isinstance(bound, View) else None)
        src += [column(bound, dst, "rand2 bound")] if isinstance(bound, View) else []
    _warn_of_stream("rand2")
    low = 0.0 if places[0] is not None else real(min, "rand2 min")
    high = 0.0 if places[1] is not None else real(max, "rand2 max")
    bounds: Any = {"low": low, "high": high, "low_at": places[0], "high_at": places[1]}
    attrs = gpsimd.random_source(src, gpsimd.UniformAttrs, shape=dst.shape, **bounds)
    return put(gpsimd.UNIFORM, (dst,), tuple(src), attrs)


@isa(gpsimd.DROPOUT, came="2.29")
def dropout(dst: View, data: View, prob: Any) -> NkiInstruction:
    """``data`` with elements set to zero with probability ``prob`` (a number or (P, 1))."""
    dst, data = alike("dropout", dst, data)
    warn(
        "sim_dropout_probability",
        f"dropout of {data.label()}: sources disagree whether prob is the share that is dropped "
        "or kept, expected no need to know; here it is the share that is dropped",
    )
    prob = prob if isinstance(prob, View) else real(prob, "dropout prob")
    src, probability, at = gpsimd.with_probability(
        data, prob, lambda: column(prob, data, "dropout prob", exact=False)
    )
    _warn_of_stream("dropout")
    attrs = gpsimd.random_source(
        src, gpsimd.DropoutAttrs, probability=probability, probability_at=at
    )
    return put(gpsimd.DROPOUT, (dst,), tuple(src), attrs)
