"""The process that a submission runs in; it answers requests with plain data. Its parent forks it
from a server that has imported the slow modules (`preload`) and nothing of any submission. It runs
functions of the harness only, with a Host as first argument.

What passes between it and the driver stands here, too: messages, each part with its size and form
checked and nothing of them unpickled by the driver; the models' roles; parts of steps.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from harness import console
from harness.errors import UserError, is_refusal, words_of
from harness.inputs import submission
from harness.settings import Settings
from neuron_cpu.console import progress
from neuron_cpu.errors import CompileError
from neuron_cpu.quoting import all_quoted
from neuron_cpu.sandbox import forked, limits

EVENT, PROGRESS, RESULT, REFUSED, FAILED = "event", "progress", "result", "refused", "failed"
_NO_MEMORY = "can't allocate memory"  # of PyTorch
STOP = pickle.dumps("stop")  # instead of a request: the step that is being done is the last one


QUANTISED = "quantised"  # folder of a quantised checkpoint, beside those of the roles


class Role(str, Enum):
    """Which model; its value names the compiled folder."""

    NKI = "nki"
    TORCH = "torch"
    SHADOW = "shadow"
    BASELINE = "baseline"
    PRECISE = "precise"
    DRAFT = "draft"

    __str__ = str.__str__

    @property
    def words(self) -> str:
        return _TITLES[self]


_TITLES = {
    Role.NKI: "model with NKI kernels",
    Role.TORCH: "model without NKI kernels",
    Role.BASELINE: "baseline model",
    Role.PRECISE: "baseline model in fp32",
    Role.DRAFT: "draft model",
    Role.SHADOW: "model without NKI kernels in fp32",
}


# The SDK's own models, which run apart from the submission.
BASELINES = (Role.BASELINE, Role.PRECISE)


MOST_HEADER_BYTES = 1 << 26
MOST_ARRAY_BYTES = 1 << 34  # of all arrays of a message


class WireError(Exception):
    """The bytes received are no message; `str(error)` says why."""


@dataclass(frozen=True)
class Message:
    """One message: the request that it answers, its kind, its data and its arrays."""

    request: int
    kind: str
    body: Any
    arrays: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """The job of a process for its whole life.

    Attributes:
        eos_token_id: the tokenizer's, for models without generation settings.
        source: the submission's file; None for the SDK's own Llama.
        scratch: folder that it may write to.
        limits: None where it runs in the driver's own process.
        confined: whether it may write to `scratch` only.
        alone: whether the folder around `scratch` was made for it.
        counts: whether it only traces graphs, in a process in which nothing is generated.
        model_type: of config.json; which class of the submission runs.
    """

    settings: Settings
    model_path: Path
    pad_token_id: int
    eos_token_id: int | None
    source: Path | None
    scratch: Path
    limits: limits.Limits | None
    confined: bool
    alone: bool = False
    counts: bool = False
    model_type: str = "llama"


@dataclass
class Answer:
    """The result of a function of this process: data, and fp32 arrays."""

    body: Any
    arrays: list[np.ndarray] = field(default_factory=list)


@dataclass
class Host:
    """The inside of the process: the submission's module and the models built from it.

    `stopped` says whether the driver has asked for an early end.
    """

    job: Job
    emit: Callable[[Any], None]
    stopped: Callable[[], bool] = lambda: False
    models: dict[Role, Any] = field(default_factory=dict)
    _module: ModuleType | None = None

    @property
    def module(self) -> ModuleType:
        """The submission, imported once; or the SDK's own Llama."""
        if self._module is None:
            if self.job.source is None:
                module, _ = submission.BASELINES[self.job.model_type]
                self._module = importlib.import_module(module)
            else:
                self._module = submission.load(self.job.source, self.job.model_type)
        return self._module

    @property
    def model_class(self) -> Any:
        """The module's class for models of the job's type."""
        if self.job.source is None:
            return getattr(self.module, submission.BASELINES[self.job.model_type][1])
        return getattr(self.module, submission.MODEL_CLASSES[self.job.model_type])

    @contextlib.contextmanager
    def told_as_the_submission(self, what: str) -> Iterator[None]:
        """Turn an error into a refusal: `what`, and the submission's line that raised. A full disk
        stays an OSError, unless the submission's own line met it."""
        try:
            yield
        except CompileError as error:
            raise UserError(self.by_flags(str(error))) from error
        except BaseException as error:
            full_disk = isinstance(error, OSError) and not self.passed(error)
            if is_refusal(error) or full_disk or isinstance(error, KeyboardInterrupt):
                raise
            raise UserError(f"{what}: {self.where(error)}.") from error

    def by_flags(self, told: str) -> str:
        """Name the driver's options in a refusal of a graph that is too large."""
        chunk = "prefill-chunk" if self.job.settings.prefill_chunk else "speculation-length"
        told = told.replace("choose a speculation_length of", f"choose a --{chunk} of")
        return told.replace("choose a max_context_length of", "choose a --max-context-length of")

    def passed(self, error: BaseException) -> bool:
        """Whether the error passed a line of the submission."""
        return bool(self.job.source and submission.place_of(error, self.job.source))

    def where(self, error: BaseException) -> str:
        """Which line of the submission or of this project's baseline raised what, or that the
        SDK's own model did."""
        job, swaps = self.job, self.job.settings.swap is not None
        source = job.source or (None if swaps else submission.baseline_file(job.model_type))
        if source is None:
            whose = "transformers'" if swaps else "the SDK's own"
            return f"{whose} model {submission.raised(error)}"
        return submission.where(error, source)


@contextlib.contextmanager
def layers_told(root: Any) -> Iterator[None]:
    """Progress of a model's call: which of its layers it has run, told at most once a second."""
    lists = [m for m in root.modules() if type(m).__name__ == "ModuleList"]
    layers, last = max(lists, key=len, default=()), time.monotonic()

    def tell(number: int) -> None:
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            progress.report("layers", number, len(layers))

    hooks = [
        layer.register_forward_hook(lambda *_, number=number: tell(number))
        for number, layer in enumerate(layers, 1)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(host: Host, function: str, arguments: Mapping[str, Any]) -> Answer:
    """Call `module:name` of the harness with the host and the arguments."""
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(host, **arguments)
    return answer if isinstance(answer, Answer) else Answer(answer)


def main(
    requests: Connection,
    replies: Connection,
    output: Connection,
    job: Job,
    environment: Mapping[str, str],
) -> None:
    """Serve until the parent closes the connection; the process ends without cleaning up."""
    os.environ.clear()
    os.environ.update(environment)
    assert job.limits is not None
    forked.begin(job.limits, requests, replies, output=output)
    tempfile.tempdir = None  # what the fork server has found before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if job.confined:
        limits.confine([job.scratch])
    line = _Line(replies)
    _forward_progress(line)
    # while a request is being answered, nothing else comes than the wish to stop
    host = Host(job, lambda event: line.send(EVENT, event), requests.poll)
    if "evaluate" in job.settings.mode:  # beside the baseline's process, whose threads would spin
        torch = importlib.import_module("torch")
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    while True:
        try:
            received = requests.recv_bytes()  # the parent's
        except (EOFError, OSError):
            os._exit(0)
        if received == STOP:  # what it was about has ended
            continue
        line.request, function, arguments = pickle.loads(received)
        _serve(host, line, function, arguments)


class _Line:
    """Messages to the parent, one at a time: ranks are threads and report progress, too."""

    def __init__(self, replies: Connection) -> None:
        self._replies, self._turn = replies, threading.Lock()
        self.request = 0  # that is being answered

    def send(self, kind: str, body: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        with self._turn:
            try:
                send(self._replies, self.request, kind, body, arrays)
            except OSError:  # the connection is gone: the driver sees that, and nobody hears why
                os._exit(1)


def _serve(host: Host, line: _Line, function: str, arguments: Mapping[str, Any]) -> None:
    """Answer one request; whatever the submission raises, exits included, is an answer."""
    try:
        answer = run(host, function, arguments)
        _flush()
        line.send(RESULT, answer.body, answer.arrays)
    except BaseException as error:
        _flush()
        if host.job.settings.debug:
            traceback.print_exc()
        kind, told = FAILED, host.where(error)
        if is_refusal(error):
            kind, told = REFUSED, host.by_flags(words_of(error))
        line.send(kind, told.rstrip(".") + _of_memory(error, host.job))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _of_memory(error: BaseException, job: Job) -> str:
    """The advice for a process that ran into its limit."""
    chain: list[BaseException] = []  # which the submission may have tied into a ring
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__
    lacking = [e for e in chain if isinstance(e, MemoryError) or _NO_MEMORY in str(e)]
    if not lacking or job.limits is None:
        return "."
    limit = job.limits.memory_bytes / 2**30
    return f"; its memory is limited to {limit:.1f} GiB, which --memory-limit changes."


def _forward_progress(line: _Line) -> None:
    """Progress records of the SDK's stand-in go to the parent, which shows them."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            state = getattr(record, "progress", None)
            if isinstance(state, dict):
                line.send(PROGRESS, state)

    logger = logging.getLogger(console.PROGRESS_LOGGER)
    logger.addHandler(Forward())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def send(
    connection: Connection, request: int, kind: str, body: Any, arrays: Sequence[np.ndarray] = ()
) -> None:
    """Write one message."""
    shapes = [list(array.shape) for array in arrays]
    head = {"request": request, "kind": kind, "body": body, "shapes": shapes}
    connection.send_bytes(json.dumps(head).encode())
    for array in arrays:
        connection.send_bytes(array.astype(np.float32).tobytes())


def receive(pipe: forked.Talk, deadline: float) -> Message:
    """Read one message until a point in time (monotonic).

    Raises:
        TimeoutError: it is not whole by then.
        EOFError: the other side is gone.
        WireError: what arrived is no message.
    """
    try:
        head = json.loads(pipe.receive(MOST_HEADER_BYTES, deadline))
        request, kind, body, shapes = (head[k] for k in ("request", "kind", "body", "shapes"))
        if not isinstance(kind, str) or type(request) is not int:
            raise ValueError("the kind is no text or the request no number")
        if 4 * sum(map(_elements, shapes)) > MOST_ARRAY_BYTES:
            raise ValueError(f"arrays of more than {MOST_ARRAY_BYTES} bytes")
        words = all_quoted(body, MOST_HEADER_BYTES, lines=True)
        return Message(request, kind, words, [_array(pipe, shape, deadline) for shape in shapes])
    except (EOFError, TimeoutError):
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error


def _elements(shape: Any) -> int:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{str(shape)[:80]} is no shape")
    return math.prod(shape)


def _array(pipe: forked.Talk, shape: Any, deadline: float) -> np.ndarray:
    """One fp32 array whose bytes follow."""
    held = pipe.receive(4 * _elements(shape), deadline)
    return np.frombuffer(held, dtype=np.float32).reshape(shape)


class Draw(NamedTuple):
    """How one token is chosen; the same draw of the same logits gives the same token.

    Attributes:
        temperature: 0 takes the best token.
        top_k: best tokens that are drawn from; 0 means all.
        top_p: probability mass that tokens are drawn from.
        number: of the token within its answer.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    number: int


class Row(NamedTuple):
    """One line's part of a decode step: its newest token, and the position that it takes.

    `adapter` is the number of a low-rank adapter, 0 the model itself; `blocks` of the cache are
    the line's, where there are no lines in it.
    """

    line: int
    token: int
    position: int
    draw: Draw
    adapter: int
    blocks: tuple[int, ...] = ()


class Part(NamedTuple):
    """One sequence's part of a chunk: tokens of its prompt, or its newest one.

    `start` tokens before them are cached; `draw` chooses the token behind the last one.
    """

    tokens: tuple[int, ...]
    start: int
    draw: Draw
    blocks: tuple[int, ...]


def check_numbers(logits: Any) -> None:
    """Refuse logits of which some are NaN: no token that is chosen among them means anything."""
    if logits.isnan().any():
        raise UserError(
            "The model's logits are NaN, so it has no answer: its checkpoint holds NaN, or a "
            "kernel makes them; --mode diff and --mode validate tell where."
        )
