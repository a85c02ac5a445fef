"""Thirty operators of three levels, to measure kernels and their writers.

In the manner of KernelBench (Ouyang et al., arXiv:2502.10517): single operators, operators to be
fused, blocks of models. Each section of `level1.md` to `level3.md` is an operator: what it
computes, CASES (the first of odd sizes, the last one timed), a PyTorch `reference` and a naive
`kernel`. The kernel is legal and right, and others are to be faster. `drawn` makes a case of sizes
that a judge draws; a size's default is the largest that is drawn. `hidden` overwrites what
the task does not read.
"""

import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..judge.cases import HARD, HIDDEN, KINDS, Case, case
from ..lessons import pages

LEVELS = (1, 2, 3)
MOST = 300  # of a size without a default
# Below and above one or two tiles of 128 partitions, and one of 512 elements.
BESIDE_TILES = ((127, 255, 511), (129, 257, 513))
LEAST = 9  # of an odd size: the eight largest elements of a row are a whole instruction's
# Of names: sums of products of rows with one large number in common have no digits left in bf16.
_PRODUCTS = ("matmul", "linear", "attention", "mlp", "scan")


@dataclass(frozen=True)
class Operator:
    """One task of the suite.

    Attributes:
        name: of its section, and of its file among the answers.
        level: 1 to 3.
        cases: arguments; the last is the timed one.
        reference: PyTorch function of the arguments.
        kernel: the naive kernel.
        values: kinds that it is tried with, without those of a section's WITHOUT, for which its
            task is not exact.
    """

    name: str
    level: int
    cases: tuple[Case, ...]
    reference: Callable
    kernel: Any
    values: tuple[str, ...] = (*KINDS, *HARD, HIDDEN)


def names() -> dict[str, int]:
    """Operators and their levels, in order; nothing of theirs is run."""
    return {name: level for level in LEVELS for name in pages.sections(_page(level))}


def template(name: str) -> str:
    """The operator's section as a file, which an answer starts from."""
    return pages.as_file(pages.sections(_page(names()[name]))[name])


def _page(level: int) -> Path:
    return Path(__file__).resolve().parent / f"level{level}.md"


@functools.cache
def _module(name: str) -> ModuleType:
    return pages.section_module(f"{__name__}.{name}", _page(names()[name]), name)


def _case(name: str, text: str) -> Case:
    return replace(case(text), hide=getattr(_module(name), HIDDEN, None))


def drawn(name: str, seed: int) -> tuple[Case, ...]:
    """Cases of sizes below tiles, above tiles, and of odd ones, as a seed draws them."""
    draw, make = random.Random(f"{seed} {name}"), _module(name).drawn
    sizes = inspect.signature(make).parameters.values()
    most = {one.name: MOST if one.default is one.empty else one.default for one in sizes}
    found = [
        {k: draw.choice([n for n in few if n <= limit] or [limit]) for k, limit in most.items()}
        for few in BESIDE_TILES
    ]
    found.append({k: draw.randrange(LEAST, limit + 1, 2) for k, limit in most.items()})
    return tuple(_case(name, make(**one)) for one in found)


@functools.cache
def operator(name: str) -> Operator:
    """The operator of that name; the SDK's names have to be importable."""
    module = _module(name)
    cases = tuple(_case(name, text) for text in module.CASES)
    without = set(getattr(module, "WITHOUT", ()))
    without |= {"offset"} if any(word in name for word in _PRODUCTS) else set()
    without |= set() if cases[0].hide else {HIDDEN}
    values = tuple(kind for kind in Operator.values if kind not in without)
    return Operator(name, names()[name], cases, module.reference, module.kernel, values)
