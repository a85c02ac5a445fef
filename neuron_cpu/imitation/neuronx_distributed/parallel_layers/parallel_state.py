"""The running thread's rank and its tensor-parallel group (NxD 0.10 names).

Pipeline, data- and expert-parallel sizes are 1.
"""

from neuron_cpu.runtime.ranks import Group, current_group, is_tracing, set_current_group


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    **others: int,
) -> None:
    """Make the running thread rank 0 of `tensor_model_parallel_size` ranks.

    Several ranks are a mocked group, as while the SDK traces: shapes are one rank's, and
    collectives take meta tensors only. An application starts real ranks by itself.
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


def get_tensor_model_parallel_group(as_list: bool = False) -> Group | list[list[int]]:
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
    """The running thread's rank; 0 while a model compiles, whatever rank runs the graph later."""
    return get_tensor_model_parallel_group().rank()


def get_pipeline_model_parallel_rank() -> int:
    """0: there is one stage."""
    return 0


def get_aot_mode() -> bool:
    return is_tracing()


def get_kv_shared_group(as_list: bool = False) -> Group | list[list[int]]:
    """The ranks that share this rank's KV head: none without flash decoding."""
    raise AssertionError(
        "No ranks share a key-value head, expected flash decoding, which runs over the real "
        "libraries only; name their checkouts with --libraries (docs/libraries.md)."
    )


def get_speculative_draft_group(as_list: bool = False) -> Group | list[list[int]]:
    """The target's group: a draft model has the target's degree here."""
    return get_tensor_model_parallel_group(as_list)
