"""Helpers of EAGLE drafts (names only)."""

from typing import Any, NoReturn


def tiled_all_gather_matmul(*_args: Any, **_kwargs: Any) -> NoReturn:
    """The draft's projection of long sequences; refused, as EAGLE speculation is."""
    raise NotImplementedError(
        "tiled_all_gather_matmul belongs to EAGLE speculation, which neuron_cpu does not model; "
        "leave is_eagle_draft and enable_eagle_speculation off."
    )
