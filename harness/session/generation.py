"""Tokens from a loaded model: the driver's side, which keeps the clock and checks answers."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from harness import console
from harness.inputs.prompts import next_multiple
from harness.processes.workers import Answer, Stop, SubmissionFailed
from harness.session.building import Loaded
from harness.session.opening import Session
from harness.settings import Settings

_GENERATE = "harness.session.model:generate"
FAILED = "The model fails while it generates"
_LONGEST_STEP = 1e6  # seconds
_SHOWN_SECONDS = 2.0  # a prompt that took longer says so
OnStep = Callable[[list[int], float], Any]  # tokens of the rows, and seconds that they took


@contextlib.contextmanager
def reading(on_step: OnStep) -> Iterator[OnStep]:
    """`on_step`, with progress shown until the first token comes: a long prompt takes minutes."""
    with contextlib.ExitStack() as shown:
        shown.enter_context(console.step("Reading the prompt", least_seconds=_SHOWN_SECONDS))

        def step(tokens: list[int], seconds: float) -> None:
            shown.close()  # before text is written
            on_step(tokens, seconds)

        yield step


def generate_tokens(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    on_step: OnStep | None = None,
    *,
    fixed_length: bool = False,
    stop: Stop = lambda: False,
) -> list[list[int]]:
    """At most `new_tokens` tokens behind each prompt, one list for each step.

    `on_step` gets the newest token of every row after each step; rows that have ended get padding.
    `fixed_length` suppresses end tokens, so that every row gets all `new_tokens`. Once `stop` is
    true no further step begins, except one that the model has begun.
    """
    steps, _ = _generate(loaded, prompt_ids, new_tokens, on_step, False, fixed_length, False, stop)
    return steps


def greedy_scores(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    on_step: OnStep | None = None,
) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens behind each prompt, a list a step, and their logits [new_tokens, B, V] fp32.

    End tokens are masked to -inf, so that the length is fixed.
    """
    steps, answer = _generate(loaded, prompt_ids, new_tokens, on_step, True, True, True)
    arrays = answer.arrays
    expected = (new_tokens, len(prompt_ids), loaded.session.vocabulary)
    if len(arrays) != 1 or arrays[0].shape != expected:
        shapes = [array.shape for array in arrays]
        raise SubmissionFailed(f"{FAILED}: expected logits of shape {expected}, got {shapes}.")
    return steps, arrays[0]


def speculative_tokens(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    on_step: OnStep | None = None,
) -> tuple[int, Any]:
    """`generate_tokens` of a fixed length; returns the tokens of a row, and the process's report of
    the calls that gave them."""
    steps, answer = _generate(loaded, prompt_ids, new_tokens, on_step, False, True, False)
    return len(steps), answer.body


def _generate(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    on_step: OnStep | None,
    greedy: bool,
    fixed_length: bool,
    scores: bool,
    stop: Stop = lambda: False,
) -> tuple[list[list[int]], Answer]:
    steps: list[list[int]] = []

    def step(event: Any) -> None:
        tokens, seconds = _parts(event)
        check_step(loaded.session, tokens, len(prompt_ids))
        if len(steps) == new_tokens:
            raise SubmissionFailed(f"{FAILED}: it goes on after {new_tokens} tokens.")
        steps.append(tokens)
        if on_step is not None:
            on_step(tokens, seconds)

    answer = loaded.call(
        _GENERATE,
        FAILED,
        step,
        stop=stop,
        prompt_ids=[list(ids) for ids in prompt_ids],
        new_tokens=new_tokens,
        greedy=greedy,
        fixed_length=fixed_length,
        scores=scores,
    )
    if not steps or (fixed_length and len(steps) != new_tokens):
        raise SubmissionFailed(f"{FAILED}: expected {new_tokens} tokens, got {len(steps)}.")
    return steps, answer


def _parts(event: Any) -> tuple[Any, float]:
    """The contents of an event: tokens, which are checked later, and seconds of a clock."""
    if isinstance(event, list) and len(event) == 2:
        tokens, seconds = event
        if isinstance(seconds, float) and 0 <= seconds < _LONGEST_STEP:
            return tokens, seconds
    raise SubmissionFailed(
        f"{FAILED}: expected tokens and the seconds that they took, got {str(event)[:80]}."
    )


def check_step(session: Session, tokens: Any, rows: int) -> None:
    """Refuse anything but one token of the vocabulary for each row."""
    whole = isinstance(tokens, list) and len(tokens) == rows
    if not whole or not all(type(t) is int and 0 <= t < session.vocabulary for t in tokens):
        raise SubmissionFailed(
            f"{FAILED}: expected one token id below {session.vocabulary} for each of {rows} "
            f"rows, got {str(tokens)[:80]}."
        )


def new_token_limit(settings: Settings, prompt_ids: Sequence[Sequence[int]]) -> int:
    """How many tokens fit behind the longest prompt of a batch, or fewer where asked."""
    room = settings.seq_len - max(len(ids) for ids in prompt_ids)
    if settings.max_new_tokens is not None and settings.max_new_tokens > room:
        _tell_cut(settings.max_new_tokens, room, settings.seq_len)
    return min(room, settings.max_new_tokens or room)


@functools.cache  # once a run
def _tell_cut(asked: int, room: int, seq_len: int) -> None:
    console.say(
        f"--max-new-tokens {asked} is cut to {room}, what --seq-len {seq_len} holds behind the "
        f"prompt; --seq-len {next_multiple(seq_len + asked - room)} holds all."
    )
