"""Thirty operators of three levels, to measure kernels and their writers.

In the manner of KernelBench (Ouyang et al., arXiv:2502.10517): single operators, operators to be
fused, blocks of models. Each section of `level1.md` to `level3.md` is an operator: what it
computes, CASES (the first of odd sizes, the last one timed), a PyTorch `reference` and a naive
`kernel`. The kernel is legal and right, and others are to be faster.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..judge.cases import HARD, KINDS, Case, case
from ..lessons import pages

LEVELS = (1, 2, 3)
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
        values: kinds that it is tried with; a section's VALUES say which where its task is not
            exact for all of them.
    """

    name: str
    level: int
    cases: tuple[Case, ...]
    reference: Callable
    kernel: Any
    values: tuple[str, ...] = (*KINDS, *HARD)


def names() -> dict[str, int]:
    """Operators and their levels, in order; nothing of theirs is run."""
    return {name: level for level in LEVELS for name in pages.sections(_page(level))}


def template(name: str) -> str:
    """The operator's section as a file, which an answer starts from."""
    return pages.as_file(pages.sections(_page(names()[name]))[name])


def _page(level: int) -> Path:
    return Path(__file__).resolve().parent / f"level{level}.md"


@functools.cache
def operator(name: str) -> Operator:
    """The operator of that name; the SDK's names have to be importable."""
    level = names()[name]
    module = pages.section_module(f"{__name__}.{name}", _page(level), name)
    cases = tuple(case(text) for text in module.CASES)
    values = getattr(module, "VALUES", Operator.values)
    if any(word in name for word in _PRODUCTS):
        values = tuple(kind for kind in values if kind != "offset")
    return Operator(name, level, cases, module.reference, module.kernel, values)
