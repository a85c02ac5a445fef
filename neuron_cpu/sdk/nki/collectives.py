"""``nki.collectives``: operations between the ranks of a replica group.

Source of names: aws-neuron-sdk v2.32.0, nki/api/nki/collectives/__init__.py.
"""

from neuron_cpu.core.current.collectives import (
    ReplicaGroup, all_gather, all_gather_v, all_gather_v_prepare, all_gather_v_trigger, all_reduce,
    all_to_all, all_to_all_v, all_to_all_v_prepare, all_to_all_v_trigger, collective_permute,
    collective_permute_implicit,
    collective_permute_implicit_current_processing_rank_id, collective_permute_implicit_reduce,
    rank_id, reduce_scatter,
)  # fmt: skip
from neuron_cpu.core.current.releases import all_released as _all_released

globals().update(_all_released(dict(globals())))

__all__ = [name for name in globals() if not name.startswith("_")]
