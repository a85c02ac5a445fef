"""Names of the quantised parallel layers; building one is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from ..parallel_layers.layers import BaseParallelLinear


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: weight quantisation is not supported by neuron_cpu yet, expected "
        "quantized=False in the NeuronConfig; load the unquantised checkpoint."
    )


class BaseQuantizeParallelLinear(BaseParallelLinear):
    """Base of the quantised layers: importable for isinstance checks, not constructible."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        _refuse(type(self).__name__)

    @classmethod
    def from_float(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Conversion of a float layer; refused like the constructor."""
        _refuse(cls.__name__)


class QuantizedColumnParallel(BaseQuantizeParallelLinear):
    """Quantised ColumnParallelLinear."""


class QuantizedRowParallel(BaseQuantizeParallelLinear):
    """Quantised RowParallelLinear."""
