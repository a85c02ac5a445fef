"""The value of guesses: tokens a step, and how often the guess at each place was right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from harness.processes.workers import SubmissionFailed

Calls = Sequence[Sequence[int]]  # of each: tokens guessed, guesses that were right, draft steps


@dataclass(frozen=True)
class Acceptance:
    """Speculation in one generation or more.

    Attributes:
        method: who guessed.
        length: tokens that a call of several takes.
        calls: of the model behind prefills, and `unguessed` those of them without a guess.
        tokens: that came out of the calls.
        offered: guesses at each place behind the newest token, the first one first.
        accepted: those of them that were right, and all before them, too.
        draft_calls: single-token steps of the draft model.
    """

    method: str
    length: int
    calls: int
    unguessed: int
    tokens: int
    offered: list[int]
    accepted: list[int]
    draft_calls: int = 0

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls if self.calls else 1.0

    def describe(self) -> str:
        """One sentence for the terminal."""
        places = ", ".join(
            f"{right / count:.0%} of {count}"
            for right, count in zip(self.accepted, self.offered)
            if count
        )
        return (
            f"speculation ({self.method}, {self.length} tokens a step): "
            f"{self.tokens_per_call:.2f} tokens a step accepted over {self.calls} steps, "
            f"{self.unguessed} of them without a guess; right by position: {places or 'none'}"
        )


def checked(body: Any, length: int, tokens: int) -> Calls:
    """The calls of one generation of `tokens` tokens as its process tells them.

    Each gives its right guesses and one more token, the last one perhaps without that.
    """
    whole = isinstance(body, list) and all(
        isinstance(call, list)
        and len(call) == 3
        and all(type(number) is int for number in call)
        and 0 <= call[1] <= call[0] < length
        and call[2] >= 0
        for call in body
    )
    if not whole or sum(call[1] + 1 for call in body) - (tokens - 1) not in (0, 1):
        raise SubmissionFailed(
            f"The model fails while it generates: {str(body)[:80]} are no calls that give {tokens} "
            f"tokens with at most {length - 1} guesses each."
        )
    return body


def looked_ahead(body: Any) -> Optional[Acceptance]:
    """Acceptance of a submission that looks ahead by itself, in its first generation of `body`, by
    the calls of its graphs that the driver has seen; None where no call took several tokens."""
    calls = body[0] if isinstance(body, list) and body else []
    tokens = 1 + sum(call[1] + 1 for call in calls)
    length = 1 + max((call[0] for call in calls), default=0)
    if length == 1:
        return None
    return summed("look-ahead", length, [(checked(calls, length, tokens), tokens)])


def summed(method: str, length: int, generations: Sequence[tuple[Calls, int]]) -> Acceptance:
    """Acceptance over several generations: of each its calls and its number of tokens."""
    calls = [call for own, _ in generations for call in own]
    places = range(length - 1)
    return Acceptance(
        method=method,
        length=length,
        calls=len(calls),
        unguessed=sum(guessed == 0 for guessed, _, _ in calls),
        tokens=sum(tokens - 1 for _, tokens in generations),
        offered=[sum(guessed > place for guessed, _, _ in calls) for place in places],
        accepted=[sum(agreed > place for _, agreed, _ in calls) for place in places],
        draft_calls=sum(drafted for _, _, drafted in calls),
    )
