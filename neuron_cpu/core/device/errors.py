"""Refusals and warnings: one sentence with rule, place, expected, got and the mend.

Identifiers are those of aws-neuron-sdk v2.21.1 general/nki/api/nki.errors.rst (and of its versions
up to v2.26.0); identifiers that begin with ``sim_`` name checks of this simulator only.
"""

import functools
import importlib.util
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any


class NkiError(Exception):
    """A kernel that compiler or hardware would refuse, or silently miscompute.

    Attributes:
        identifier: the documented error name, e.g. ``err_num_partition_mismatch``.
        source: ``file:line`` in the kernel, or None outside of one.
    """

    message: str

    def __init__(self, identifier: str, message: str, source: str | None = None) -> None:
        self.identifier, self.source = identifier, source
        say(self, message)


def say(error: NkiError, message: str) -> None:
    """Have an error say ``message``, at its place and with its identifier."""
    error.message = " ".join(message.splitlines())  # what it quotes may have several lines
    where = f"{error.source}: " if error.source else ""
    error.args = (f"{where}{error.message} [{error.identifier}]",)


class NkiSyntaxError(NkiError, SyntaxError):
    """Size violations: the vendor raises these as SyntaxError, so both ``except`` forms work."""

    def __str__(self) -> str:
        return str(self.args[0])


def _in_a_cell(shell: Any, kind: type, error: Any, at: Any, tb_offset: Any = None) -> None:
    """Show a size violation as any NkiError: IPython leaves out the lines of a SyntaxError."""
    shown = NkiError(error.identifier, error.message, error.source)
    shell.showtraceback((type(kind.__name__, (NkiError,), {}), shown, at), tb_offset=tb_offset)


_shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
if _shell is not None:
    _shell.set_custom_exc((NkiSyntaxError,), _in_a_cell)


class NkiWarning(UserWarning):
    """A rule that no public source decides, or a known defect: the kernel is unproven."""


class NkiAdvice(NkiWarning):
    """A doubtful construct that devices have run with right results: the kernel stays legal."""


SIZE_ERRORS = frozenset(
    {"err_num_partition_exceed_arch_limit", "err_size_of_dimension_exceed_arch_limit"}
)
_local = threading.local()


def refuse(identifier: str, message: str, source: str | None = None) -> NkiError:
    """The exception to raise for ``identifier``; the place defaults to the line being traced."""
    place = source if source is not None else current_place()
    kind = NkiSyntaxError if identifier in SIZE_ERRORS else NkiError
    return kind(identifier, message, place)


def strict() -> bool:
    """True where NKI_CPU_STRICT=1 makes warnings errors."""
    return os.environ.get("NKI_CPU_STRICT") == "1"


def warn(identifier: str, message: str, source: str | None = None, advice: bool = False) -> None:
    """Report a doubtful construct once per place; an error where NKI_CPU_STRICT=1.

    ``advice``: devices have run the construct with right results; strict mode lets it pass, too.

    ``NKI_CPU_SILENCE`` (comma-separated identifiers) and ``silence()`` switch single ones off.

    Raises:
        NkiError: a public compiler or device refused it, for the chip and release in force
            (refusals.py), or warnings are errors.
    """
    _local.warned = warned() + 1
    silenced = set(filter(None, os.environ.get("NKI_CPU_SILENCE", "").split(",")))
    if identifier in silenced or identifier in switched_off():
        return
    known = _consulted(identifier)
    if known is not None:
        fault, *mend = message.rsplit("; ", 1)
        raise refuse(identifier, "; ".join([f"{fault} ({known.told()})", *mend]), source)
    # Python's own filter shows each message once, and the place is part of the message.
    place = source if source is not None else current_place()
    if strict() and not advice:
        raise NkiError(identifier, message, place)
    said = place, re.sub(r"\b\d+\b", "", message)  # of a loop's iterations one
    before = _local.said if getattr(_local, "kernel", None) else set()
    if said not in before:
        before.add(said)
        _show(f"{message} [{identifier}]", place, NkiAdvice if advice else NkiWarning)


def warned() -> int:
    """How often this thread has warned, switched-off warnings and repeated ones included."""
    return getattr(_local, "warned", 0)


def _unknown(identifier: str) -> Any:
    return None


_consulted: Callable[[str], Any] = _unknown  # the entry that a check of a name refuses by


def consult(table: Callable[[str], Any]) -> None:
    """Have warnings ask the table of refusals, which is made of what this module has."""
    global _consulted
    _consulted = table


_PLACE = re.compile(r"(?:(?P<kernel>.+) \()?(?P<file>[^()]+):(?P<line>\d+)\)?")
_shown: dict[Any, Any] = {}  # what Python's filter has shown already


def _show(text: str, place: str | None, kind: type[NkiWarning]) -> None:
    """Warn from the kernel's own file and line, as if they called `warnings.warn`."""
    found = _PLACE.fullmatch(place or "")
    if found is None:
        where = f"{place}: " if place else ""
        warnings.warn(where + text, kind, stacklevel=4)
        return
    warnings.warn_explicit(
        f"{found['kernel']}: {text}" if found["kernel"] else text,
        kind,
        found["file"],
        int(found["line"]),
        registry=_shown,
    )


@contextmanager
def within(holder: Any, **values: Any) -> Iterator[None]:
    """Inside the block ``holder`` has these values, then those of before (None where it had none);
    a ``threading.local`` has them in this thread."""
    before = {name: getattr(holder, name, None) for name in values}
    vars(holder).update(values)
    try:
        yield
    finally:
        vars(holder).update(before)


def switched_off() -> frozenset[str]:
    """The warnings that ``silence`` switches off in this thread."""
    return getattr(_local, "silenced", None) or frozenset()


def silence(*identifiers: str) -> AbstractContextManager[None]:
    """Switch the named warnings off inside the block (this thread only)."""
    return within(_local, silenced=switched_off() | set(identifiers))


def only_timed() -> AbstractContextManager[None]:
    """Inside the block undefined values are a warning: no time depends on them (this thread)."""
    return within(_local, timed=True)


def for_time() -> bool:
    """True inside `only_timed`."""
    return getattr(_local, "timed", None) is True


_INTERNAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # neuron_cpu/core
_PACKAGE = os.path.dirname(_INTERNAL)
_BESIDE = tuple(os.path.join(_PACKAGE, *path) for path in (("sdk", "neuronxcc"), ("torch_device",)))
_CALLERS = tuple(os.path.join(_PACKAGE, name) for name in ("commands", "judge", "tune"))


# numpy, PyTorch and JAX call back into tiles that they are given.
_LIBRARIES = tuple(
    os.path.dirname(spec.origin) + os.sep
    for spec in map(importlib.util.find_spec, ("numpy", "torch", "jax"))
    if spec is not None and spec.origin is not None
)


_PYTHON = os.path.dirname(os.__file__) + os.sep  # formatters and copies call into tiles, too


@functools.cache  # asked for every instruction recorded
def is_internal(filename: str) -> bool:
    """True for files of the simulator and of libraries, which no message should point at."""
    if filename.startswith(_PYTHON) and "site-packages" not in filename:
        return True
    return filename.startswith((_INTERNAL, *_BESIDE, *_LIBRARIES))


def user_frame(depth: int = 1) -> FrameType | None:
    """The innermost Python frame outside of the simulator."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def type_name(value: object) -> str:
    """The type of a value, with its package where that is another one: torch.Tensor."""
    kind = type(value)
    return kind.__name__ if kind.__module__.startswith("neuron_cpu") else str(kind)[8:-2]


def users_frames(error: BaseException) -> TracebackType | None:
    """A traceback without the simulator's own entries: the last one is the user's line."""
    found, at = [], error.__traceback__
    while at is not None:
        found.append(at)
        at = at.tb_next
    kept: TracebackType | None = None
    inner = None
    for at in reversed(found):
        line = at.tb_frame.f_code.co_filename, at.tb_lineno
        if line != inner and not is_internal(line[0]):
            kept = TracebackType(kept, at.tb_frame, at.tb_lasti, at.tb_lineno)
            inner = line
    place = _PLACE.fullmatch(getattr(error, "source", None) or "")
    if kept is None and place is not None:
        return _entry(place["file"], int(place["line"]))
    return kept or users_line()


def users_line() -> TracebackType | None:
    """A traceback of one entry: the user's line that runs, which notebooks show as the last."""
    frame = user_frame(2)
    return None if frame is None else _entry(frame.f_code.co_filename, frame.f_lineno)


def from_users_line(error: BaseException) -> TracebackType | None:
    """The traceback of Python's own error from the first line of the user's on, or all of it."""
    at = error.__traceback__
    while at is not None and is_internal(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return error.__traceback__ if at is None else at


def _entry(file: str, line: int) -> TracebackType | None:
    """A traceback of one entry, at a line that was found after the kernel's body had run."""
    try:
        exec(compile("\n" * (line - 1) + "raise NotImplementedError", file, "exec"), {})
    except NotImplementedError as raised:
        return raised.__traceback__ and raised.__traceback__.tb_next
    return None


def name_kernel(name: str | None) -> str | None:
    """Set the kernel that this thread is tracing, for places in messages; returns the kernel
    before."""
    before = getattr(_local, "kernel", None)
    _local.kernel, _local.said = name, set()
    return before


def executing(place: str) -> AbstractContextManager[None]:
    """Inside the block this thread executes the instruction that was recorded at ``place``."""
    return within(_local, executing=place)


def looked_at_by(record: Callable[..., None]) -> AbstractContextManager[None]:
    """Inside the block ``record`` gets the looks at values, so that it can repeat them."""
    return within(_local, looks=record)


def look_at(look: Callable[[Any], None], values: Any) -> None:
    """Run ``look`` on a tensor's array, which may warn, where an instruction's line is known."""
    place, record = current_place(), getattr(_local, "looks", None)
    if place is not None and record is not None:
        record(look, place, values)
    elif place is not None:
        look(values.numpy())


def current_place() -> str | None:
    """``kernel (file:line)`` being traced or executed in this thread, None outside of a kernel."""
    if getattr(_local, "executing", None) is not None:
        return _local.executing
    kernel = getattr(_local, "kernel", None)
    frame = user_frame(2) if kernel is not None else None
    if frame is None or frame.f_code.co_filename.startswith(_CALLERS):  # before its body runs
        return kernel
    return f"{kernel} ({frame.f_code.co_filename}:{frame.f_lineno})"
