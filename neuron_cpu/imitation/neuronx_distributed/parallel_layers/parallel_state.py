"""Which rank of which tensor-parallel group the running thread is (NxD 0.10 names).

Tensor and pipeline parallelism exist here: data- and expert-parallel sizes are 1.
"""

from typing import List, Union

from neuron_cpu.runtime.ranks import Group, Subgroup, current_group, is_tracing, set_current_group


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    **others: int,
) -> None:
    """Make the running thread rank 0 of `tensor_model_parallel_size` ranks.

    With more than one rank the group is mocked, as while the SDK traces: shapes are those of one
    rank, and a collective works on meta tensors only. Applications start real ranks by themselves.
    """
    del skip_collective_init  # nothing is set up ahead of the first collective
    if any(size != 1 for size in (pipeline_model_parallel_size, *others.values())):
        raise NotImplementedError(
            "initialize_model_parallel got another size than tensor_model_parallel_size, expected "
            "1 of each, as no layer here has such groups; leave them out."
        )
    if tensor_model_parallel_size < 1:
        raise ValueError(
            f"tensor_model_parallel_size must be at least 1, got {tensor_model_parallel_size}."
        )
    set_current_group(Group(0, tensor_model_parallel_size))


def destroy_model_parallel() -> None:
    """Leave the group."""
    set_current_group(None)


def model_parallel_is_initialized() -> bool:
    """Whether the running thread is a rank."""
    return current_group() is not None


def get_tensor_model_parallel_group(as_list: bool = False) -> Union[Group, List[List[int]]]:
    """The group of the running rank, or the replica groups as lists of ranks."""
    group = current_group()
    if group is None:
        raise AssertionError(
            "No tensor-parallel group is initialised in this thread, expected one; call "
            "parallel_state.initialize_model_parallel() or run inside an application."
        )
    return [list(range(group.size()))] if as_list else group


def get_tensor_model_parallel_size() -> int:
    return get_tensor_model_parallel_group().size()


def get_tensor_model_parallel_rank() -> int:
    """Rank of the running thread; while compiling it is 0, whatever rank later runs the graph."""
    return get_tensor_model_parallel_group().rank()


def get_pipeline_model_parallel_rank() -> int:
    """The running rank's stage; while compiling it is 0, as one graph has all stages."""
    line = get_tensor_model_parallel_group().pipeline
    return 0 if line is None else line.stage


def get_aot_mode() -> bool:
    return is_tracing()


def initialize_kv_group(
    kv_shared_group_size: int = 1, sequential_ranks_in_group: bool = False
) -> None:
    """Flash decoding: from now on this rank shares a KV head with the ranks beside it, g in all."""
    if not sequential_ranks_in_group:
        raise NotImplementedError(
            "initialize_kv_group got sequential_ranks_in_group False, expected True, as NxD's "
            "builder has it for flash decoding; pass True."
        )
    whole = get_tensor_model_parallel_group()
    if whole.size() % kv_shared_group_size:
        raise AssertionError(
            f"Groups of {kv_shared_group_size} cores share a key-value head, expected a number "
            f"that divides the tensor-parallel degree {whole.size()}; choose another degree."
        )
    whole.kv_shared = Subgroup(whole, kv_shared_group_size)


def get_kv_shared_group(as_list: bool = False) -> Union[Group, List[List[int]]]:
    """The ranks that share this rank's KV head, or all such groups as lists of ranks."""
    whole = get_tensor_model_parallel_group()
    if whole.kv_shared is None:
        raise AssertionError(
            "No ranks share a key-value head, expected initialize_kv_group() first; models call it "
            "where flash_decoding_enabled is on."
        )
    if not as_list:
        return whole.kv_shared
    size = whole.kv_shared.size()
    return [list(range(first, first + size)) for first in range(0, whole.size(), size)]


def get_speculative_draft_group(as_list: bool = False) -> Union[Group, List[List[int]]]:
    """Of a draft model with the target's degree, the only one here: the target's group."""
    return get_tensor_model_parallel_group(as_list)
