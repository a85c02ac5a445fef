"""The input of one cache line for a step; the driver and the submission's process share it."""

from typing import Any, NamedTuple

from harness.errors import UserError


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
