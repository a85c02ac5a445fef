"""Stand-in for the subset of torch_neuronx that Llama model files and the contest driver use."""

from .xla_impl.ops import nki_jit

__all__ = ["nki_jit"]

# The version of SDK 2.21, whose interfaces the stand-in follows.
__version__ = "2.5.1.2.4.0"
