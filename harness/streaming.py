"""Text on the terminal while it is generated, row by row, and the times of its tokens."""

import time
from collections.abc import Callable, Sequence
from typing import Any


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without the special ones."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class RowText:
    """Turns the growing token list of one row into text that never has to be taken back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that is certain with this token; held back inside a UTF-8 character."""
        self._tokens.append(token)
        text = decoded(self._tokenizer, self._tokens)
        return "" if text.endswith("\ufffd") else self._release(text)

    def rest(self) -> str:
        """Return the text held back, when no further token comes."""
        return self._release(decoded(self._tokenizer, self._tokens))

    def _release(self, text: str) -> str:
        new, self._shown = text[len(self._shown) :], text
        return new


class Stream:
    """Receives each step's tokens, and writes rows one after the other.

    The first unfinished row appears as it grows. Later rows appear when it ends, so several prompts
    never mix on the terminal. A stopping criterion of transformers calls `step`, which works on
    every NxDI version (NxDI 0.1 passes no streamer).
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: Sequence[int],
        headings: Sequence[str],
        write: Callable[[str], Any],
    ) -> None:
        self._rows = [RowText(tokenizer) for _ in headings]
        self._pending = list(headings)  # text of each row that is not on the terminal yet
        self._ended = [False] * len(headings)
        self._stop_tokens = frozenset(stop_tokens)
        self._write = write
        self._current = 0
        self.token_counts = [0] * len(headings)
        self.started = self._last = time.monotonic()
        self.step_seconds: list[float] = []  # from the step before, or from the start

    def step(self, tokens: Sequence[int], seconds: float = 0.0) -> None:
        """One token of every row; tokens of rows that have ended are padding.

        The clock is this process's. A busy one may read two steps at once: each takes at least the
        ``seconds`` that the model's process says.
        """
        now = max(time.monotonic(), self._last + seconds)
        self.step_seconds.append(now - self._last)
        self._last = now
        for row, token in enumerate(tokens[: len(self._rows)]):
            if self._ended[row]:
                continue
            self.token_counts[row] += 1
            self._pending[row] += self._rows[row].add(token)
            if token in self._stop_tokens:
                self._end(row)
        self._flush()

    def finish(self) -> None:
        """Write the rest: no further tokens come."""
        for row, ended in enumerate(self._ended):
            if not ended:
                self._end(row)
        self._flush()

    def _end(self, row: int) -> None:
        self._ended[row] = True
        self._pending[row] += self._rows[row].rest() + "\n"

    def _flush(self) -> None:
        while self._current < len(self._rows):
            text, self._pending[self._current] = self._pending[self._current], ""
            if text:
                self._write(text)
            if not self._ended[self._current]:
                return
            self._current += 1

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return sum(self.step_seconds[:1])

    @property
    def tokens_per_second(self) -> float | None:
        """Steps per second after the first token; None with fewer than two steps."""
        later = self.step_seconds[1:]
        return len(later) / sum(later) if sum(later) else None
