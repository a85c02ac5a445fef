"""Stand-in for the part of torch_neuronx that model files, drivers and NxD use."""

from neuron_cpu.closed import stand_for

from . import contexts
from .buckets import BucketModelConfig
from .tracing import trace
from .xla_impl.ops import nki_jit

__all__ = ["BucketModelConfig", "contexts", "nki_jit", "trace"]

# The version of SDK 2.21, whose interfaces the stand-in follows.
__version__ = "2.5.1.2.4.0"

stand_for(
    *("torch_neuronx.xla_impl." + name for name in ("bucket_trace", "torchscript")),
    "torch_neuronx.xla_impl.custom_call_targets",
    "nkilib",  # public (aws-neuron/nki-library): a checkout on the path goes first
)
