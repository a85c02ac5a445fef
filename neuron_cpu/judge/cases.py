"""The cases of a kernel: shapes and constants, and the values of its tensors."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..console.arguments import table
from ..errors import UsageError, nearest

_SHORT = """
bf16=bfloat16 f16=float16 fp16=float16 f32=float32 fp32=float32 f64=float64 fp64=float64 i8=int8
i16=int16 i32=int32 u8=uint8 u16=uint16 u32=uint32 float8_e4m3=float8_e4m3fn fp8=float8_e4m3fn
fp8_e4m3=float8_e4m3fn fp8_e5m2=float8_e5m2
"""
SHORT_DTYPES = dict(word.split("=") for word in _SHORT.split())
TENSOR = re.compile(r"(\d+(?:x\d+)*):(\w+)(?::(-?[\d.]+(?:e-?\d+)?)\.\.(-?[\d.]+(?:e-?\d+)?))?")
# by the form of a text that is no argument: what to write
MEANT = table(
    r"""
(?i)\W*true\W*: write True
(?i)\W*false\W*: write False
(?i)\W*none\W*: write None
.*\.(?:npy|npz|pt|bin|csv): give a shape and a type: the command makes the values
([a-zA-Z_]\w*): write @\1 for an object of the file, or "'\1'" for a text
([a-zA-Z_][\w.]*): write NAME = \1 into the file, and @NAME here
(--.*): write \1 outside of the quotes
(-?\d*\.?\d+)[a-z]|(-?\d+),0: write \1\2
([a-zA-Z_]\w*):([\dx]+:\w+|-?[\d.e-]+): write --arg \1=\2
(\d+)[:,*X] ?(\d+):([a-z]\w+): a tensor is \1x\2:\3
(\d+)[,*X] ?(\d+)[,*X] ?(\d+):([a-z]\w+): a tensor is \1x\2x\3:\4
[\dx]*(-\d+)(?:x[-\dx]*)?(?::\w+)?: write a size from 1, such as 128, for \1
(\d+)/(\d+): write the number that \1/\2 is
([\dx]+):(?:\w+\.)+(\w+): a tensor is \1:\2
([\dx]+:\w+):[\[(]?(-?[\d.]+?)[-,:](-?[\d.]+)[\])]?: a tensor is \1:\2..\3
"""
)
KINDS = ("random", "zeros", "ties", "large")  # values that every case is tried with by default
HARD = ("offset", "tiny", "cancelling", "rows", "denormal")  # that the suite tries as well
HIDDEN = "hidden"  # and where a task leaves something unread
SIGNS = ("negative", "positive")  # tried in addition, and judged where results are far off
NAN = "nan"  # and those with a NaN among them, where somebody asks for them
INTEGERS = (0.0, 99.0)  # of integer tensors whose argument names no limits
TOO_LARGE = 300.0  # exp() overflows fp32 from 89 on


@dataclass(frozen=True)
class Spec:
    """A tensor argument: ``128x512:bf16``, or with limits of its values ``128x1:i32:0..999``.

    Attributes:
        low, high: smallest and largest value, both None where the argument names none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        short = next((s for s, long in SHORT_DTYPES.items() if long == name), name)
        limits = "" if self.low is None else f":{self.low:g}..{self.high:g}"
        return f"{'x'.join(map(str, self.shape))}:{short}{limits}"

    def meta(self) -> torch.Tensor:
        """A tensor of this shape without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Named:
    """A constant argument that stands in the kernel's file: ``@NORM`` is its object NORM."""

    name: str

    def __repr__(self) -> str:
        return f"@{self.name}"


Arguments = tuple[Sequence[Any], dict[str, Any]]  # positional and named, of a call
Argument = Spec | Named | Any  # a tensor, or a constant as it is


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        positional, named: of the kernel, tensors as Specs.
        hide: overwrites arguments where the kernel may not read them, for values of kind `HIDDEN`.
    """

    positional: tuple[Argument, ...]
    named: tuple[tuple[str, Argument], ...] = ()
    hide: Callable[..., None] | None = None

    @property
    def public(self) -> Case:
        """The case for a stranger's process: shapes, types and constants."""
        return replace(self._with(lambda spec: replace(spec, low=None, high=None)), hide=None)

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def words(self) -> list[str]:
        """One for each argument; `case` takes them quoted as for a shell."""
        words = [*map(_word, self.positional)]
        return words + [f"{name}={_word(value)}" for name, value in self.named]

    def changed(self, change: Callable, kind: type = Spec) -> Arguments:
        """Positional and keyword arguments with each Spec replaced; constants stay."""
        swap = lambda value: change(value) if isinstance(value, kind) else value  # noqa: E731
        return [swap(v) for v in self.positional], {k: swap(v) for k, v in self.named}

    def _with(self, change: Callable, kind: type = Spec) -> Case:
        positional, named = self.changed(change, kind)
        return replace(self, positional=tuple(positional), named=tuple(named.items()))

    def resolved(self, names: Mapping[str, Any]) -> Case:
        """The case with the objects of a kernel's file in place of their names.

        Raises:
            UsageError: the file has no such object.
        """

        def find(named: Named) -> Any:
            if named.name not in names:
                raise UsageError(
                    f"argument {named} names no object of the kernel's file, expected one that it "
                    f"defines or imports; {nearest(f'{named}', [f'@{one}' for one in names])}."
                )
            return names[named.name]

        return self._with(find, Named)

    def meta(self) -> Arguments:
        """Arguments to trace with."""
        return self.changed(Spec.meta)

    def values(self, kind: str, seed: int) -> Arguments:
        """Arguments to run with: seeded values of one of the kinds (`fill`)."""
        # A generator of its own for each kind, and the same values on every machine and run.
        digest = hashlib.sha256(f"{seed} {kind}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        positional, named = self.changed(lambda spec: fill(spec, kind, generator))
        if kind == HIDDEN and self.hide is not None:
            self.hide(*positional, **named)
        return positional, named

    def at_other_sizes(self) -> Iterator[Case]:
        """The case with each size of its tensors, one after another, halved and doubled."""
        every = [*self.positional, *(value for _, value in self.named)]
        sizes = dict.fromkeys(n for one in every if isinstance(one, Spec) for n in one.shape)
        for size in (one for one in sizes if one > 1):
            for other in (2 * size, *([] if size % 2 else [size // 2])):
                yield self._with(functools.partial(_resized, size, other))

    def otherwise(self) -> Iterator[Case]:
        """The case with two of its tensors exchanged, or the last two axes of one."""
        names, many = [name for name, _ in self.named], len(self.positional)
        given = [*self.positional, *(value for _, value in self.named)]

        def made(places: dict[int, Any]) -> Case:
            every = [places.get(n, one) for n, one in enumerate(given)]
            named = tuple(zip(names, every[many:]))
            return replace(self, positional=tuple(every[:many]), named=named)

        tensors = [(n, one) for n, one in enumerate(given) if isinstance(one, Spec)]
        for (n, one), (k, other) in itertools.combinations(tensors, 2):
            if one != other:
                yield made({n: other, k: one})
        for n, one in tensors:
            *leads, rows, columns = (1, 1, *one.shape)
            if rows != columns and len(one.shape) > 1:
                yield made({n: replace(one, shape=(*leads[2:], columns, rows))})

    def with_floats(self, dtype: torch.dtype) -> Case:
        """The case with another type in place of all floating-point ones."""
        return self._with(
            lambda spec: replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec
        )


def _word(value: Any) -> str:
    if hasattr(value, "dtype") and not isinstance(value, type):  # a Spec, or an array of the file
        return str(value) if isinstance(value, Spec) else f"array{[*value.shape]}"
    return repr(value)


def _resized(old: int, new: int, spec: Spec) -> Spec:
    return replace(spec, shape=tuple(new if size == old else size for size in spec.shape))


# --- from text ------------------------------------------------------------------------------------
def parse_dtype(name: str, where: str) -> torch.dtype:
    """The torch type that a short or long name stands for.

    Raises:
        UsageError: there is none; the sentence begins with `where`.
    """
    dtype = getattr(torch, SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        known = {*SHORT_DTYPES, *SHORT_DTYPES.values()}
        raise UsageError(
            f"{where} names dtype '{name}', expected one such as bf16, float32, int32 or "
            f"float8_e4m3; {nearest(name.lower(), sorted(known), 'name that')}."
        )
    return dtype


def parse_value(text: str) -> Argument:
    """A Spec for ``128x512:bf16``, a Named for ``@NAME``, a Python literal otherwise.

    Raises:
        UsageError: it is neither.
    """
    if text.startswith("@") and text[1:].isidentifier():
        return Named(text[1:])
    if re.fullmatch("[-+]?(inf|nan)", text):
        return float(text)
    match = TENSOR.fullmatch(text)
    if match is None:
        try:
            value = ast.literal_eval(text)
            if isinstance(value, (tuple, list)) and not text.startswith("("):
                raise ValueError  # 256,1024 is a shape, and no kernel takes a list
            return value
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise UsageError(
                f"argument {text} is neither a tensor nor a Python literal, expected for example "
                f"128x512:bf16, 1e-5, True or \"'text'\"; {_meant(text)}."
            ) from None
    shape = tuple(int(n) for n in match[1].split("x"))
    dtype = parse_dtype(match[2], f"argument {text}")
    low, high = _limits(match[3], match[4], dtype, text)
    made = Spec(shape, dtype, low, high)
    try:
        made.meta()
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(
            f"argument {text} names no shape that a tensor can have, expected sizes whose product "
            "fits 64 bits; correct the part before the colon."
        ) from None
    return made


def _meant(text: str) -> str:
    """What to write for a text that is no argument."""
    for form, mend in MEANT.items():
        if match := re.fullmatch(form, text):
            return match.expand(mend)
    tensors = [one[0] for one in re.finditer(rf"(?<!\w){TENSOR.pattern}", text)]
    if tensors:
        return (
            f"write --arg {' --arg '.join(tensors)}" if tensors[1:] else f"a tensor is {tensors[0]}"
        )
    typed = re.search(r"x?((?:bf|fp?|[ui]|u?int|b?float)\d+\w*)", text)
    sizes = re.findall(r"[^\WxX]+", text.replace(typed[0], " ") if typed else text)
    numbers = [size for size in sizes if size.isdecimal()]
    if not typed and not numbers[1:]:
        return "quote strings"
    if len(numbers) < len(sizes) and not re.search(r"[(\[]", text):
        names = dict.fromkeys(size for size in sizes if not size.isdecimal())
        return f"write numbers in place of {' and '.join(names)}"
    return f"a tensor is {'x'.join(numbers)}:{typed[1] if typed else 'bf16'}"


def _limits(
    low: str | None, high: str | None, dtype: torch.dtype, text: str
) -> tuple[float | None, float | None]:
    """Limits of values, which the type has to hold."""
    if low is None or high is None:
        return None, None
    given, held = [math.nan], list[float]()
    with contextlib.suppress(TypeError, ValueError):  # no number, or a type without an order
        given = [float(low), float(high)]
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        held = sorted(min(max(one, info.min), info.max) for one in given)
    if given != held:
        mend = text.removesuffix(f":{low}..{high}")
        mend += f":{held[0]:.17g}..{held[1]:.17g}".replace("e+", "e") if held else ""
        raise UsageError(
            f"argument {text} has no values, expected limits LOW..HIGH that its type holds; write "
            f"{mend}."
        )
    return given[0], given[1]


def parse_case(words: Sequence[str]) -> Case:
    """A case from one word an argument, ``NAME=VALUE`` for keywords."""
    positional, named = [], {}
    for word in (one.removesuffix(",") for one in words):
        name, equals, value = word.partition("=")
        if name in named:
            raise UsageError(f"{name}= is given twice, expected once; leave {word} out.")
        if equals and name.isidentifier():
            named[name] = parse_value(value)
        else:
            positional.append(parse_value(word))
    return Case(tuple(positional), tuple(named.items()))


def case(text: str) -> Case:
    """A case from one line, as a shell splits it: ``"128x512:bf16 512:bf16 eps=1e-6"``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--case {text} cannot be split into arguments ({error}), expected words such as "
            "128x512:bf16 eps=1e-6; correct the quotes."
        ) from None
    return parse_case(words)


def check_calls(texts: Sequence[str], function: Callable) -> None:
    """Refuse texts of an argument each, of a function that takes all of them in one call.

    Raises:
        UsageError: the sentence has the text of the call.
    """
    bind = inspect.signature(function).bind

    def fits(text: str) -> bool:
        with contextlib.suppress(TypeError):
            bind(*(one := case(text)).positional, **dict(one.named))
            return True
        return False

    whole = " ".join(texts)
    if texts[1:] and fits(whole) and not any(map(fits, texts)):
        raise UsageError(
            f"the cases {', '.join(texts)} have an argument each, expected all of a call in each; "
            f"write '{whole}'."
        )


# --- values ---------------------------------------------------------------------------------------
def fill(spec: Spec, kind: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of one kind of values, inside the limits of its argument where it names some.

    random  normal, or uniform between the limits; integers from 0 to 99 without limits
    zeros   zero, or what of the limits is nearest to it
    ties    three values only, all exact in every type, so that most elements have equals
    large   rows of very different size: normal times 8, one element a row beyond exp()'s range;
            with limits their ends; integers without limits as in random
    offset  random around a number of each row's own, up to 128 from zero
    tiny    random times 2^-12 and, every third row, 2^-20: less than what norms add to a variance
    cancelling  random, each element's opposite in a row with it, so that sums are near zero
    rows    random, every second row zero
    denormal  random, every second element below the type's normal numbers
            (these five with limits, and of integers, as in random)
    negative, positive  random on one side of zero: a maximum that begins there is wrong of one
    hidden  random; a case's `hide` overwrites what its task does not read
    nan     random with one NaN in every floating-point tensor without limits
    """
    floating, limited = spec.dtype.is_floating_point, spec.low is not None
    low, high = (spec.low, spec.high) if limited else INTEGERS
    assert low is not None and high is not None
    if floating and not limited:
        values = _unlimited(spec, kind, generator)
    elif kind == "zeros":
        values = torch.full(spec.shape, min(max(low, 0.0), high))
    elif kind == "ties":
        middle = (low + high) / 2 if floating else (low + high) // 2
        chosen = torch.randint(0, 3, spec.shape, generator=generator)
        values = torch.tensor([low, middle, high])[chosen]
    elif kind == "large" and limited:
        chosen = torch.randint(0, 2, spec.shape, generator=generator)
        values = torch.tensor([low, high])[chosen]
    else:
        values = _uniform(spec, low, high, generator)
    return values.to(spec.dtype)


def _uniform(spec: Spec, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return low + (high - low) * torch.rand(spec.shape, generator=generator)
    return torch.randint(int(low), int(high) + 1, spec.shape, generator=generator)


def _unlimited(spec: Spec, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Floating-point values of an argument that names no limits."""
    if kind == "zeros":
        return torch.zeros(spec.shape)
    if kind == "ties":
        # Halves: some round them up, others to even numbers.
        return torch.randint(-2, 2, spec.shape, generator=generator) / 2
    values = torch.randn(spec.shape, generator=generator)
    if not values.numel():
        return values
    rows = values.view(-1, spec.shape[-1])
    if kind in SIGNS:
        values = values.abs() + 1.0
        return -values if kind == SIGNS[0] else values
    if kind == "offset":
        rows += 128 * (2 * torch.rand((len(rows), 1), generator=generator) - 1)
    if kind == "tiny":
        rows *= 2.0**-12
        rows[::3] *= 2.0**-8
    if kind == "cancelling":
        half = rows.shape[1] // 2
        rows[:, half : 2 * half] = -rows[:, :half]
    if kind == "rows":
        rows[::2] = 0.0
    if kind == "denormal":
        values.view(-1)[::2] *= torch.finfo(spec.dtype).tiny / 8
    if kind == "large":
        values = 8 * values
        rows = values.view(-1, spec.shape[-1])
        at = torch.randint(0, rows.shape[1], (rows.shape[0], 1), generator=generator)
        sizes = TOO_LARGE + 700 * torch.rand((rows.shape[0], 1), generator=generator)
        rows.scatter_(
            1, at, sizes * (1 - 2 * torch.randint(0, 2, sizes.shape, generator=generator))
        )
        most = torch.finfo(spec.dtype).max / 2
        return values.clamp(-most, most)
    if kind == NAN:
        hit = torch.randint(0, values.numel(), (1,), generator=generator)
        values.view(-1)[hit] = torch.nan
    return values
