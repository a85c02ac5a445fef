"""Stand-in for the part of NeuronX Distributed that tensor-parallel inference uses.

Ranks are threads of one process, or processes of torchrun. Names are those of the NxD of SDK 2.21
(0.10).
"""

from . import parallel_layers, utils

__all__ = ["parallel_layers", "utils"]
