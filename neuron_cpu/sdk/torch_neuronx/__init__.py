"""Stand-in for the subset of torch_neuronx that model files and drivers use."""

from .tracing import trace
from .xla_impl.ops import nki_jit

__all__ = ["nki_jit", "trace"]

# The version of SDK 2.21, whose interfaces the stand-in follows.
__version__ = "2.5.1.2.4.0"
