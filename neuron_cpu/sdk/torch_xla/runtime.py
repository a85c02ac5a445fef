"""The names of torch_xla.runtime: which of the processes this one is, of one."""


def world_size() -> int:
    """NxD's builder puts its own number in the place of this function while it traces."""
    return 1


def global_ordinal() -> int:
    return 0


local_ordinal = global_ordinal
local_process_count = world_size
