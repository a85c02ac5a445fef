"""Seeding of the ranks' random generators."""


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Nothing to seed: ranks draw no random numbers of their own (rank 0 draws for all)."""
    del seed
