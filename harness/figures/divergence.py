"""Distances of the kernels from PyTorch, module by module, and the kernel to suspect.

The prompt runs through the submission with kernels. Whenever one of its modules has run, the same
module without kernels runs on the same inputs, once in bf16 and once in fp32: that is the module's
own error, free of what it inherited.

The fp32 shadow stands for the truth. A kernel is suspected where its distance from the truth is
more than SUSPICIOUS times that of PyTorch in bf16, and more than one bf16 spacing, or where a value
is not finite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from harness.figures.graphs import CHUNK, DECODE, PREFILL
from harness.processes.workers import SubmissionFailed
from harness.session.building import Loaded

SUSPICIOUS = 3.0
PHASES = {PREFILL: "prefill", CHUNK: "chunk", DECODE: "decode"}
NKI_TOKENS = 2  # of the run with kernels: a prefill and one decode step
_MEASURE = "harness.figures.repeater:measure"


@dataclass(frozen=True)
class Error:
    """Distances of one tensor from the fp32 shadow, relative to the shadow's RMS.

    `broken` is the index of the first element that is NaN or infinite with kernels and finite in
    fp32; `nki` and `ulps` are infinite then.
    """

    phase: str
    module: str
    nki: float
    torch: float
    ulps: float  # RMS distance of the NKI result in bf16 spacings at the shadow's RMS
    broken: list[int] | None = None

    @property
    def ratio(self) -> float:
        """How much farther from the truth the kernels are than PyTorch in bf16."""
        if self.broken is not None:
            return math.inf
        if self.torch == 0:
            return 1.0 if self.nki == 0 else math.inf
        return self.nki / self.torch

    @property
    def undefined(self) -> bool:
        """Whether the fp32 result itself is not finite, so that nothing can be compared."""
        return math.isnan(self.nki)

    @property
    def suspicious(self) -> bool:
        return self.broken is not None or (self.ratio > SUSPICIOUS and self.ulps > 1)


def measure(loaded: Loaded, ids: Sequence[int]) -> list[Error]:
    """Each module's own error on one prompt, in the order of their ends; the three models must be
    built in the same process."""
    what = "The models cannot be compared"
    body: Any = loaded.call(_MEASURE, what, ids=list(ids)).body
    try:
        return TypeAdapter(list[Error]).validate_python(body)
    except ValueError as error:
        raise SubmissionFailed(f"{what}: its process gave no figures.") from error
