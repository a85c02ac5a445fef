"""``nki.collectives``: operations between the ranks of a replica group.

Source of names: aws-neuron-sdk v2.32.0, nki/api/nki/collectives/__init__.py.
"""

from neuron_cpu.core.current.collectives import ReplicaGroup
from neuron_cpu.core.current.releases import exported as _exported

globals().update(_exported("nki.collectives"))

__all__ = [name for name in globals() if not name.startswith("_")]
