"""Stand-in for both packages of this name.

The older one, for XLA, has what model files, drivers and NxD use. The newer one is PyTorch's
device `neuron`; its names (nki_op, wrap_nki, synchronize, ...) load `neuron_cpu.torch_device` when
somebody asks for them.
"""

from typing import Any

from neuron_cpu import announce as _announce
from neuron_cpu.closed import stand_for

from . import contexts
from .buckets import BucketModelConfig
from .tracing import trace
from .xla_impl.ops import nki_jit

__all__ = ["BucketModelConfig", "contexts", "nki_jit", "trace"]

# The version of SDK 2.21, whose interfaces the stand-in follows.
__version__ = "2.5.1.2.4.0"

_autoload = _announce.neuron  # the newer package's entry point of PyTorch


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(_announce.room("names"), name)
    except AttributeError:
        raise AttributeError(f"module 'torch_neuronx' has no attribute '{name}'") from None


stand_for(
    *("torch_neuronx.xla_impl." + name for name in ("bucket_trace", "torchscript")),
    "torch_neuronx.xla_impl.custom_call_targets",
    "nkilib",  # public (aws-neuron/nki-library): a checkout on the path goes first
)
