"""What the newer `torch_neuronx` offers."""

from .module import *  # noqa: F403
