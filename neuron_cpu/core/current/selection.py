"""``nki.isa``: index patterns, selections by place, searches, segments and random numbers."""

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
from ..program.view import View
from .accumulators import VECTOR, Reduction, reducing
from .control import VirtualRegister
from .operands import (
    NkiInstruction,
    alike,
    choose,
    engine,
    operator,
    product,
    put,
    reduce_cmd,
    tensor,
)
from .releases import isa

MAX_PAIRS = 4


# --- index patterns -------------------------------------------------------------------------------
def _affine(what: str, dst: View, pattern: Any, offset: Any, channel_multiplier: int) -> np.ndarray:
    """``offset + p * channel_multiplier + sum of index * step`` in int32, in the shape of dst."""
    steps = pairs(pattern, f"{what} pattern")
    if len(steps) > MAX_PAIRS or product(num for _, num in steps) != dst.free_size:
        raise refuse(
            "sim_pattern",
            f"{what} of {dst.label()} with pattern {pattern}, expected at most {MAX_PAIRS} pairs "
            f"[step, num] whose nums multiply to {dst.free_size}",
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
def iota(
    dst: Any, pattern: Any, offset: Any = 0, channel_multiplier: int = 0, name: str | None = None
) -> NkiInstruction:
    """``offset + p * channel_multiplier + sum of index * step`` over ``[[step, num], ...]``."""
    target = tensor(dst, "iota")
    values = _affine("iota", target, pattern, offset, channel_multiplier)
    return put(gpsimd.IOTA, (target,), (), gpsimd.IotaAttrs(values=values), name)


_ORDER = "dst pattern offset channel_multiplier on_true_tile on_false_value cmp_op name"


@isa(gpsimd.AFFINE_SELECT, order=tuple(_ORDER.split()))
def affine_select(
    dst: Any,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = None,
    offset: Any = 0,
    name: str | None = None,
) -> NkiInstruction:
    """Keep elements whose affine value compares with 0 as ``cmp_op`` says (default: equal)."""
    what = "affine_select"
    target, data = alike(what, tensor(dst, what), tensor(on_true_tile, what))
    code = "equal" if cmp_op is None else operator(cmp_op, what)
    check_comparison(code, what)
    values = _affine(what, target, pattern, offset, channel_multiplier)
    keep = getattr(np, code)(values, 0)
    attrs = gpsimd.KeepAttrs(keep=keep, on_false=real(on_false_value, f"{what} on_false_value"))
    return put(gpsimd.AFFINE_SELECT, (target,), (data,), attrs, name)


@isa(RANGE_SELECT)
def range_select(
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: reduce_cmd = reduce_cmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = None,
    range_start: float = 0,
    on_false_value: float = fp32.min,
    name: str | None = None,
) -> NkiInstruction:
    """Keep columns whose number lies between two bounds of each partition; gen3."""
    what = "range_select"
    target, data = alike(what, tensor(dst, what), tensor(on_true_tile, what))
    bounds = [column(b, data, f"{what} bound") for b in (bound0, bound1)]
    join = "maximum" if reduce_op is None else operator(reduce_op, what)
    first, least = (
        real(range_start, f"{what} range_start"),
        real(on_false_value, f"{what} on_false_value"),
    )
    codes = operator(comp_op0, what), operator(comp_op1, what)
    attrs = ranging(data, codes, first, least, join)
    how = Reduction(VECTOR, "maximum", data.shape[0], what)
    src = (data, *bounds)
    return reducing(how, reduce_cmd, reduce_res, RANGE_SELECT, target, src, attrs, name)


@isa(gpsimd.SEQUENCE_BOUNDS)
def sequence_bounds(dst: Any, segment_ids: Any, name: str | None = None) -> NkiInstruction:
    """(1, n) segment ids to (1, 2, n): first index and end of each element's segment; 0 pads."""
    what = "sequence_bounds"
    target, ids = tensor(dst, what), tensor(segment_ids, what)
    if ids.shape[0] != 1 or ids.dt not in (FLOAT32, INT32) or target.size != 2 * ids.size:
        raise refuse(
            "sim_sequence_bounds",
            f"{what} of {ids.label()} into {target.label()}, expected fp32 or int32 (1, n) and a "
            "dst of (1, 2, n)",
        )
    n = ids.free_size
    views = target.reshape((1, 2, n)), ids.reshape((1, n))
    return put(gpsimd.SEQUENCE_BOUNDS, views[:1], views[1:], Attrs(), name)


# --- the eight largest ----------------------------------------------------------------------------
@isa(MAX8)
def max8(dst: Any, src: Any, name: str | None = None) -> NkiInstruction:
    """The 8 largest elements of each partition, descending, to (P, 8)."""
    target, data = _eight(tensor(dst, "max8"), "max8"), tensor(src, "max8")
    return put(MAX8, (target,), (data,), SearchAttrs(free_axes=data.ndim - 1), name)


def _eight(view: View, what: str) -> View:
    if view.free_size != 8:
        raise refuse(
            "sim_search_values",
            f"{what} got {view.label()}, expected 8 elements per partition; make a tile (P, 8)",
        )
    return view if view.ndim == 2 else view.reshape((view.shape[0], 8))


def _search(data: Any, vals: Any, what: str, replacement: float = 0.0) -> Any:
    source, wanted = tensor(data, what), tensor(vals, what)
    attrs = SearchAttrs(
        free_axes=source.ndim - 1,
        value_axes=wanted.ndim - 1,
        replacement=replacement,
        successive=True,
    )
    return (source, wanted), attrs


@isa(FIND8)
def nc_find_index8(dst: Any, data: Any, vals: Any, name: str | None = None) -> NkiInstruction:
    """Index of the first occurrence of each of 8 values; equal values take successive ones.

    A value that does not occur gives all ones.
    """
    what = "nc_find_index8"
    target = _eight(tensor(dst, what), what)
    if target.dt.name not in ("uint32", "uint16"):
        raise refuse(
            "sim_search_types",
            f"{what} into {target.label()}, expected uint32 or uint16; make it with nl.uint32",
        )
    src, attrs = _search(data, vals, what)
    return put(FIND8, (target,), src, attrs, name)


@isa(REPLACE8)
def nc_match_replace8(
    dst: Any, data: Any, vals: Any, imm: float, dst_idx: Any = None, name: str | None = None
) -> NkiInstruction:
    """``data`` with the first occurrence of each of 8 values replaced by ``imm``.

    ``dst_idx`` (P, 8) receives their indices. Values are taken from the last to the first.
    """
    what = "nc_match_replace8"
    target, source = alike(what, tensor(dst, what), tensor(data, what))
    src, attrs = _search(source, vals, what, real(imm, f"{what} imm"))
    if dst_idx is not None:
        _, finding = _search(source, vals, what)
        index = _eight(tensor(dst_idx, what), what)
        put(FIND8, (index,), src, finding)
    return put(REPLACE8, (target,), src, attrs, name)


@isa(gpsimd.TOPK, came="2.32")
def topk(val_dst: Any, idx_dst: Any, src: Any, n: int, name: str | None = None) -> NkiInstruction:
    """The largest bf16 elements of each group of 16 partitions, ascending, and their numbers.

    Element e of a group lies at partition e % 16, column e // 16; ``n`` of them count. Results are
    the same on all partitions of the group here; the documentation does not say where they are.
    """
    what = "topk"
    values, places, data = (tensor(v, what) for v in (val_dst, idx_dst, src))
    k, each = values.free_size, CORE.gpsimd_partitions
    wrong = ""
    if data.dt.name != "bfloat16" or values.dt is not data.dt or places.dt.name != "uint32":
        wrong = "bf16 data and values, uint32 indices"
    elif not 8 <= n < 65536 or not 1 <= k <= min(n, 32767):
        wrong = "8 <= n < 65536 and at most n values"
    elif data.shape[0] % each or data.free_size < -(-n // each):
        wrong = f"a multiple of {each} partitions with at least n / {each} columns"
    elif not values.shape[0] == places.shape[0] == data.shape[0] or places.free_size != k:
        wrong = "destinations with the partitions of src and equal sizes"
    if wrong:
        raise refuse(
            "sim_topk",
            f"{what} of {data.label()} into {values.label()} and {places.label()} with n={n}, "
            f"expected {wrong}",
        )
    warn(
        "sim_topk_place",
        f"{what} into {values.label()}: sources leave open on which of 16 partitions results "
        "stand, expected no need to know; here they stand on all of them",
        advice=True,
    )
    attrs = gpsimd.TopKAttrs(n=whole(n, f"{what} n"), k=k, ndim=data.ndim)
    return put(gpsimd.TOPK, (values, places), (data,), attrs, name)


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
def rng(dst: Any, engine: engine = engine.vector, name: str | None = None) -> NkiInstruction:
    """Random bits of an integer type on VectorE, from gen3 on also GpSimdE."""
    target = tensor(dst, "rng")
    choice = choose(engine, "rng", gpsimd.RANDOM_BITS.engines)
    if choice is Engine.GPSIMD:
        needs("rng on GpSimdE", 3)
    if not target.dt.is_int:
        raise refuse(
            "sim_random_type",
            f"rng into {target.label()}, expected an integer type; make it with dtype=nl.uint32",
        )
    src: list[View] = []
    _warn_of_stream("rng")
    attrs = gpsimd.random_source(src, engine=choice, bits=True, shape=target.shape)
    return put(gpsimd.RANDOM_BITS, (target,), tuple(src), attrs, name)


@isa(None)
def set_rng_seed(src_seeds: Any, name: str | None = None) -> None:
    """Seed of VectorE's generator: a (1, 1) tile of 32 bits."""
    seeds = tensor(src_seeds, "set_rng_seed")
    if seeds.size != 1 or seeds.dt.itemsize != 4:
        raise refuse(
            "sim_random_seed",
            f"set_rng_seed of {seeds.label()}, expected (1, 1) of 32 bits; "
            "make a tile (1, 1) with dtype=nl.uint32",
        )
    _reseed(seeds)


def _reseed(seeds: View) -> None:
    """The random instructions that follow depend on a copy of the seed."""
    tracer = trace.current("a random seed")
    held = tracer.whole(tracer.storage((1, 1), seeds.dt, "sbuf", name="seed"))
    first = seeds.slice_box(tuple(slice(0, 1) for _ in seeds.shape)).reshape((1, 1))
    put(TENSOR_COPY, (held,), (first,), copy_attrs(held.dt, first.dt))
    tracer.random = (held, 0)


_STATE = {Engine.GPSIMD: (6, 3), Engine.VECTOR: (24, 4)}  # values of a partition, first generation


@isa(None)
def rand_set_state(src_seeds: Any, engine: engine = engine.gpsimd, name: str | None = None) -> None:
    """State of a generator of gen3 (GpSimdE) or gen4 (VectorE): uint32, 6 or 24 a partition."""
    seeds = tensor(src_seeds, "rand_set_state")
    _check_state(seeds, engine, "rand_set_state")
    _reseed(seeds)


@isa(gpsimd.RANDOM_BITS)
def rand_get_state(
    dst: Any, engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """The state of a generator, as ``rand_set_state`` takes it."""
    target = tensor(dst, "rand_get_state")
    _check_state(target, engine, "rand_get_state")
    src: list[View] = []
    _warn_of_stream("rand_get_state")
    attrs = gpsimd.random_source(src, bits=True, shape=target.shape)
    return put(gpsimd.RANDOM_BITS, (target,), tuple(src), attrs, name)


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
def rand2(dst: Any, min: Any, max: Any, name: str | None = None) -> NkiInstruction:
    """Uniform fp32 numbers between two bounds on VectorE of gen4."""
    target = tensor(dst, "rand2")
    src: list[View] = []
    places: list[int | None] = []
    for bound in (min, max):
        places.append(len(src) if isinstance(bound, View) else None)
        src += [column(bound, target, "rand2 bound")] if isinstance(bound, View) else []
    _warn_of_stream("rand2")
    low = 0.0 if places[0] is not None else real(min, "rand2 min")
    high = 0.0 if places[1] is not None else real(max, "rand2 max")
    bounds: Any = {"low": low, "high": high, "low_at": places[0], "high_at": places[1]}
    attrs = gpsimd.random_source(src, gpsimd.UniformAttrs, shape=target.shape, **bounds)
    return put(gpsimd.UNIFORM, (target,), tuple(src), attrs, name)


@isa(gpsimd.DROPOUT, came="2.29")
def dropout(dst: Any, data: Any, prob: Any, name: str | None = None) -> NkiInstruction:
    """``data`` with elements set to zero with probability ``prob`` (a number or (P, 1))."""
    target, source = alike("dropout", tensor(dst, "dropout"), tensor(data, "dropout"))
    warn(
        "sim_dropout_probability",
        f"dropout of {source.label()}: sources disagree whether prob is the share that is dropped "
        "or kept, expected no need to know; here it is the share that is dropped",
    )
    prob = prob if isinstance(prob, View) else real(prob, "dropout prob")
    src, probability, at = gpsimd.with_probability(
        source, prob, lambda: column(prob, source, "dropout prob", exact=False)
    )
    _warn_of_stream("dropout")
    attrs = gpsimd.random_source(
        src, gpsimd.DropoutAttrs, probability=probability, probability_at=at
    )
    return put(gpsimd.DROPOUT, (target,), tuple(src), attrs, name)
