"""What a reference does to its arguments, as calls of `nl` and `nisa`.

A `Value` stands in a reference for a tensor: it has the numbers, and how a kernel makes them. Rows
lie on partitions, as a kernel's author has them; what is read from HBM is loaded where it is used.
"""

import contextlib
import contextvars
import copy
import functools
import math
import operator
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .means import MEANS

PARTITIONS, MOVING = 128, 512
LONG, PIECE = 16384, 2048  # columns of a tile, and of a piece of longer rows
TILE = "{to} = nl.ndarray(%s, dtype=nl.float32, buffer=nl.sbuf)\n"
Keys = list[Any]
# Whether axes before the last two are taken in loops; else the first is that of partitions.
LEADS = contextvars.ContextVar("LEADS", default=False)


class Cannot(Exception):
    """A reference does what is not written here."""


class Axis(NamedTuple):
    """A part of an axis of a tensor in HBM.

    Attributes:
        size, whole: elements of the part and of the axis.
        at, step: where they are.
        loop, block, turns: index of the loop that takes `block` elements each `turns` turns, "" for
            none.
    """

    size: int
    whole: int
    at: int = 0
    step: int = 1
    loop: str = ""
    block: int = 0
    turns: int = 1

    @property
    def single(self) -> bool:
        return bool(self.loop) and self.block == 1

    def text(self) -> str:
        if not self.loop:
            return _slice(self.at, self.size, self.step, self.whole)
        start = self.loop if self.single else f"{self.loop} * {self.block}"
        start += f" // {self.turns}" * (self.turns > 1) + f" + {self.at}" * bool(self.at)
        return start if self.single else f"nl.ds({start}, {self.size})"

    def part(self, key: slice) -> "Axis":
        first, size, step = _steps(key, self.size)
        if self.loop and step * self.step != 1:
            raise Cannot
        return self._replace(size=size, at=self.at + first * self.step, step=step * self.step)


def _steps(key: slice, size: int) -> tuple[int, int, int]:
    """First element, number and step of a slice that does not go backwards."""
    first, last, step = key.indices(size)
    if step < 1:
        raise Cannot
    return first, len(range(first, last, step)), step


def _slice(at: int, size: int, step: int, whole: int) -> str:
    if (at, size) == (0, whole):
        return ":"
    return f"{at}:{at + (size - 1) * step + 1}" + f":{step}" * (step != 1)


class Value:
    """A tensor of the reference.

    Attributes:
        number: its numbers, of the reference's library.
        make: an expression or lines with "{0}" for the parts and "{to}" for what they make.
        parts: values that it takes.
        hint: begins its name; "new" for what changes in place.
        column: whether a tensor of one axis lies over the partitions.
        axes: of a tensor in HBM, else none; `turned`: its last two are exchanged; `casts`: its
            type, where its tiles become float32.
    """

    def __init__(
        self, number: Any, make: str, parts: Sequence["Value"] = (), hint: str = "",
        column: bool = False, axes: tuple[Axis, ...] = (), casts: str = "",
    ) -> None:  # fmt: skip
        self.number, self.make, self.parts, self.hint = number, make, tuple(parts), hint
        self.column, self.axes, self.casts, self.turned = column, axes, casts, False
        self.tile: dict[str, Value] = {}  # same of all that changes in place: what is kept
        self.over, self.loop = "", ("", 1)  # what a turn of a loop adds to it; the loop, its turns
        self.joined: Any = ()  # axis and parts of a concatenation

    # --- what a reference asks ---
    @property
    def T(self) -> "Value":
        return _apply("transpose", lambda x: x.T, (self,), {})

    @property
    def mT(self) -> "Value":
        return self.swapaxes(-1, -2)

    def item(self) -> "Value":
        return _reshape(self.number.reshape(()), self)

    def __len__(self) -> int:
        return len(self.number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not callable(getattr(self.number, name)):
            return getattr(self.number, name)

        def real(number: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(number, name)(*args, **kwargs)

        return lambda *args, **kwargs: _apply(name, real, (self, *args), kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        way = f"_{method}" * (method != "__call__")
        return _apply(ufunc.__name__ + way, getattr(ufunc, method), args, kwargs)

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return _apply(function.__name__, function, args, kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(function.__name__, function, args, kwargs or {})

    def __getitem__(self, key: Any) -> "Value":
        keys = key if isinstance(key, tuple) else (key,)
        counts = [n for n, one in enumerate(keys) if isinstance(getattr(one, "stop", 0), Value)]
        return (
            _zeroed(self, keys, *counts)
            if counts
            else _apply("getitem", operator.getitem, (self, key), {})
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, Value):  # a mask; `_getitem` takes all of what it chooses
            number = np.where(key.number, _number(value), self.number)
            self.__dict__ |= _together("where", number, key, value, copy.copy(self)).__dict__
            return
        old, keys = copy.copy(self), _keys(self, key)
        self.number = copy.deepcopy(self.number)
        self.number[key] = _number(value)
        if self.axes or _cuts(old, keys):
            self.__dict__ |= (
                _stored_at(old, keys, value, old.number[key]).seen(self.number).__dict__
            )
            return
        at = _subscript(self, keys)
        self.parts = (old, on_chip(value)) if isinstance(value, Value) else (old,)
        copies = "tensor_copy" if at.startswith(":") else "dma_copy"  # to any partition
        self.make = f"nisa.{copies}(dst={{0}}[{at}], src={{1}})"
        if not isinstance(value, Value):
            self.make = f"nisa.memset(dst={{0}}[{at}], value={_plain(value)})"

    # --- how a kernel has it ---
    def seen(self, number: Any, **changes: Any) -> "Value":
        """The same with other numbers, of other parts or lying otherwise."""
        made = copy.copy(self)
        if "make" in changes:
            made.over, made.loop = "", ("", 1)
        made.__dict__.update(number=number, **changes)
        return made

    @property
    def lies(self) -> tuple[int, ...]:
        """Its shape on chip, where it is a block of what has many rows or long ones."""
        return _whole(self.number, self.column) if self.axes else _lies(self.number, self.column)

    @property
    def turns(self) -> dict[str, int]:
        """Loops of which each turn has a block of it, and their turns."""
        whole, lies = _whole(self.number, self.column), self.lies
        loops = {loop: size for loop, size in zip(_loops(self), _shape(self)) if size > 1}
        both = {"i_row": whole[0] // lies[0], "i_column": whole[-1] // lies[-1]}
        return {n: both.get(n, size) for n, size in loops.items() if n and both.get(n, size) > 1}


def _shape(value: Value) -> tuple[int, ...]:
    return (*value.number.shape, *[1] * value.column)


def _loops(value: Value) -> list[str]:
    """For each axis the loop in which it is taken where it does not lie on chip whole."""
    size = len(_shape(value))
    last, leads = ["i_row", "i_column"][-size:], max(0, size - 2)
    if LEADS.get() or not leads:
        return [*(f"i_{n}" for n in reversed(range(leads))), *last]
    first = next((n for n, one in enumerate(_shape(value)[:-2]) if one > 1), leads)
    loops = [""] * size
    loops[first], loops[-1] = "i_row", "i_column" * (first >= leads)
    return loops


def _whole(number: Any, column: bool = False) -> tuple[int, ...]:
    shape = (*number.shape, *[1] * column)
    if len(shape) < 2:
        return 1, math.prod(shape)
    while len(shape) > 2 and (shape[0] == 1 or LEADS.get()):
        shape = shape[1:]
    return shape


def divisor(size: int, most: int) -> int:
    """The largest that is at most `most`."""
    return max(one for one in range(1, min(size, most) + 1) if size % one == 0)


def _lies(number: Any, column: bool = False) -> tuple[int, ...]:
    """The shape of a tensor on chip: of many rows or long ones that of a block."""
    rows, *free = _whole(number, column)
    rows = divisor(rows, PARTITIONS)
    if len(free) == 1 and free[0] > LONG:
        free = [divisor(free[0], PIECE)]
    return rows, *free


def _operator(name: str) -> None:
    real = getattr(operator, f"__{name}__")

    def own(self: Any, *other: Any) -> Any:
        return _apply(name, real, (self, *other), {})

    def turned(self: Any, other: Any) -> Any:
        return _apply(name, real, (other, self), {})

    setattr(Value, f"__{name}__", own)
    setattr(Value, f"__r{name}__", turned)


_OWN = "add sub mul truediv floordiv mod pow matmul lshift rshift"
for _name in f"{_OWN} and or xor invert abs neg gt ge lt le eq ne".split():
    _operator(_name)
Value.__hash__ = object.__hash__  # type: ignore[method-assign]


def _number(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_number, value))
    return value.number if isinstance(value, Value) else value


def _first(number: Any) -> Any:
    return number[0] if isinstance(number, (tuple, list)) else number


def _like(x: Any, other: Any) -> Any:
    return x.astype(other.dtype) if isinstance(other.number, np.ndarray) else x.to(other.dtype)


def _apply(name: str, real: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function of the library does to values: numbers by itself, the text by `DOES`."""
    name = NAMES.get(name.strip("_"), name.strip("_"))
    if name in MEANS and name not in DOES:
        kwargs = {k: v for k, v in kwargs.items() if k not in SILENT and v is not None}
        library = torch if isinstance(_number(args[0]), torch.Tensor) else np
        helpers = {
            "torch": library,
            "reduce": functools.reduce,
            "one": _first,
            "like": _like,
            "prod": math.prod,
            "Best": Best,
        }
        return eval(MEANS[name], helpers)(*args, **kwargs)
    args = [copy.copy(one) if isinstance(one, Value) else one for one in args]  # as it is now
    number = real(*map(_number, args), **{k: _number(v) for k, v in kwargs.items()})
    if not np.ndim(number) and not isinstance(number, (np.generic, torch.Tensor)):
        return number  # such as a size
    if name in ELEMENTWISE:
        return _together(name, number, *args)
    made = DOES[name](number, *args, **kwargs)
    if isinstance(made, Value):
        made.hint = made.hint or name
    return made


# --- places ---------------------------------------------------------------------------------------
def on_chip(value: Value, rows: int = 0) -> Value:
    """A value on chip; of one row, on `rows` partitions."""
    spread = rows > 1 and value.lies[0] == 1
    if value.axes:
        return _loaded(value, rows if spread else 0)
    if not spread:
        return value
    return value.seen(
        value.number, make=f"nl.broadcast_to({{0}}, {(rows, *value.lies[1:])})", parts=(value,)
    )


def _loaded(value: Value, rows: int = 0) -> Value:
    lies, source = _lies(value.number, value.column), in_hbm(value)
    text = f"nl.load({source}{f'.broadcast(0, {rows})' * bool(rows)})"
    if value.turned and 1 not in lies:
        long = lies[1] > PARTITIONS
        text = f"nl.load_transpose2d({source})" if long else f"nl.copy(nl.transpose({text}))"
    if value.casts:
        text = f"nl.copy({text}, dtype=nl.float32)"
    return Value(value.number, text, value.parts, value.hint, value.column)


def _block(value: Value, without: Sequence[str] = ()) -> tuple[Axis, ...]:
    """The axes of a tensor in HBM, of which many rows or long ones lie on chip in blocks."""
    axes, shape = [*value.axes], _shape(value)
    lies = _lies(value.number, value.column)
    live = [n for n, one in enumerate(axes) if one.size > 1 or one.single]
    wide = [n for n, size in enumerate(shape) if size > 1]
    if value.turned:
        live[-2:] = live[:-3:-1]
    for at, (loop, size) in enumerate(zip(_loops(value), shape)):
        block = {"i_row": lies[0], "i_column": lies[-1]}.get(loop, 1 if loop else size)
        if size == block or loop in without:
            continue
        if len(live) != len(wide):
            raise Cannot
        axis = axes[live[wide.index(at)]]
        if axis.loop == loop:
            continue
        if axis.loop or axis.step != 1 or axis.size != size:
            raise Cannot
        axes[live[wide.index(at)]] = axis._replace(size=block, loop=loop, block=block)
    return tuple(axes)


def stored(x: Value) -> Value:
    """A tile, or blocks of one, kept in HBM, from where it is read in other parts."""
    if x.axes:
        return x
    if x.make not in x.tile:
        name, axes = f"kept{id(x)}_hbm", tuple(Axis(n, n) for n in x.number.shape)
        to = Value(x.number, name, (), "kept", x.column, axes)
        shape = tuple(x.number.shape)
        text = f"{name} = nl.ndarray({shape}, dtype=nl.float32, buffer=nl.hbm)"
        stage = Value(x.number, text, (to, x), "stage")
        x.tile[x.make] = to.seen(x.number, parts=(stage,), column=False)
    return x.tile[x.make].seen(x.number, column=x.column)


def _stored_at(x: Value, keys: Keys, value: Any, number: Any) -> Value:
    """A tensor that is kept in HBM, after a part of it is stored."""
    x = stored(x)
    axes = _parted(x, keys)
    to = Value(number, x.make, axes=axes)
    if isinstance(value, Value):
        tile = on_chip(_repeated(number, value) if value.lies != to.lies else value)
    else:
        tile = Value(number, _full(_lies(number), value), (), "full")
    return x.seen(number, parts=(Value(number, "", (to, tile, *x.parts), "stage"),))


def in_hbm(value: Value) -> str:
    """The part of a tensor in HBM, in the shape that it has on chip; turned, before it is."""
    axes = _block(value)
    texts = [one.text() for one in axes]
    text = value.make + f"[{', '.join(texts)}]" * ({*texts} != {":"})
    wanted = _lies(value.number, value.column)[:: -1 if value.turned else 1]
    has = tuple(one.size for one in axes if not one.single)
    return text if has == wanted else f"{text}.reshape({wanted})"


def _keys(x: Value, key: Any) -> Keys:
    """One slice or whole number for each axis of a value, and None for new ones."""
    keys = [*key] if isinstance(key, tuple) else [key]
    missing = x.number.ndim - sum(one is not None and one is not Ellipsis for one in keys)
    at = next((n for n, one in enumerate(keys) if one is Ellipsis), len(keys))
    return [*keys[:at], *[slice(None)] * missing, *keys[at + 1 :]]


def _slices(keys: Keys) -> list[slice]:
    return [one if isinstance(one, slice) else slice(one, one + 1 or None) for one in keys
            if one is not None]  # fmt: skip


def _cuts(x: Value, keys: Keys) -> bool:
    """Whether a subscript takes a part of what a tile has a block of."""
    return not x.axes and any(
        loop in x.turns and one not in (slice(None), slice(0, size), slice(0, size, 1))
        for loop, one, size in zip(_loops(x), _slices(keys), x.number.shape)
    )


def _parted(x: Value, keys: Keys) -> tuple[Axis, ...]:
    """The axes of a part of a tensor in HBM, which may have other axes of one element."""
    axes, slices, shape = [*x.axes], _slices(keys), x.number.shape
    live = [n for n, one in enumerate(axes) if one.size > 1]
    wide = [n for n, size in enumerate(shape) if size > 1]
    if len(axes) == len(shape):
        live = wide = [*range(len(shape))]
    if x.turned:
        live = [*live[:-2], *live[:-3:-1]]
    if len(live) != len(wide):
        raise Cannot
    for at, of in zip(live, wide):
        axes[at] = axes[at].part(slices[of])
    return tuple(axes)


def _subscript(x: Value, keys: Keys) -> str:
    """A subscript of a tile: of leading axes that do not lie on chip nothing stands."""
    slices = _slices(keys)
    if x.number.ndim == 1:
        slices.insert(int(x.column), slice(None))
    pairs = zip(x.lies, slices[len(slices) - len(x.lies) :])
    return ", ".join(_slice(*_steps(one, size), size) for size, one in pairs)


# --- elementwise ----------------------------------------------------------------------------------
Does = Callable[..., Any]
SILENT = ("inplace", "_stacklevel", "dtype")  # arguments that change no numbers here
DOES: dict[str, Does] = {}
ELEMENTWISE = frozenset({
    "abs", "add", "arctan", "ceil", "cos", "equal", "erf", "exp", "floor", "greater",
    "greater_equal", "less", "less_equal", "log", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "mish", "multiply", "negative", "not_equal", "reciprocal",
    "relu", "rsqrt", "sigmoid", "sign", "sin", "softplus", "sqrt", "square", "subtract", "tanh",
    "trunc",
})  # fmt: skip
NAMES = {
    other: name
    for name, others in {
        "abs": "absolute fabs", "arctan": "atan",
        "bitwise_and": "and", "bitwise_not": "invert", "bitwise_or": "or", "bitwise_xor": "xor",
        "concatenate": "cat hstack concat", "clip": "clamp",
        "divide": "div truediv true_divide", "equal": "eq", "filled":
        "zeros_like empty_like ones_like full_like", "greater": "gt", "greater_equal": "ge",
        "floor_divide": "floordiv", "left_shift": "lshift bitwise_left_shift",
        "less": "lt", "less_equal": "le", "matmul": "bmm mm dot", "max": "amax", "min": "amin",
        "multiply": "mul", "negative": "neg", "not_equal": "ne", "power": "pow float_power",
        "remainder": "mod", "right_shift": "rshift bitwise_right_shift", "reshape":
        "view unsqueeze expand_dims squeeze ravel flatten", "round": "rint", "same":
        "astype float double to copy clone contiguous asarray array "
        "ascontiguousarray detach long int numpy cpu item",
        "subtract": "sub", "transpose": "permute t swapaxes", "trunc": "fix",
    }.items()
    for other in others.split()
}  # fmt: skip


def does(*names: str) -> Callable[[Does], Does]:
    """A function for operations of these names, which takes their numbers and arguments."""

    def kept(function: Does) -> Does:
        DOES.update(dict.fromkeys(names, function))
        return function

    return kept


def _together(name: str, number: Any, *args: Any) -> Value:
    """A function of `nl` of operands that are brought to one shape."""
    first = args[0]
    if name == "negative" and first.make == "nl.negative({0})":
        return first.parts[0].seen(number)
    same = {"add": 0.0, "multiply": 1.0}.get(name)
    if same in [one for one in args if isinstance(one, (int, float))]:
        (kept,) = (one for one in args if isinstance(one, Value))
        if kept.shape == number.shape:
            return kept.seen(number)
    column = any(
        isinstance(one, Value) and one.column and one.number.ndim == number.ndim for one in args
    )
    lies, parts, texts = _lies(number, column), list[Value](), list[str]()
    for one in args:
        if not isinstance(one, Value) and math.prod(np.shape(one)) > 1:
            one = _constant(np.asarray(one))
        if not isinstance(one, Value):
            texts.append(_plain(one))
            continue
        parts.append(on_chip(_laid(one, column and number.ndim < 2), lies[0]))
        text = f"{{{len(parts) - 1}}}"
        has = lies[0], *parts[-1].lies[1:]
        alike = has == lies or len(args) < 3 and has == (lies[0], 1)
        texts.append(text if alike else f"nl.broadcast_to({text}, {lies})")
    return Value(number, f"nl.{name}({', '.join(texts)})", parts, name, column)


def _laid(x: Value, column: bool) -> Value:
    """A tensor of one axis over the partitions, or along a row."""
    if x.number.ndim != 1 or x.column == column or x.number.shape == (1,):
        return x
    turned = x if x.axes else _swapped(x.seen(x.number.reshape(_whole(x.number, x.column))))
    return turned.seen(x.number, column=column)


def _plain(number: Any) -> str:
    """A number, one that every type holds in place of infinity."""
    value = float(number)
    return repr(math.copysign(3e38, value) if math.isinf(value) else value)


def _full(lies: tuple[int, ...], value: float) -> str:
    return f"nl.full({lies}, {_plain(value)}, dtype=nl.float32, buffer=nl.sbuf)"


def _constant(array: np.ndarray) -> Value:
    """Numbers that the reference makes itself: two, apart at diagonals, or a ramp."""
    flat, *others = array.reshape(-1, *_whole(array)).astype(np.float64)
    lies, leads = _lies(array), [n for n, size in enumerate(array.shape[:-2]) if size > 1]
    if others:
        where = np.unravel_index(np.abs(flat).argmax(), flat.shape)
        scales = [float(one[where] / flat[where]) for one in (flat, *others)]
        if len(leads) != 1 or not np.allclose(np.multiply.outer(scales, flat), [flat, *others]):
            raise Cannot
        loop = f"i_{array.ndim - 3 - leads[0]}"
        return Value(array, f"nl.multiply({{0}}, {scales}[{loop}])", (_constant(flat),), "scaled")
    both = np.unique(flat)
    if len(both) == 1:
        return Value(array, _full(lies, both[0]), (), "full")
    for one, other in (both, both[::-1]) if len(both) == 2 else ():
        with contextlib.suppress(Cannot):
            return _masked(array, Value(flat, _full(lies, one), (), "full"), flat == one, other)
    rows, columns = flat.shape
    at, down = flat[0, 0], flat[min(1, rows - 1), 0] - flat[0, 0]
    right = flat[0, min(1, columns - 1)] - at
    unit = min(abs(one) for one in (down, right) if one) if down or right else 1.0
    unit = 1.0 if np.array_equal(flat, flat.round()) else unit
    at, down, right = (round(one / unit) for one in (at, down, right))
    if not np.allclose(
        flat, unit * (at + np.add.outer(down * np.arange(rows), right * np.arange(columns)))
    ):
        raise Cannot
    text = f"{{to}} = nl.ndarray({lies}, dtype=nl.int32, buffer=nl.sbuf)\n"
    offset = _offset(at, flat.shape, lies, down, right)
    text += f"nisa.iota(dst={{to}}, pattern=[[{right}, {lies[1]}]], offset={offset}, "
    ramp = Value(flat, f"{text}channel_multiplier={down})", (), "iota")
    ramp = Value(array, "nl.copy({0}, dtype=nl.float32)", (ramp,), "ramp")
    return ramp if unit == 1.0 else _together("multiply", array, ramp, unit)


def _offset(at: int, whole: tuple[int, ...], lies: tuple[int, ...], down: int, right: int) -> str:
    """What a ramp begins with in the block of a turn."""
    text = f"{at}"
    steps = ("i_row", whole[0], lies[0], down), ("i_column", whole[1], lies[1], right)
    for loop, all_, block, step in steps:
        text += f" + {loop} * {step * block}" * (step != 0 and all_ > block)
    return text.removeprefix("0 + ").replace("+ -", "- ")


def _masked(number: Any, kept: Value, mask: np.ndarray, other: float) -> Value:
    """A value where a mask is true, which is so between two diagonals, a number elsewhere."""
    lies, whole = _lies(number), _whole(number)
    mask, *others = np.broadcast_to(mask, number.shape).reshape(-1, *whole).astype(bool)
    if not all(np.array_equal(mask, one) for one in others):
        raise Cannot
    rows, columns = np.indices(whole)
    apart = rows - columns
    least, most = (f(apart[mask], initial=0) for f in (np.min, np.max))
    least, most = (apart[mask].min(), apart[mask].max()) if mask.any() else (least, most)
    if not np.array_equal(mask, (least <= apart) & (apart <= most)):
        raise Cannot
    made = on_chip(kept, lies[0])
    for across, offset, needed in (
        (-1, -least, least > apart.min()),
        (1, most, most < apart.max()),
    ):
        offset = _offset(offset, whole, lies, -across, across)
        text = f"nisa.affine_select(dst={{to}}, pattern=[[{across}, {lies[1]}]], offset={offset}, "
        text += f"channel_multiplier={-across}, on_true_tile={{0}}, "
        text += f"on_false_value={_plain(other)}, cmp_op=nl.greater_equal)"
        made = Value(number, TILE % (lies,) + text, (made,), "masked") if needed else made
    return made


def _zeroed(x: Value, keys: tuple[Any, ...], at: int) -> Value:
    """A slice up to a number that is data: zeros behind it, of which sums are the same."""
    if keys[at].start or keys[at].step:
        raise Cannot
    whole = x[(*keys[:at], slice(None), *keys[at + 1 :])]
    size = whole.shape[at]
    places = np.arange(size).reshape([size if n == at else 1 for n in range(whole.ndim)])
    taken = places < int(keys[at].stop.number)
    before = _together("less", taken, _constant(places), keys[at].stop)
    return _together("where", whole.number, before, whole, 0.0)


@does("where")
def _where(number: Any, condition: Any, true: Any, false: Any) -> Value:
    if isinstance(condition, Value):
        return _together("where", number, condition, true, false)
    mask = np.asarray(condition).astype(bool)
    kept, other = (true, false) if isinstance(true, Value) else (false, true)
    return _masked(number, kept, mask if kept is true else ~mask, other)


@does("divide")
def _divide(number: Any, a: Any, b: Any, rounding_mode: str = "") -> Value:
    """No engine divides tiles: a product with the reciprocal, which a root has of its own."""
    if rounding_mode == "floor":
        return _floor_divide(number, a, b)
    if rounding_mode:
        return _together(rounding_mode, number, _divide(number, a, b))
    if not isinstance(b, Value):
        return _together("multiply", number, a, 1.0 / b)
    root = b.make.startswith("nl.sqrt(")
    inverse = _together("rsqrt" if root else "reciprocal", b.number, *(b.parts if root else (b,)))
    inverse.column = b.column
    return (
        inverse
        if not isinstance(a, Value) and a == 1
        else _together("multiply", number, a, inverse)
    )


@does("power")
def _power(number: Any, base: Any, exponent: Any) -> Value:
    known = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if not isinstance(base, Value):
        return _together("exp", number, _together("multiply", number, exponent, math.log(base)))
    if exponent in known:
        return _together(known[exponent], number, base)
    if exponent in range(3, 9):
        made = _together("square", number, base if exponent < 4 else base ** (exponent // 2))
        return _together("multiply", number, made, base) if exponent % 2 else made
    grown = _together("multiply", number, _together("log", base.number, base), exponent)
    return _together("exp", number, grown)


def _bits(name: str, number: Any, *args: Any) -> Value:
    """Of whole numbers, in tiles of them; of truths, logic."""
    if str(number.dtype).endswith("bool"):
        return _together(name.replace("bitwise", "logical"), number, *args)
    parts, texts = list[Value](), list[str]()
    for one in args:
        if not isinstance(one, Value):
            texts.append(str(int(one)))
            continue
        whole = bool(one.axes) and str(one.dtype).endswith("int32")
        tile = on_chip(one.seen(one.number, casts="" if whole else one.casts))
        text = f"{{{len(parts)}}}"
        parts.append(tile)
        texts.append(text if whole else f"nl.copy({text}, dtype=nl.int32)")
    operation = name.replace("bitwise_not", "invert")
    text = f"nl.copy(nl.{operation}({', '.join(texts)}), dtype=nl.float32)"
    return Value(number, text, parts, "bits")


_OWN = "bitwise_and bitwise_or bitwise_xor bitwise_not left_shift right_shift"
for _name in _OWN.split():
    DOES[_name] = functools.partial(_bits, _name)


@does("floor_divide")
def _floor_divide(number: Any, a: Value, b: Any) -> Value:
    if "int" in str(number.dtype):  # between whole numbers, as the product is rounded
        a = _together("add", a.number, a, 0.5)
    return _together("floor", number, _divide(number, a, b))


@does("clip")
def _clip(number: Any, x: Value, low: Any = None, high: Any = None, **named: Any) -> Value:
    both = ("maximum", named.get("min", low)), ("minimum", named.get("max", high))
    for function, limit in both:
        x = x if limit is None else _together(function, number, x, limit)
    return x


@does("round")
def _round(number: Any, x: Value, *_: Any, **__: Any) -> Value:
    """To the nearest whole number: float32 has no fractions at that size."""
    return _together("subtract", number, _together("add", number, x, 1.5 * 2**23), 1.5 * 2**23)


DOES["same"] = lambda number, x, *_, **__: x.seen(number)
DOES["bool"] = lambda number, x: _together("not_equal", number, x, 0.0)


# --- reductions -----------------------------------------------------------------------------------
Best = namedtuple("Best", "values indices")  # what PyTorch's max of an axis gives


def _axis(args: Sequence[Any], named: dict[str, Any]) -> Any:
    return named.get("axis", named.get("dim", args[0] if args else None))


REDUCES = {"sum": ("add", 0.0), "max": ("maximum", -math.inf), "min": ("minimum", math.inf)}


def _reduced(name: str, number: Any, x: Value, *args: Any, **named: Any) -> Any:
    if isinstance(number, tuple):
        return Best(_reduced(name, number[0], x, *args, **named), _argmax(number[1], x))
    if args and isinstance(args[0], Value):  # torch.max of two
        return _together(REDUCES[name][0], number, x, *args)
    given = _axis(args, named)
    every = (
        given if isinstance(given, (tuple, list)) else range(x.ndim) if given is None else [given]
    )
    lies = _whole(x.number, x.column)
    axes = sorted({len(lies) - x.ndim + one % x.ndim for one in every}, reverse=True)
    if x.ndim == 1:
        x, axes = x.seen(x.number.reshape(lies), column=False), [int(not x.column)]
    if len(lies) > 2:
        axes = [one for one in axes if one >= 0]
        return _over_first(name, number, x) if axes == [0] else _over_free(name, number, x, axes)
    for axis in axes:
        if axis < 0:
            x = _over_lead(name, x, axis - 2)
        else:
            x = (_over_columns if axis else _over_rows)(name, x)
    if 1 < number.ndim < x.number.ndim and axes != [1]:
        return _reshape(number, stored(x))
    return x.seen(number, column=number.ndim < x.number.ndim and axes == [1] and lies[0] > 1)


def _over_lead(name: str, x: Value, axis: int) -> Value:
    if x.number.shape[axis] == 1:
        return x
    x = on_chip(x)
    one = [slice(None)] * x.number.ndim
    one[axis] = slice(1)
    part = x.seen(x.number[tuple(one)])
    return _over_turns(name, f"i_{-3 - axis}", x, part)


def _over_columns(name: str, x: Value) -> Value:
    x = on_chip(x)
    text = f"nl.{name}({{0}}, axis=1, keepdims=True)"
    return _over_turns(name, "i_column", x, Value(x.number[..., :1], text, (x,), name))


def _over_turns(name: str, loop: str, x: Value, part: Value) -> Value:
    """A reduction of what each turn of a loop has of it."""
    if loop not in x.turns:
        return part
    function, start = REDUCES[name]
    made = Value(part.number, f"{{to}} = {_full(part.lies, start)}", (part,), name)
    made.over = f"nisa.tensor_tensor(dst={{to}}, data1={{to}}, data2={{0}}, op=nl.{function})"
    made.loop = loop, x.turns[loop]
    return made


for _name in REDUCES:
    DOES[_name] = functools.partial(_reduced, _name)


def _over_first(name: str, number: Any, x: Value) -> Value:
    """A reduction of the first axis of a tensor in HBM, a part after the other."""
    function, start = REDUCES[name]
    one = x.seen(
        x.number[:1], axes=(x.axes[0]._replace(size=1, loop="i_part", block=1), *x.axes[1:])
    )
    lines = f"{{to}} = {_full(one.lies, start)}\nfor i_part in range({x.lies[0]}):\n"
    lines += f"    nisa.tensor_tensor(dst={{to}}, data1={{to}}, data2={_loaded(one).make}, "
    return Value(number, f"{lines}op=nl.{function})", (), name)


def _over_free(name: str, number: Any, x: Value, axes: list[int]) -> Value:
    """A reduction of several free axes, which are turned to the end."""
    lies = x.lies
    kept = [one for one in range(len(lies)) if one not in axes]
    order, shape = (*kept, *sorted(axes)), tuple(lies[one] for one in kept)
    shape = shape if shape[1:] else (*shape, 1)
    turn = f".permute({order})" * (order != tuple(range(len(lies))))
    lines = TILE % (shape,) + f"nisa.tensor_reduce(dst={{to}}, op=nl.{REDUCES[name][0]}, data={{0}}"
    lines += f"{turn}, axis={tuple(range(len(kept), len(lies)))})"
    made = Value(number, lines, (on_chip(x),), name, number.ndim == 1)
    same = made.lies == shape
    return made if same else Value(number, f"{{0}}.reshape({made.lies})", (made,), name)


def _over_rows(name: str, x: Value) -> Value:
    """One row of a reduction over partitions: a product with ones, or of the turned tile."""
    if name != "sum":
        return _swapped(_over_columns(name, _swapped(x)))
    x = on_chip(x)
    row = Value(x.number[..., :1, :], _ones_by(x), (x,), "sum")
    return _over_turns(name, "i_row", x, row)


def _ones_by(x: Value) -> str:
    """The product of a row of ones and a tile."""
    ones = f"nl.ones(({x.lies[0]}, 1), dtype=nl.float32, buffer=nl.sbuf)"
    size, columns = x.lies[1], divisor(x.lies[1], MOVING)
    if size == columns:
        return f"nl.copy(nl.matmul({ones}, {{0}}, transpose_x=True))"
    at = f"[:, nl.ds(i_n * {columns}, {columns})]"
    return _multiplied(ones, "{0}" + at, 1, size, 1)


@does("norm")
def _norm(number: Any, x: Value, *_: Any, **named: Any) -> Value:
    total = _reduced("sum", number, _together("square", x.number, x), **named)
    return _together("sqrt", number, total)


@does("chunk", "split")
def _parts(number: Sequence[Any], x: Value, *_: Any, **__: Any) -> list[Value]:
    """Parts along the axis on which they are shorter."""
    shorter = (n for n, size in enumerate(x.shape) if size != number[0].shape[n])
    at = next(shorter, 0)
    sizes, all_ = [one.shape[at] for one in number], (slice(None),) * at
    ends = np.cumsum(sizes).tolist()
    return [x[(*all_, slice(end - size, end))] for end, size in zip(ends, sizes)]


# --- products, turns and parts --------------------------------------------------------------------
def _swapped(x: Value) -> Value:
    """With the last two axes exchanged; in HBM it is read so later."""
    number = x.number.swapaxes(-1, -2)
    whole = _whole(x.number, x.column)
    if not x.axes and max(whole) > PARTITIONS:
        x = stored(x)
    if x.axes:
        return x.seen(number, turned=x.turned if 1 in whole else not x.turned)
    return Value(number, "nl.copy(nl.transpose({0}))", (x,), f"{x.hint}T")


@does("transpose")
def _transpose(number: Any, x: Value, *args: Any) -> Value:
    size = x.number.ndim
    order = args[0] if len(args) == 1 else args
    if len(order or ()) != size or not args:
        order = [*range(size)]
        one, other = args or (0, -1)
        order[one], order[other] = order[other], order[one]
        order = order if args else range(size)[::-1]
    order = [one % size for one in order]
    if not LEADS.get() and _whole(number) == _whole(x.number, x.column)[::-1]:
        return _swapped(x).seen(number)
    return _permuted(number, x, order)


def _permuted(number: Any, x: Value, order: Sequence[int]) -> Value:
    """With other axes first; in HBM it is read so later."""
    last = [*range(len(order))]
    if [*order] == last:
        return x
    if [*order] == [*last[:-2], last[-1], last[-2]]:
        return _swapped(x)
    x = stored(x)
    if len(x.axes) != len(order) and not any(one.loop for one in x.axes):
        shape = tuple(x.number.shape)
        text = f"{x.make}[{', '.join(one.text() for one in x.axes)}].reshape({shape})"
        x = x.seen(x.number, make=text, axes=tuple(Axis(n, n) for n in shape))
    if x.turned or len(x.axes) != len(order):
        raise Cannot
    axes = tuple(x.axes[one] for one in order)
    return x.seen(number, make=f"{x.make}.permute({tuple(order)})", axes=axes)


HALVES = "torch.bfloat16", "torch.float16"


@does("matmul")
def _product(number: Any, a: Value, b: Value) -> Value:
    """(M, K) @ (K, N) with K on partitions, in parts of at most 128."""
    a, b = (one if isinstance(one, Value) else _constant(np.asarray(one)) for one in (a, b))
    if a.number.ndim < 2:
        made = _product(number[None], _reshape(a.number[None], a), b)
        return _reshape(number, made)
    if b.number.ndim < 2:
        made = _product(number[..., None], a, _reshape(b.number[:, None], b))
        return _reshape(number, made)
    if a.axes and b.axes and a.casts == b.casts in HALVES:  # TensorE's products are exact
        a, b = (one.seen(one.number, casts="") for one in (a, b))
    (_, k), (m, n) = _whole(a.number), _lies(number)
    part = divisor(k, PARTITIONS)
    turned = a
    if a.axes:
        turned = _swapped(a.seen(a.number[..., :m, :], axes=_block(a, ["i_column"])))
    if part == k and n <= MOVING:
        left = on_chip(turned if a.axes else _turned_block(a))
        text = "nl.copy(nl.matmul({0}, {1}, transpose_x=True))"
        return Value(number, text, (left, on_chip(b)), "product")
    parts, at = [*a.parts] if a.axes else [a], f"[:, nl.ds(i_part * {part}, {part})]"
    left_text = (
        _chunk(turned, part, m) if a.axes else f"nl.copy(nl.transpose({{0}}{at * (part < k)}))"
    )
    b = stored(b) if part < k or b.turns else b
    parts += b.parts if b.axes else [b]
    columns = divisor(n, MOVING)
    at = f"[:, nl.ds(i_n * {columns}, {columns})]" * (columns < n)
    right = _chunk(b, part, columns, n) if b.axes else f"{{{len(parts) - 1}}}{at}"
    return Value(number, _multiplied(left_text, right, m, n, k // part), parts, "product")


def _turned_block(x: Value) -> Value:
    return Value(x.number.swapaxes(-1, -2), "nl.copy(nl.transpose({0}))", (x,), f"{x.hint}T")


def _multiplied(left: str, right: str, m: int, n: int, parts: int) -> str:
    """Lines that make a product (m, n), of which a bank of PSUM holds 512 columns."""
    columns, inner, wide = divisor(n, MOVING), "", ""
    if columns < n:
        wide = f"{{to}} = nl.ndarray(({m}, {n}), dtype=nl.float32, buffer=nl.sbuf)\n"
        wide, inner = wide + f"for i_n in range({n // columns}):\n    ", "    "
    lines = f"{wide}total_psum = nl.ndarray(({m}, {columns}), dtype=nl.float32, buffer=nl.psum)\n"
    if parts > 1:
        lines += f"{inner}for i_part in range({parts}):\n"
    deeper = inner + "    " * (parts > 1)
    lines += f"{deeper}stationary_sb = {left}\n{deeper}moving_sb = {right}\n{deeper}"
    lines += "nisa.nc_matmul(dst=total_psum, stationary=stationary_sb, moving=moving_sb)\n"
    at = f"nl.ds(i_n * {columns}, {columns})"
    copies = f"{inner}nisa.tensor_copy(dst={{to}}[:, {at}], src=total_psum)"
    return lines + (copies if wide else "{to} = nl.copy(total_psum)")


@does("einsum")
def _einsum(number: Any, form: str, a: Value, b: Value, *more: Value) -> Value:
    takes, makes = form.replace(" ", "").split("->")
    if more:
        return _einsum_of_several(takes.split(","), makes, [a, b, *more])
    left, right = takes.split(",")
    over = "".join(sorted({*left, *right} - {*makes}))
    if len(over) == 1 and over in left and {*left} < {*right}:  # a row of each batch
        made = _einsum(number[..., None], f"{left}<,{right}->{makes}<", _with_axis(a), b)
        return _reshape(number, made)
    if len(over) == 1 and over in right and {*right} < {*left}:
        made = _einsum(number[..., None], f"{left},{right}>->{makes}>", a, _with_axis(b))
        return _reshape(number, made)
    if len(over) != 1 or not {*left} - {*right} or not {*right} - {*left}:
        return _spread(number, [*makes, *over], over, (left, a), (right, b))
    rows, columns = ([n for n in makes if n in one and n not in other][-1]
                     for one, other in ((left, right), (right, left)))  # fmt: skip
    leads = [one for one in makes if one not in (rows, columns)]
    a, b = (
        _permuted(_axes_in(x.number, order), x, order)
        for x, order in (
            (a, [left.index(one) for one in (*leads, rows, over) if one in left]),
            (b, [right.index(one) for one in (*leads, over, columns) if one in right]),
        )
    )
    made = [*leads, rows, columns]
    order = [made.index(one) for one in makes]
    back = [order.index(one) for one in range(len(order))]
    return _permuted(number, _product(_axes_in(number, back), a, b), order)


def _einsum_of_several(takes: list[str], makes: str, some: list[Value]) -> Value:
    """Two at a time, in the order that takes the least work."""
    order = np.einsum_path(f"{','.join(takes)}->{makes}", *(np.asarray(x.number) for x in some))
    for pair in order[0][1:]:
        parts = [(takes.pop(at), some.pop(at)) for at in sorted(pair, reverse=True)]
        (left, a), (right, b) = parts
        kept = dict.fromkeys("".join([*takes, makes]))
        made = (
            "".join(one for one in dict.fromkeys(left + right) if one in kept) if takes else makes
        )
        form = f"{left},{right}->{made}"
        einsum = np.einsum if isinstance(a.number, np.ndarray) else torch.einsum
        takes.append(made)
        some.append(_einsum(einsum(form, a.number, b.number), form, a, b))
    return some[0]


def _with_axis(x: Value) -> Value:
    return _reshape(x.number[..., None], x)


def _spread(number: Any, letters: list[str], over: str, *some: tuple[str, Value]) -> Value:
    """The sum of a product of elements, each tensor with all axes."""
    a, b = (
        _permuted(_axes_in(x.number, order), x, order).reshape(
            tuple(x.shape[has.index(one)] if one in has else 1 for one in letters)
        )
        for has, x in some
        for order in [[has.index(one) for one in letters if one in has]]
    )
    made = a * b
    return made.sum(tuple(range(-len(over), 0))) if over else made


def _axes_in(number: Any, order: Sequence[int]) -> Any:
    return np.transpose(number, order) if isinstance(number, np.ndarray) else number.permute(*order)


def _chunk(x: Value, size: int, columns: int, of: int = 0) -> str:
    """The part of an operand in HBM that a turn takes, with its first axis on partitions.

    Args:
        of: columns of the result's block, 0 where all of the operand's are taken.
    """
    number, axes = x.number.reshape(-1, *_whole(x.number))[0], [*_block(x, ["i_row", "i_column"])]
    at, other = (-1, -2) if x.turned else (-2, -1)
    across = "i_n" if of > columns else ""
    if of and of < number.shape[1]:
        across = f"(i_column * {of // columns} + i_n)" if across else "i_column"
    for axis, part, loop, all_ in (
        (at, size, "i_part", number.shape[0]),
        (other, columns, across, number.shape[1]),
    ):
        if part < all_:
            if axes[axis].loop or axes[axis].step != 1 or not loop:
                raise Cannot
            axes[axis] = axes[axis]._replace(size=part, loop=loop, block=part)
    return _loaded(x.seen(number[:size, :columns], axes=tuple(axes))).make


@does("getitem")
def _getitem(number: Any, x: Value, key: Any) -> Value:
    if isinstance(key, Value) and key.shape == x.shape:
        return x.seen(x.number)
    keys = _keys(x, key)
    backwards = [isinstance(one, slice) and (one.step or 1) < 0 for one in keys]
    if isinstance(x, Ordered):
        ranks = np.atleast_1d(x.ranks[keys[-1]])
        if backwards[-1]:
            return x.seen(number, ranks=ranks)
        return x.taken(number, ranks)
    if sum(backwards) == 1 and all(one == slice(None) for one in keys if one.step is None):
        return _flipped(number, x, backwards.index(True))
    if x.joined and isinstance(keys[x.joined[0]], slice):
        return _concatenate(number, _cut_of(x.joined[0], x.joined[1], keys), x.joined[0])
    if isinstance(keys[0], Value):
        return _gathered(number, x, keys[0])
    if isinstance(keys[-1], Value) and np.array_equal(keys[0], range(len(x))):
        return _picked(number, x, keys[-1])
    if None in keys and all(one in (None, slice(None)) for one in keys):
        return _reshape(number, x)
    down = isinstance(keys[0], slice) and not all(isinstance(one, slice) for one in keys)
    column = number.ndim == 1 and (x.column or down)
    if _cuts(x, keys):
        x = stored(x)
    if x.axes:
        axes = _parted(x, keys)
        return x.seen(number, axes=axes, column=column)
    at = _subscript(x, keys)
    return Value(number, f"{{0}}[{at}]" if at.strip(":, ") else "{0}", (x,), x.hint, column)


def _flipped(number: Any, x: Value, axis: int) -> Value:
    """From the last element on, by steps of -1."""
    steps = [math.prod(x.lies[at + 1 :]) for at in range(len(x.lies))]
    at = axis - x.ndim + len(x.lies)
    pattern = [[-n if i == at else n, size] for i, (n, size) in enumerate(zip(steps, x.lies))]
    text = f".ap(pattern={pattern}, offset={steps[at] * (x.lies[at] - 1)})"
    if x.axes and not x.turned and all(one.text() == ":" for one in x.axes):
        text = f"nl.load({x.make}{text})"
        text = f"nl.copy({text}, dtype=nl.float32)" if x.casts else text
        return Value(number, text, x.parts, "flipped")
    return Value(number, f"nl.copy({{0}}{text})", (on_chip(x),), "flipped")


@does("flip", "fliplr")
def _flip(number: Any, x: Value, *args: Any, **named: Any) -> Value:
    (axis,) = np.atleast_1d(named.get("dims", _axis(args, named) if args or named else 1))
    return _flipped(number, x, axis % x.ndim)


def _cut_of(axis: int, some: Sequence[Any], keys: Keys) -> list[Any]:
    """The parts of joined ones, of which each is whole or cut as `keys` say."""
    sizes = [one.shape[axis] for one in some]
    first, size, step = _steps(keys[axis], sum(sizes))
    if step != 1:
        raise Cannot
    found, at = [], 0
    for one, has in zip(some, sizes):
        low, high = max(first - at, 0), min(first + size - at, has)
        at += has
        if low < high:
            found.append(one[(*keys[:axis], slice(low, high), *keys[axis + 1 :])])
    return found


def _gathered(number: Any, table: Value, ids: Value) -> Value:
    """Rows of a table by numbers that are data."""
    if table.hint == "eye":
        return _together("equal", number, np.arange(len(table)), _reshape(ids.number[:, None], ids))
    if not table.axes or any(one.text() != ":" for one in table.axes):
        raise Cannot
    if math.prod(ids.number.shape) == 1 and table.number.ndim == 3:  # one matrix
        rows, columns = number.shape[-2:]
        lines = (
            TILE % ((rows, columns),) + f"nisa.dma_copy(dst={{to}}, src={table.make}.ap(pattern="
        )
        lines += f"[[{columns}, {rows}], [1, {columns}]], offset=0, scalar_offset={{0}}, "
        ids = on_chip(ids.seen(ids.number, casts=""))
        return Value(number, f"{lines}indirect_dim=0))", (ids,), "chosen")
    whole = not ids.axes  # what is computed is float32
    ids = on_chip(stored(ids).seen(ids.number, column=True, casts=""))
    if whole:
        ids = Value(ids.number, "nl.copy({0}, dtype=nl.int32)", (ids,), "ids", True)
    shape = rows, columns = ids.lies[0], table.lies[1]
    lines = TILE % (shape,)
    lines += f"nisa.dma_copy(dst={{to}}, src={table.make}.ap(pattern=[[{columns}, {rows}], "
    lines += f"[1, {columns}]], offset=0, vector_offset={{0}}, indirect_dim=0))"
    return Value(number, lines, (ids,), "rows")


@does("take_along_axis", "gather")
def _picked(number: Any, x: Value, *args: Any, **_: Any) -> Value:
    """One element of each row, by numbers that are data: a sum where columns have them."""
    (ids,) = (one for one in args if isinstance(one, Value))
    if ids.number.shape[-1] > 1 == x.ndim - len(ids.shape) + 1:
        columns = Value(ids.number, "nl.copy({0}, dtype=nl.uint32)", (on_chip(ids),), "ids")
        return Value(number, "nl.gather_flattened({0}, {1})", (on_chip(x), columns), "taken")
    columns = _constant(np.arange(x.lies[1])[None])
    ids = ids if ids.ndim > 1 else _reshape(ids.number[:, None], ids)
    chosen = _together("equal", x.number, columns, ids)
    made = _reduced("sum", number, _together("multiply", x.number, x, chosen), axis=1)
    return made.seen(number, column=number.ndim == 1)


@does("reshape")
def _reshape(number: Any, x: Value, *_: Any, **__: Any) -> Value:
    shape = tuple(number.shape)
    if x.hint == "ramp":  # the reference's own numbers
        return known(number)
    lies = x.lies if x.column and shape == x.lies else _lies(number)
    if number.ndim == 1 and _whole(x.number, x.column) == (*shape, 1):
        return x.seen(number, column=True)
    alike = [[n for n in one if n > 1] for one in (shape, _shape(x))]
    one_row = x.axes and x.ndim == 1 and number.ndim == 2 and 1 in shape
    if one_row or lies == x.lies and alike[0] == alike[1]:
        return x.seen(number, column=x.column and number.ndim <= x.ndim)
    if ".permute(" in x.make or x.turned:
        return _reshape(number, stored(on_chip(x)))
    if x.axes and not x.turned and all(one.text() == ":" for one in x.axes):
        axes = tuple(Axis(n, n) for n in shape)
        return x.seen(number, axes=axes, make=f"{x.make}.reshape({shape})")
    if not x.axes and (lies[0] != x.lies[0] or _whole(number)[0] != _whole(x.number, x.column)[0]):
        return _reshape(number, stored(x))
    if lies[0] != x.lies[0] or x.turned:
        raise Cannot
    whole = "nl.copy({0})" if x.make.startswith("{0}[") else "{0}"
    return Value(number, f"{whole}.reshape({lies})", (on_chip(x),), x.hint)


@does("concatenate", "stack")
def _concatenate(number: Any, some: Sequence[Any], axis: int = 0, **named: Any) -> Value:
    lies, at = _lies(number), 0
    axis = len(lies) - number.ndim + named.get("dim", axis) % number.ndim
    lines, parts = TILE % (lies,), list[Value]()
    made = Value(number, _full(lies, 0.0), (), "new")
    if lies != _whole(number) and axis == 0:
        for one in some:
            made[at : at + len(one)] = one if isinstance(one, Value) else np.unique(one).item()
            at += len(one)
        made.joined = 0, some
        return made
    for one in some:
        shape = np.shape(_number(one))
        size = shape[axis - len(lies)] if len(shape) == number.ndim else 1
        key = ", ".join(f"{at}:{at + size}" if i == axis else ":" for i in range(len(lies)))
        at += size
        if len(some) > 8 and isinstance(one, Value):
            text = f"nisa.{'tensor' if axis else 'dma'}_copy(dst={{0}}[{key}], src={{1}})"
            made = made.seen(number, make=text, parts=(made, on_chip(one)))
        elif isinstance(one, Value):
            copies = "tensor_copy" if axis else "dma_copy"
            lines += f"nisa.{copies}(dst={{to}}[{key}], src={{{len(parts)}}})\n"
            parts.append(on_chip(one))
        else:
            (value,) = np.unique(one)
            lines += f"nisa.memset(dst={{to}}[{key}], value={_plain(value)})\n"
    if parts:
        made = Value(number, lines.rstrip(), parts, "joined")
    if all(np.ndim(_number(one)) == number.ndim for one in some):
        made.joined = axis + number.ndim - len(lies), some
    return made


@does("pad")
def _pad(number: Any, x: Value, widths: Any, *_: Any, **named: Any) -> Value:
    fill = named.get("constant_values") or named.get("value") or 0.0
    if isinstance(widths[0], int):  # PyTorch's, from the last axis
        flat = [*widths, *[0] * (2 * x.ndim - len(widths))]
        widths = [flat[2 * at : 2 * at + 2] for at in reversed(range(x.ndim))]
    rows = any(widths[0]) and x.ndim > 1
    lies = _lies(number)
    if rows and not any(map(any, widths[1:])):
        some = [np.full((n, *x.shape[1:]), fill) for n in widths[0]]
        return _concatenate(number, [one for one in (some[0], x, some[1]) if len(one)], 0)
    if rows or len(lies) != len(x.lies):
        raise Cannot
    starts = [0] * (len(lies) - x.ndim) + [one for one, _ in widths][-len(lies) :]
    key = ", ".join(_slice(at, size, 1, whole) for at, size, whole in zip(starts, x.lies, lies))
    lines = f"{{to}} = {_full(lies, fill)}\nnisa.tensor_copy(dst={{to}}[{key}], src={{0}})"
    return Value(number, lines, (on_chip(x),), "padded")


SCANS = {  # by what each element is joined with those before it, begun with what
    "cumsum": ("add", 0.0),
    "add_accumulate": ("add", 0.0),
    "cumprod": ("multiply", 1.0),
    "multiply_accumulate": ("multiply", 1.0),
    "maximum_accumulate": ("maximum", -math.inf),
    "minimum_accumulate": ("minimum", math.inf),
}


def _scanned(name: str, number: Any, x: Value, *args: Any, **named: Any) -> Value:
    """Over the last axis; over rows with the tile turned."""
    if x.ndim == 2 and _axis(args, named) == 0:
        return _swapped(_scanned(name, number.T, _swapped(x))).seen(number)
    if len(x.lies) > 2:
        raise Cannot
    function, start = SCANS[name]
    zeros = Value(x.number, _full(x.lies, 0.0), (), "zeros")
    text = f"nisa.tensor_tensor_scan(dst={{to}}, data0={{0}}, data1={{1}}, initial={_plain(start)},"
    text = f"{TILE % (x.lies,)}{text} op0=nl.add, op1=nl.{function})"
    return Value(number, text, (zeros, on_chip(x)), "scan")


for _name in SCANS:
    DOES[_name] = functools.partial(_scanned, _name)


@does("filled")
def new(number: Any, *_: Any, **__: Any) -> Value:
    """A tensor that the reference makes to fill it."""
    fill = np.unique(number)
    return Value(number, _full(_lies(number), fill[0] if len(fill) == 1 else 0.0), (), "new")


def known(number: Any) -> Value:
    """A ramp or a diagonal of the reference."""
    eye = number.ndim == 2 and np.array_equal(number, np.eye(len(number)))
    return _constant(np.asarray(number)).seen(number, hint="eye" if eye else "ramp")


@does("repeat", "repeat_interleave", "tile", "expand", "broadcast_to", "expand_as")
def _repeated(number: Any, x: Value, *_: Any, **__: Any) -> Value:
    if number.shape == x.shape:
        return x.seen(number)
    pairs = [*zip(x.shape, number.shape)] if x.ndim == number.ndim else []
    grown = [at for at, (one, other) in enumerate(pairs) if one != other]
    if len(grown) != 1 or x.shape[grown[0]] == 1:
        return _together("add", number, x, 0.0)
    (at,) = grown
    times = number.shape[at] // x.shape[at]
    if not np.array_equal(number, np.repeat(x.number, times, at)):
        return _concatenate(number, [x] * times, at)
    lies, axis = x.lies, at + 1 - x.ndim + len(x.lies)
    between = f".reshape({(*lies[:axis], 1, *lies[axis:])}).broadcast({axis}, {times})"
    if LEADS.get() and at < x.ndim - 2:
        leads = [*stored(x).axes]
        leads[at] = leads[at]._replace(size=1, loop=_loops(x)[at], block=1, turns=times)
        return stored(x).seen(number, axes=tuple(leads))
    if axis == 1:  # rows
        rows = Axis(max(1, _lies(number)[0] // times), lies[0])
        if _lies(number) != _whole(number):
            rows = rows._replace(loop="i_row", block=rows.size, turns=max(1, times // PARTITIONS))
            between = f".reshape({(rows.size, 1, *lies[1:])}).broadcast(1, {times})"
        part = stored(x).seen(x.number[: rows.size], axes=(rows, *stored(x).axes[1:]))
        lines = TILE % (_lies(number),) + f"nisa.dma_copy(dst={{to}}, src={in_hbm(part)}{between})"
        return Value(number, lines, part.parts, "repeated")
    shape = *lies[:axis], times, *lies[axis:]
    lines = f"{TILE % (shape,)}nisa.tensor_copy(dst={{to}}, src={{0}}{between})"
    made = Value(number, lines, (on_chip(x),), "repeated")
    return Value(number, f"{{0}}.reshape({_lies(number)})", (made,), "repeated")


def _best(x: Value, count: int) -> tuple[Value, Any]:
    """The largest elements of each row from the largest on, at least `count`, and their columns;
    none of rows in pieces."""
    if x.lies[1] < 8:
        x = _concatenate(np.ones((x.lies[0], 8)), [x, np.full((1, 8 - x.lies[1]), -math.inf)], 1)
    tile, rows = on_chip(x), _whole(x.number, x.column)[0]
    shape = tile.lies[0], -(-count // 8) * 8
    if pieces := tile.turns.get("i_column"):
        if count > 8:
            raise Cannot
        tops = tile.lies[0], 8 * pieces
        of_pieces = Value(np.empty((rows, tops[1])), (TILE % (tops,)).rstrip(), (tile,), "tops")
        of_pieces.over = "nisa.max8(dst={to}[:, nl.ds(i_column * 8, 8)], src={0})"
        of_pieces.loop = "i_column", pieces
        return _best(of_pieces, count)[0], None
    part = "" if count <= 8 else "[:, nl.ds(i_part * 8, 8)]"
    head = "" if count <= 8 else f"for i_part in range({shape[1] // 8}):\n    "
    lines = f"{TILE % (shape,)}{head}nisa.max8(dst={{to}}{part}, src={{0}})"
    if part:
        lines = f"left_sb = nl.copy({{0}})\n{lines.replace('{0}', 'left_sb')}\n"
        lines += "    nisa.nc_match_replace8(dst=left_sb, data=left_sb, vals={to}"
        lines += f"{part}, imm={_plain(-math.inf)})"
    number = np.empty((rows, shape[1]))
    best = Value(number, lines, (tile,), "best")
    lines = f"{{to}} = nl.ndarray({shape}, dtype=nl.uint32, buffer=nl.sbuf)\n{head}"
    lines += f"nisa.nc_find_index8(dst={{to}}{part}, data={{0}}, vals={{1}}{part})"
    return best, Value(number, lines, (tile, best), "index")


@does("argmax")
def _argmax(number: Any, x: Value, *args: Any, **named: Any) -> Value:
    if x.ndim == 2 and _axis(args, named) == 0:
        x = _swapped(x)
    text, column = "nl.copy({0}[:, 0:1], dtype=nl.float32)", number.ndim == 1
    if order := _best(x, 1)[1]:
        return Value(number, text, (order,), "first", column)
    one, columns = np.empty((*x.shape[:-1], 1)), np.arange(x.shape[-1])[None]
    same = _together("equal", x.number, x, _reduced("max", one, x, axis=-1))
    first = _together("where", x.number, same, _constant(columns), float(columns.size))
    return _reduced("min", one, first, axis=-1).seen(number, column=column)


class Ordered(Value):
    """Elements of a row in order, or their columns, of which a reference takes a few.

    Attributes:
        ranks: of the elements, from the largest on.
    """

    ranks: np.ndarray

    def taken(self, number: Any, ranks: np.ndarray) -> Value:
        first, size = min(ranks), len(self.ranks)
        if list(ranks) not in (one := [*range(first, first + len(ranks))], one[::-1]):
            raise Cannot
        small = first >= max(8, size // 2)  # the last of them: the largest of the opposites
        x = self.parts[0]
        if small:
            x, ranks = _together("negative", x.number, x), size - 1 - ranks
        which = self.hint == "order"
        best = _best(x, int(max(ranks)) + 1)[which]
        shape = x.lies[0], len(ranks)
        text = f"{{0}}[:, {min(ranks)}:{max(ranks) + 1}]"
        text = f"nl.copy({text}, dtype=nl.float32)" if which else text
        made = Value(np.empty(shape), text, (best,), "best")
        if len(ranks) > 1 and ranks[0] > ranks[-1]:
            made = _flipped(made.number, made, 1)
        if small and not which:
            made = _together("negative", made.number, made)
        return made.seen(number, column=number.ndim == 1)


def _ordered(hint: str, number: Any, x: Value, *_: Any, **named: Any) -> Any:
    if isinstance(number, tuple):
        return Best(*(_ordered(*one, x, **named) for one in zip(("sort", "order"), number)))
    size = x.shape[-1]
    made = Ordered(number, "", (x,), hint)
    made.ranks = np.arange(size)[:: 1 if named.get("descending") else -1]
    return made


DOES["sort"] = DOES["partition"] = functools.partial(_ordered, "sort")
DOES["argsort"] = functools.partial(_ordered, "order")
