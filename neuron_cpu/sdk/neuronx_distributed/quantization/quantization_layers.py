"""Names of the quantised parallel layers; building one is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from ..parallel_layers.layers import BaseParallelLinear


class BaseQuantizeParallelLinear(BaseParallelLinear):
    """Base of the quantised layers: importable for isinstance checks, not constructible."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: weight quantisation is not supported by neuron_cpu yet, "
            "expected quantized=False in the NeuronConfig; load the unquantised checkpoint."
        )

    @classmethod
    def from_float(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Conversion of a float layer; refused like the constructor."""
        cls()
        raise AssertionError("unreachable: the constructor refuses")


class QuantizedColumnParallel(BaseQuantizeParallelLinear):
    """Quantised ColumnParallelLinear."""


class QuantizedRowParallel(BaseQuantizeParallelLinear):
    """Quantised RowParallelLinear."""
