"""Stand-in for the subset of NeuronX Distributed that tensor-parallel inference uses.

Tensor-parallel ranks are threads of one process, or processes of torchrun. `ranks.py`,
`rendezvous.py` and `processes.py` are the stand-in's own part; the other modules carry NxD's names
(reference: the NxD of SDK 2.21, 0.10).
"""

from . import parallel_layers, utils

__all__ = ["parallel_layers", "utils"]
