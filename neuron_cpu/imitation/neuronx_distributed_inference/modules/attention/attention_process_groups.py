"""Groups of ranks in the attention of a context-parallel prompt (NxDI 0.4 and later).

Of tp ranks those of a run of tp / cp share a part of the prompt and split the heads; those with the
same place in their runs have the same heads, and exchange keys and values.
"""

from typing import Any, List

from neuronx_distributed.parallel_layers import parallel_state

from neuron_cpu.runtime.ranks import Group, Subgroup


def get_tp_cp_group_mesh(tp_degree: int, cp_degree: int) -> List[List[int]]:
    """Ranks that split the heads of a part of the prompt: [[0, 1], [2, 3], ...] of 8 by 4."""
    size = tp_degree // cp_degree
    return [list(range(first, first + size)) for first in range(0, tp_degree, size)]


def get_cp_group_mesh(tp_degree: int, cp_degree: int) -> List[List[int]]:
    """Ranks with the same heads: [[0, 2, 4, 6], [1, 3, 5, 7]] of 8 by 4."""
    return [list(ranks) for ranks in zip(*get_tp_cp_group_mesh(tp_degree, cp_degree), strict=True)]


def init_context_parallel_attention_process_groups(config: Any) -> None:
    """From now on this rank belongs to both groups; nothing happens with a cp_degree of 1."""
    cp_degree = getattr(config.neuron_config, "cp_degree", 1)
    if cp_degree == 1:
        return
    whole = parallel_state.get_tensor_model_parallel_group()
    size = whole.size() // cp_degree
    whole.context_parallel = Subgroup(whole, size), Subgroup(whole, cp_degree, size)


def _groups() -> Any:
    groups = parallel_state.get_tensor_model_parallel_group().context_parallel
    if groups is None:
        raise AssertionError(
            "There are no groups of context parallelism, expected "
            "init_context_parallel_attention_process_groups(config) first; call it where cp_degree "
            "is above 1."
        )
    return groups


def get_context_parallel_attention_tp_group() -> Group:
    """Ranks that have this rank's part of the prompt."""
    return _groups()[0]


def get_context_parallel_attention_cp_group() -> Group:
    """Ranks that have this rank's heads."""
    return _groups()[1]
