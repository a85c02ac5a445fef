"""``nki.collectives``: operations between the ranks of a replica group."""

# Written by stubs/generate.py.
from typing import Any


class ReplicaGroup:
    """Lists of ranks that work together; the lists are disjoint."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    size: Any

def all_gather(srcs: Any, dsts: Any, replica_group: Any, collective_dim: Any, priority: Any = None, name: Any = None) -> Any:
    """The ranks' tensors one behind the other along axis 0 (in SBUF also 1), to all of them."""
def all_gather_v(srcs: Any, dsts: Any, replica_group: Any, metadata_tensor: Any, recv_counts_known: Any = False, has_rdispls: Any = False, priority: Any = None, name: Any = None) -> Any:
    """``all_gather`` of parts whose sizes are data, on two cores of each of four ranks.

    ``metadata_tensor`` uint32 (rows, ranks) in HBM or (1, rows, ranks) in SBUF: send counts and
    displacements (column 0 counts), then receive counts, which are written unless known."""
def all_gather_v_prepare(*args: Any, **given: Any) -> Any:
    """The arguments of ``all_gather_v``, which its trigger issues."""
def all_gather_v_trigger(prepare_instr: Any, name: Any = None) -> Any:
    """Issue the ``all_gather_v`` that was prepared last."""
def all_reduce(srcs: Any, dsts: Any, replica_group: Any, op: Any, priority: Any = None, name: Any = None) -> Any:
    """Element-wise reduction over the ranks, to all of them."""
def all_to_all(srcs: Any, dsts: Any, replica_group: Any, collective_dim: Any, priority: Any = None, name: Any = None) -> Any:
    """Part k of axis 0 of every rank's tensor to rank k."""
def all_to_all_v(srcs: Any, dsts: Any, replica_group: Any, metadata_tensor: Any, recv_counts_known: Any = False, has_rdispls: Any = False, priority: Any = None, name: Any = None) -> Any:
    """``all_to_all`` of parts whose sizes are data; metadata as in ``all_gather_v``.

    With ``has_rdispls`` a fourth row of the metadata says where each part goes; without it parts
    follow each other."""
def all_to_all_v_prepare(*args: Any, **given: Any) -> Any:
    """The arguments of ``all_to_all_v``, which its trigger issues."""
def all_to_all_v_trigger(prepare_instr: Any, name: Any = None) -> Any:
    """Issue the ``all_to_all_v`` that was prepared last."""
def collective_permute(srcs: Any, dsts: Any, source_target_pairs: Any, priority: Any = None, name: Any = None) -> Any:
    """Tensors from source to target ranks; who is no target keeps its own."""
def collective_permute_implicit(srcs_by_channel: Any, dsts_by_channel: Any, replica_group: Any, channel_ids: Any = ..., priority: Any = None, name: Any = None) -> Any:
    """A step around the ring of the ranks: to the next one, from the one before (a guess)."""
def collective_permute_implicit_current_processing_rank_id(iteration_id: Any, replica_group: Any, channel_id: Any = 0, name: Any = None) -> Any:
    """The rank whose data a ring step processes: the own one at step 0, then those before it."""
def collective_permute_implicit_reduce(srcs0_by_channel: Any, srcs1_by_channel: Any, dsts_by_channel: Any, replica_group: Any, op: Any, channel_ids: Any = ..., priority: Any = None, name: Any = None) -> Any:
    """A step around the ring that reduces two local tensors first and sends the result."""
def rank_id(name: Any = None) -> Any:
    """The rank that runs the kernel."""
def reduce_scatter(srcs: Any, dsts: Any, replica_group: Any, collective_dim: Any, op: Any, priority: Any = None, name: Any = None) -> Any:
    """Element-wise reduction over the ranks, a part of axis 0 to each."""
