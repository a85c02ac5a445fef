"""The import names of the Neuron compiler's package, over the simulator in neuron_cpu.core."""

# Written by stubs/generate.py.
from typing import Any


def stand_for(*packages: Any) -> Any:
    """Make the modules `packages`, and modules below them, importable."""
