"""``nki.isa``: random numbers. Bit streams are not documented; these repeat in every run."""

from typing import Any

from ..device.errors import refuse, warn
from ..device.spec import Engine
from ..device.target import needs
from ..instructions import gpsimd
from ..instructions.arguments import column, real
from ..instructions.copies import TENSOR_COPY, copy_attrs
from ..program import trace
from ..program.view import View
from .enums import choose, engine
from .operands import NkiInstruction, alike, put, tensor
from .releases import isa


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
        raise refuse("sim_random_type", f"rng into {target.label()}, expected an integer type")
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
            "sim_random_seed", f"set_rng_seed of {seeds.label()}, expected (1, 1) of 32 bits"
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
            f"{what} of {view.label()}, expected uint32 with {values} values per partition",
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
