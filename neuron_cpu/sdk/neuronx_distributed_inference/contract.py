"""Which version of NxDI the stand-in behaves as, and what differs between the versions.

`NEURON_CPU_NXDI` holds the version (default 0.1). It is read whenever a configuration or a model
is built, so a test may change it between models. Sources of the differences: the tags v0.1.0 to
v0.6.10598 of aws-neuron/neuronx-distributed-inference.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Tuple

from neuron_cpu.errors import StandInError

VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")
DEFAULT_VERSION = "0.1"
ENVIRONMENT_VARIABLE = "NEURON_CPU_NXDI"
# NeuronConfig fields that some versions lack, and the versions that have them.
FIELD_VERSIONS = {
    "quantized_kernel_lower_bound": "0.1",
    "trace_tokengen_model": "0.1",
    "is_paged_attention": "0.1",
    "logical_nc_config": "0.2 or later",
    "quantize_clamp_bound": "0.2 or later",
    "modules_to_not_convert": "0.2 or later",
    "activation_quantization_type": "0.2 or later",
    "k_cache_transposed": "0.3 or later",
    "attn_tkg_builtin_kernel_enabled": "0.3 or later",
    "qkv_kernel_fuse_residual_add": "0.3 or later",
    "fused_rmsnorm_skip_gamma": "0.3 or later",
}


@dataclass(frozen=True)
class Contract:
    """Behaviour of one NxDI version; `minor` is the second number of the version."""

    minor: int

    @property
    def version(self) -> str:
        return f"0.{self.minor}"

    @property
    def passes_residual(self) -> bool:
        """Layers get a `residual` keyword and return five items instead of four."""
        return self.minor >= 3

    @property
    def body_updates_cache(self) -> bool:
        """`get_model_output` reads and writes the cache itself."""
        return self.minor >= 3

    @property
    def pads_to_bucket(self) -> bool:
        """The wrapper pads to the first bucket strictly above the mask length (0.1: see 2.9)."""
        return self.minor >= 2

    @property
    def passes_dummies(self) -> bool:
        """The traced forward gets seven inputs instead of five."""
        return self.minor >= 2

    @property
    def attention_takes_config(self) -> bool:
        """`NeuronAttentionBase(config, *, hidden_size, ...)` builds its own projections."""
        return self.minor >= 4

    @property
    def saves_sharded_checkpoint(self) -> bool:
        """Default of `save_sharded_checkpoint`."""
        return self.minor <= 2

    @property
    def removed_config_fields(self) -> Tuple[str, ...]:
        """NeuronConfig fields of 0.1 that this version no longer has."""
        if self.minor == 1:
            return ()
        return tuple(name for name, versions in FIELD_VERSIONS.items() if versions == "0.1")


def contract() -> Contract:
    """The version in force; a StandInError where the environment names none of VERSIONS."""
    version = os.environ.get(ENVIRONMENT_VARIABLE, "") or DEFAULT_VERSION
    if version not in VERSIONS:
        raise StandInError(
            f"{ENVIRONMENT_VARIABLE} names an unknown NxDI version, expected one of "
            f"{', '.join(VERSIONS)}, got {version!r}; unset it for {DEFAULT_VERSION}."
        )
    return Contract(minor=int(version.split(".")[1]))
