"""The model as the scheduler sees it: calls that block, and a way back after a failure."""

from collections.abc import Sequence
from typing import Any, Protocol

from harness.processes.workers import SubmissionFailed
from harness.session.building import Loaded, build
from harness.session.rows import Draw, Part, Row

_FAILED = "The model fails while it generates"
_SLOTS = "harness.session.slots"


class Lines(Protocol):
    """Cache lines of a model; each call returns when the device is done.

    An error of a call has ended all requests in flight; call `recover` before the next one.
    """

    def prefill(self, line: int, ids: Sequence[int], draw: Draw, adapter: int, **where: Any) -> int:
        """Cache a prompt; the token behind it. `where` are the `blocks` that it gets and how many
        of its tokens they hold already, `computed`, where the cache has no lines."""

    def decode(self, rows: Sequence[Row]) -> list[int]:
        """One step of all lines in use, in ascending order; a token for each."""

    def chunk(self, parts: Sequence[Part]) -> list[int]:
        """Tokens of several sequences at once; a token behind each part."""

    def recover(self) -> None:
        """Make the lines usable again, all of them free."""


class LoadedLines:
    """Lines of a loaded model; the submission's process is started anew where it ended."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def prefill(self, line: int, ids: Sequence[int], draw: Draw, adapter: int, **where: Any) -> int:
        given = dict(line=line, ids=list(ids), draw=draw, adapter=adapter, **where)
        return self._checked(self._call("prefill", **given), 1)[0]

    def decode(self, rows: Sequence[Row]) -> list[int]:
        return self._checked(self._call("decode", rows=list(rows)), len(rows))

    def chunk(self, parts: Sequence[Part]) -> list[int]:
        return self._checked(self._call("chunk", parts=list(parts)), len(parts))

    def recover(self) -> None:
        worker = self._loaded.worker
        if not worker.ended:
            try:
                self._call("forget")
                return
            except SubmissionFailed:  # of torchrun's ranks another one's process may have ended
                worker.close()
        self._loaded = build(self._loaded.session, self._loaded.role)

    def _call(self, function: str, **arguments: Any) -> Any:
        return self._loaded.call(f"{_SLOTS}:{function}", _FAILED, **arguments).body

    def _checked(self, tokens: Any, rows: int) -> list[int]:
        """Check the tokens: one of the vocabulary for each row."""
        vocabulary = self._loaded.session.vocabulary
        whole = isinstance(tokens, list) and len(tokens) == rows
        if not whole or not all(type(t) is int and 0 <= t < vocabulary for t in tokens):
            raise SubmissionFailed(
                f"{_FAILED}: expected one token id below {vocabulary} for each of {rows} rows, got "
                f"{str(tokens)[:80]}."
            )
        return tokens
