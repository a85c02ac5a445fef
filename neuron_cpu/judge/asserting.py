"""The judgement as an assertion, for tests."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..core import Kernel, NkiWarning
from ..core.device.refusals import UNPROVEN
from ..lessons import with_pointers
from . import cases as forms
from .references import Reference
from .tables import sentences
from .verdict import Settings, judge


def _form(value: Any) -> str:
    """An argument as a text: a tensor's shape and type, those of a tuple of sizes, or a number;
    several of them one after another."""
    if isinstance(value, dict):
        return " ".join(f"{name}={_form(one)}" for name, one in value.items())
    if isinstance(value, (tuple, list)):
        sizes = all(isinstance(one, int) for one in value)
        return f"{'x'.join(map(str, value))}:f32" if sizes else " ".join(map(_form, value))
    if not hasattr(value, "shape"):
        return str(value)
    return f"{'x'.join(map(str, value.shape))}:{str(value.dtype).removeprefix('torch.')}"


KINDS = (*forms.KINDS, *forms.HARD, forms.HIDDEN)
FORMS: dict[str, tuple] = {  # of options: whether one has it, its name, and an example
    "values": (
        lambda one: {*one} <= {*KINDS},
        f"several of {', '.join(KINDS)}",
        "('random', 'zeros')",
    ),
    "seeds": (lambda one: not isinstance(one, (int, str)), "several numbers", "(0, 1)"),
    "tolerance": (lambda one: not isinstance(one, (str, tuple)), "a number", "0.01"),
    "grid": (lambda one: not isinstance(one, str), "a number of cores", "2"),
}


def assert_kernel(
    kernel: Any,
    reference: Callable,
    *cases: str,
    grid: tuple[int, ...] | int = (),
    values: Sequence[str] = forms.KINDS,
    seeds: Sequence[int] = (0,),
    tolerance: float | None = None,
    nan: str = "any",
    library: str | None = None,
    outputs: Callable | None = None,
    **other: Any,
) -> bool:
    """Fail unless a kernel is legal and agrees with a reference in float64 on every case; True.

    Args:
        kernel: made by nki.jit, or the plain function.
        reference: numpy or PyTorch function of the same arguments.
        cases: arguments of one call each, as on a command line: ``"128x512:bf16 eps=1e-6"``.
        grid, values, seeds, tolerance, nan: as in `verdict.Settings`.
        library: what the reference computes with, "numpy" or "torch"; found in its code by default.
        outputs: function of the kernel's and the reference's results, and of the arguments where it
            takes more: what is compared (`references.comparable`).

    A kernel that is right and unproven, as no source decides a rule of it, warns.

    Raises:
        AssertionError: what is wrong, at which element, from which line on.
        UsageError: there is no case, or the reference fails.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    if not callable(kernel) or isinstance(reference, Kernel) and not isinstance(kernel, Kernel):
        first, second = (getattr(one, "__name__", "") for one in (reference, kernel))
        raise forms.UsageError(
            f"assert_kernel got {second or 'results'} in the kernel's place, expected the kernel "
            f"first, and no call; write assert_kernel({first or 'kernel'}, "
            f"{second or 'reference'}, '128x512:bf16')."
        )
    if "seed" in other:
        raise forms.UsageError(
            f"assert_kernel got seed={other['seed']}, expected several; write "
            f"seeds=({other['seed']},)."
        )
    if other or not cases or not all(isinstance(case, str) for case in cases):
        shapes = [one for one in other.values() if not isinstance(one, (str, float, int))]
        taken = inspect.signature(getattr(kernel, "function", kernel)).parameters.values()
        text = _form(
            [*cases, *shapes] or ["128x512:bf16" for one in taken if one.default is one.empty]
        )
        text = text.replace("f32", str(other.get("dtype", "f32")).removeprefix("torch."))
        got = [f"{name}=" for name in other] or [*(type(one).__name__ for one in cases), "no case"]
        limit = ", and one limit of errors" * any("tol" in name for name in other)
        raise forms.UsageError(
            f"assert_kernel got {got[0]}, expected the arguments of each call as a text "
            f"of shapes and types{limit}; write {text!r}{', tolerance=0.01' * bool(limit)}."
        )
    given = {"values": values, "seeds": seeds, "tolerance": tolerance, "grid": grid}
    for name, (fits, expected, example) in FORMS.items():
        if not fits(given[name]):
            raise forms.UsageError(
                f"assert_kernel got {name}={given[name]!r}, expected {expected}; write "
                f"{name}={example}."
            )
    made = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    cores = (grid,) if isinstance(grid, int) else grid
    settings = Settings(cores, tuple(values), tuple(seeds), tolerance, nan)
    answer = Reference(reference, library, outputs)
    forms.check_calls(cases, made.function)
    verdicts = [judge(made, answer, forms.case(text), settings) for text in cases]
    failed = [verdict for verdict in verdicts if not verdict.correct]
    if failed:
        said = "\n".join([f"kernel {made.name}:", *sentences(failed)])
        raise AssertionError(with_pointers(said))
    for verdict in (one for one in verdicts if one.outcome == UNPROVEN):
        said = "; ".join(verdict.warnings)
        warnings.warn(f"kernel {made.name} is right, and unproven: {said}", NkiWarning, 2)
    return True  # to who asserts it once more
