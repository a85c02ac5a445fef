"""Lines that give what the reference computes next: found in numbers, written as NKI.

A kernel runs once. Before and behind each line at which it leaves the reference's way, operations
of the tiles at hand are computed and looked for among the reference's values.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import Program
from ..core.device import written
from ..core.instructions.alu import ACTIVATIONS
from ..core.program import regions, trace
from ..core.program.storage import Storage
from ..core.program.view import View
from ..core.run import compare

MOST, ROOM = 24, 200_000  # lines that are told, and elements of a tile
SUMS = {"add": "sum", "maximum": "max", "minimum": "min"}  # what reduces by an operation
BINARY: dict[str, Any] = {
    one: getattr(np, one) for one in ("add", "subtract", "multiply", "maximum", "minimum", "divide")
}


class Aim(NamedTuple):
    """A statement to be written.

    Attributes:
        line: of the statement before which, or in whose place (`instead`), it stands.
        text, plain: as a function of `nisa` with a dst, and of `nl` whose result has the name.
    """

    line: int
    instead: bool
    text: str
    plain: str


class Named(NamedTuple):
    """A program and the names of its tiles.

    Attributes:
        calls: of functions, inner ones first: their first and last instruction, and names.
        shapes, numbers: by name.
    """

    program: Program
    calls: list[tuple[int, int, dict[Storage, str]]]
    shapes: dict[str, tuple[int, ...]]
    numbers: dict[str, float]

    def of(self, number: int, storage: Storage) -> str:
        """The name of a tile in the function that records an instruction."""
        found = (names for first, last, names in self.calls if first <= number < last)
        return next(found, {}).get(storage, storage.name)


def named(recorded: Callable[[], Program], file: str) -> Named:
    """A program whose tiles have the names that callers of a file's functions give them."""
    begun: dict[FrameType, int] = {}
    found = Named(Program("", (), None), [], {}, {})

    def count() -> int:
        tracer = trace.active()
        return len(tracer.program.instructions) if tracer else 0

    def see(frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return") or frame.f_code.co_filename != file:
            return
        if event == "call":
            begun[frame] = count()
            return
        held = {n: v for n, v in frame.f_locals.items() if isinstance(v, View)}
        found.shapes.update({name: tuple(view.shape) for name, view in held.items()})
        found.numbers.update({n: v for n, v in frame.f_locals.items() if type(v) is int})
        own = {v.storage: n for n, v in held.items() if v.size == v.storage.size}
        found.calls.append((begun.pop(frame, 0), count(), own))
        for name, view in _given(frame.f_back, result):
            view.storage.name = name

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        program = recorded()
    finally:
        sys.setprofile(before)
    return found._replace(program=program)


def _given(caller: FrameType | None, result: Any) -> Iterator[tuple[str, View]]:
    """The names to which a caller assigns what a function returns."""
    nodes: list[Any] = written.nodes(caller) if caller else []
    targets: list[Any] = getattr(nodes[-1], "targets", [])[:1] if nodes else []
    values = [result]
    if targets and hasattr(targets[0], "elts"):
        several = getattr(nodes[1], "elts", None) if len(nodes) > 1 else None
        values = values if several else [*result] if isinstance(result, (tuple, list)) else []
        targets = targets[0].elts[several.index(nodes[0]) :] if several else targets[0].elts
    for target, value in zip(targets, values):
        if isinstance(value, View) and hasattr(target, "id"):
            yield target.id, value


def aims(
    found: Named,
    inputs: Sequence[torch.Tensor],
    lines: dict[int, float],
    wanted: Callable[[np.ndarray], int],
    words: frozenset[str],
    numbers: Sequence[float],
) -> tuple[Aim, ...]:
    """Lines whose results are what the reference computes and the kernel does not.

    Args:
        lines: at which they may stand, with weights.
        wanted: 2 where values are the reference's result, 1 where they are on its way.
        words, numbers: operations and numbers that may be in a line.
    """
    tiles: dict[Storage, np.ndarray] = {}
    told: dict[Aim, float] = {}
    known: dict[tuple, tuple[Any, int]] = {}
    near = dict(lines)
    given = {str(one): one for one in numbers}
    for n, name in {n: name for name, n in found.numbers.items()}.items():
        if n > 3:
            given |= {f"1.0 / {name}": 1 / n, f"{name} ** 0.5": n**0.5, f"{name} ** -0.5": n**-0.5}
    for number, instruction, view, result in compare.results(found.program, list(inputs), True):
        storage, line = view.storage, instruction.source.line if instruction.source else 0
        weight = near.pop(line, None)
        if weight is not None:
            names = {found.of(number, one): tile for one, tile in tiles.items()}
            names.pop("", None)
            target = found.of(number, storage) * (view.size == storage.size and storage.on_chip)
            for first, text, plain, operands, value in _made(names, words, given):
                key = (plain, *map(id, operands))
                if key not in known:
                    made = value()
                    known[key] = operands, wanted(made) * (not np.array_equal(made, operands[0]))
                likely = known[key][1]
                size = (len(operands[0]), 1 if "axis" in plain else operands[0].shape[1])
                places = ((target, True), (first, size != operands[0].shape))
                for to, instead in places if likely else ():
                    if to and (not instead or to == target and size == _flat(storage)):
                        aim = Aim(line, instead, text.replace("$", to), f"{to} = {plain}")
                        told[aim] = max(told.get(aim, 0), likely + weight)
        if storage.on_chip and storage.size <= ROOM:
            tile = tiles.get(storage, np.full(storage.size, np.nan)).flatten()
            tile[regions.elements(view, np.ones(view.shape, bool))] = result.double().ravel()
            tiles[storage] = tile.reshape(_flat(storage))
        if not near:
            break
    return tuple(sorted(told, key=lambda one: -told[one])[:MOST])


def _flat(storage: Storage) -> tuple[int, int]:
    return storage.shape[0], storage.size // storage.shape[0]


def _made(
    tiles: dict[str, np.ndarray], words: frozenset[str], numbers: dict[str, float]
) -> Iterator[tuple[str, str, str, tuple, Callable[[], np.ndarray]]]:
    """What one instruction makes of tiles: the first of them, its texts, operands and values."""
    ops = [one for one in BINARY if one in words]
    for name, x in tiles.items():
        for op in sorted(words & ACTIVATIONS.keys()):
            text = f"activation(dst=$, op=nl.{op}, data={name})"
            yield name, text, f"nl.{op}({name})", (x,), partial(_activation, op, x)
        whole = f"({name}, axis=1, keepdims=True)"
        for op in SUMS if x.shape[1] > 1 else ():
            text = f"tensor_reduce(dst=$, op=nl.{op}, data={name}, axis=1)"
            value = partial(BINARY[op].reduce, x, axis=1, keepdims=True)
            yield name, text, f"nl.{SUMS[op]}{whole}", (x,), value
        others: list[tuple[str, str, Any]] = [
            ("subtract", f"nl.{one}{whole}", getattr(np, one)(x, axis=1, keepdims=True))
            for one in ("max", "mean")
            if one in words and x.shape[1] > 1
        ]
        for other, y in tiles.items():
            if other != name and y.shape in (x.shape, (len(x), 1)):
                others += [(op, other, y) for op in ops]
                others += [("divide", f"nl.reciprocal({other})", y)]
        for op, other, y in others + [(op, n, v) for op in ops for n, v in numbers.items()]:
            by = op.replace("divide", "multiply")
            text = f"tensor_scalar(dst=$, data={name}, op0=nl.{by}, operand0={other})"
            if np.shape(y) == x.shape and x.shape[1] > 1:
                text = f"tensor_tensor(dst=$, data1={name}, data2={other}, op=nl.{by})"
            yield name, text, f"nl.{by}({name}, {other})", (x, y), partial(BINARY[op], x, y)


def _activation(op: str, x: np.ndarray) -> np.ndarray:
    return ACTIVATIONS[op](torch.from_numpy(x)).numpy()
