"""The models of one session: the submission's variants, and the models compared with them."""

from enum import Enum

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
