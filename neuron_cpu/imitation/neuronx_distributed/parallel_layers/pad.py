"""Padding of attention heads up to a multiple of the tensor-parallel degree."""

from .utils import get_padding_length


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add so that `tp_degree` divides the count."""
    return get_padding_length(n_head, tp_degree)
