"""Seeds the ranks' random generators."""


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Do nothing: a rank draws no random numbers of its own (rank 0 draws for all)."""
    del seed
