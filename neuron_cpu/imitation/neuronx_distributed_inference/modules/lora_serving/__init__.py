"""Low-rank adapters, several of them in one batch."""

from .config import LoraServingConfig

__all__ = ["LoraServingConfig"]
