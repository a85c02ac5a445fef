"""Stand-in for both packages of this name.

The older one, for XLA, has what model files, drivers and NxD use. The newer one is PyTorch's
device `neuron`; its names (nki_op, wrap_nki, synchronize, ...) load `neuron_cpu.torch_device` when
somebody asks for them.
"""

from typing import Any

from neuron_cpu import announce as _announce
from neuron_cpu.closed import stand_for

from . import contexts, tracing
from .buckets import BucketModelConfig
from .tracing import (
    DataParallel,
    async_load,
    dynamic_batch,
    lazy_load,
    move_trace_to_device,
    multicore_context,
    neuron_cores_context,
    replace_weights,
    set_multicore,
    set_neuron_cores,
    trace,
)
from .xla_impl.ops import nki_jit

__all__ = [
    "BucketModelConfig",
    "DataParallel",
    "async_load",
    "contexts",
    "dynamic_batch",
    "lazy_load",
    "move_trace_to_device",
    "multicore_context",
    "neuron_cores_context",
    "nki_jit",
    "replace_weights",
    "set_multicore",
    "set_neuron_cores",
    "trace",
]

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


tracing.install()
stand_for(
    *("torch_neuronx.xla_impl." + name for name in ("bucket_trace", "torchscript")),
    "torch_neuronx.xla_impl.custom_call_targets",
    "nkilib",  # public (aws-neuron/nki-library): a checkout on the path goes first
)
