"""Finds the roundings that one fused graph would not have, and the tokens that they change.

Opaque kernels break a compiler's fusion: tensors that cross their boundary are in memory, in bf16.
The model writes a text with every boundary open, so that fp32 values pass; then it reads that text
once for each boundary, which alone rounds, and once with all of them closed. A boundary is safe
where no logit changes. Operators of PyTorch can be asked for as well: each is a place where a
kernel could be cut in. Logits count as a device hands them on, in bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from harness.processes.workers import SubmissionFailed
from harness.session.building import Loaded

ALL = "all of them"
_MEASURE = "harness.figures.boundaries:measure"


@dataclass(frozen=True)
class Boundary:
    """One boundary, or all.

    Attributes:
        where, what: kernel and its tensor, or module and its operator.
        logits: share of those behind the prompt that are others.
        tokens: of the text, of which the best one is another.
        change: the largest of a logit.
    """

    where: str
    what: str
    logits: float
    tokens: int
    change: float

    @property
    def verdict(self) -> str:
        if self.tokens:
            return "changes tokens"
        return "changes logits" if self.change else "safe"


def measure(loaded: Loaded, ids: Sequence[int], new_tokens: int) -> list[Boundary]:
    """All boundaries in the order in which they run; without kernels the operators' boundaries."""
    what = "The boundaries cannot be compared"
    answer = loaded.call(_MEASURE, what, ids=list(ids), new_tokens=new_tokens)
    try:
        return TypeAdapter(list[Boundary]).validate_python(answer.body)
    except ValueError as error:
        raise SubmissionFailed(f"{what}: its process gave no figures.") from error
