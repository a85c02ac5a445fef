"""Thirty operators of three levels, to measure kernels and their writers.

In the manner of KernelBench (Ouyang et al., arXiv:2502.10517): single operators, operators to be
fused, blocks of models. Each file below `level1` to `level3` says what the operator computes. It
has CASES (the first of odd sizes, the last one timed), a PyTorch `reference` and a naive `kernel`.
The kernel is legal and right, and others are to be faster.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..judge.cases import HARD, KINDS, Case, case

LEVELS = (1, 2, 3)
# Of names: sums of products of rows with one large number in common have no digits left in bf16.
_PRODUCTS = ("matmul", "linear", "attention", "mlp", "scan")


@dataclass(frozen=True)
class Operator:
    """One task of the suite.

    Attributes:
        name: of its file, here and among the answers.
        level: 1 to 3.
        path: its file, which is also the template of an answer.
        cases: arguments; the last is the timed one.
        reference: PyTorch function of the arguments.
        kernel: the naive kernel.
        values: kinds that it is tried with; a file's VALUES say which where its task is not exact
            for all of them.
    """

    name: str
    level: int
    path: Path
    cases: tuple[Case, ...]
    reference: Callable
    kernel: Any
    values: tuple[str, ...] = (*KINDS, *HARD)


def names() -> dict[str, int]:
    """Operators and their levels, in order; nothing is imported."""
    folder = Path(__file__).parent
    return {
        found.name: level
        for level in LEVELS
        for found in pkgutil.iter_modules([str(folder / f"level{level}")])
    }


@functools.cache
def operator(name: str) -> Operator:
    """The operator of that name; the SDK's names have to be importable."""
    level = names()[name]
    module = importlib.import_module(f"{__name__}.level{level}.{name}")
    cases = tuple(case(text) for text in module.CASES)
    path = Path(str(module.__file__))
    values = getattr(module, "VALUES", Operator.values)
    if any(word in name for word in _PRODUCTS):
        values = tuple(kind for kind in values if kind != "offset")
    return Operator(name, level, path, cases, module.reference, module.kernel, values)
