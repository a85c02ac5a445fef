"""Kernels in a notebook: `kernel.profile(...)` and `kernel.check(...)` below a cell.

Both take the arguments of a call: tensors, of which shape and type count, or their forms on a
command line ("128x512:bf16"). In a notebook the result is the page of `neuron_cpu profile --html`;
elsewhere it prints as the command's tables.
"""

from __future__ import annotations

import html
import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEIGHT = 760  # pixels of the page below a cell
WIDTH = 120  # columns of the tables


@dataclass(eq=False, repr=False)
class Shown:
    """What a notebook shows, and a terminal prints.

    Attributes:
        text: the command's tables and sentences.
        page: one HTML page with its data inside.
    """

    text: str
    page: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        content = html.escape(self.page)
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return f'<iframe srcdoc="{content}" style="{style}"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        from .files import write_text_atomically

        write_text_atomically(Path(path), self.page)


def attach(kernel: type[Any]) -> None:
    """Give a class of kernels both methods."""
    kernel.profile, kernel.check = profile, check


def profile(
    kernel: Any, *args: Any, baseline: Any = None, html: str | Path = "", **named: Any
) -> Shown:
    """Where the time of a call goes, estimated; nothing is computed.

    Args:
        baseline: another kernel of the same arguments, shown beside it.
        html: a file that gets the page.

    Raises:
        NkiError: the kernel is not legal with these arguments.
    """
    from .core import Kernel
    from .core.device.errors import only_timed
    from .core.report import report, tables
    from .core.time.schedule import schedule
    from .errors import UsageError
    from .judge import chips, verdict
    from .page import data
    from .page.write import page

    if baseline is not None and not isinstance(baseline, Kernel):
        raise UsageError(
            f"baseline of {kernel.name}.profile is a {type(baseline).__name__}, expected a kernel; "
            f"give the kernel itself, and a function to {kernel.name}.check."
        )
    case = _case(kernel, args, named)
    runs = []
    for one in filter(None, (kernel, baseline)):
        with only_timed():
            runs.append((one.name, schedule(verdict.traced(one, case, one.grid))))
    found = report.profile(runs[0][1])
    out = _Console(tables.expendable(found.lines), "bound by")
    tables.print_profile(out.console, found, out.print_table)
    said = chips.sentence(kernel, chips.others(kernel, case, kernel.grid))
    if said:
        out.console.print(said)
    shown = [data.run(name, made) for name, made in runs]
    title, beside = f"{kernel.name} {case}", 1 if baseline else None
    made = Shown(out.text, page(title, shown, beside, sentences=[said] if said else []))
    if html:
        made.save(html)
    return made


def check(
    kernel: Any, reference: Callable, *args: Any, outputs: Callable | None = None, **named: Any
) -> Shown:
    """Whether a kernel is legal and right on adversarial values of the arguments' shapes.

    Args:
        reference: numpy or PyTorch function of the same arguments.
        outputs: makes results comparable (`judge.references.comparable`).

    Raises:
        UsageError: the reference fails.
    """
    from .core.report.tables import estimate_note
    from .errors import UsageError
    from .judge import tables, verdict
    from .judge.references import Reference
    from .lessons import with_pointers
    from .page.write import as_table, page

    if not callable(reference) and (later := [one for one in args if callable(one)]):
        raise UsageError(
            f"{kernel.name}.check got the reference behind the arguments, expected it first; write "
            f"{kernel.name}.check({later[0].__name__}, x), with the arguments for x."
        )
    settings = verdict.Settings(grid=kernel.grid)
    answer = Reference(reference, outputs=outputs)
    found = [verdict.judge(kernel, answer, _case(kernel, args, named), settings)]
    table = tables.verdict_table(found, tables.title(kernel.name, answer, settings))
    shown = as_table(table)
    said = with_pointers("\n".join(tables.sentences(found)))
    note = f"Times: {estimate_note(settings.dma_profile)}."
    out = _Console(tables.EXPENDABLE, "arguments")
    out.print_table(table)
    return Shown(
        f"{out.text}{said}\n{note}", page(kernel.name, [], tables=[shown], sentences=[said, note])
    )


def _case(kernel: Any, args: tuple, named: dict[str, Any]) -> Any:
    """The arguments of a call as a case: a tensor's shape and type, constants as they are."""
    from .core.device import dtypes
    from .core.language.specialisation import is_tensor
    from .judge import cases

    typed = "dtype" in named and "dtype" not in inspect.signature(kernel.function).parameters
    kind = dtypes.to_dtype(named.pop("dtype")).torch if typed else None

    def form(value: Any) -> Any:
        if kind is not None and isinstance(value, tuple):
            return cases.Spec(value, kind)
        if isinstance(value, str) and cases.TENSOR.match(f"{value.replace(',', 'x')}:bf16"):
            return cases.parse_value(value)  # or what a shape without a type is told
        if is_tensor(value):
            return cases.Spec(tuple(value.shape), dtypes.to_dtype(value.dtype).torch)
        return value

    if (
        args and isinstance(args[0], str) and " " in args[0]
    ):  # all of a call, as assert_kernel has it
        args, named = (whole := cases.case(args[0])).positional, dict(whole.named) | named
    return cases.Case(tuple(map(form, args)), tuple((k, form(v)) for k, v in named.items()))


class _Console:
    """Tables of `WIDTH` columns as text; those that do not fit leave out columns of `expendable`,
    and `prose` names the one that may wrap."""

    def __init__(self, expendable: Sequence[str], prose: str) -> None:
        from .console import terminal

        self._file, self._how = io.StringIO(), (expendable, prose, "the page has them")
        self.console = terminal.written_to(self._file, WIDTH, styled=False)

    def print_table(self, table: Any) -> None:
        from .console import terminal

        terminal.print_table(self.console, table, *self._how)

    @property
    def text(self) -> str:
        return self._file.getvalue()
