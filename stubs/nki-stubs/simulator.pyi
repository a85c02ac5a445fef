"""``nki.simulator``: what vLLM Neuron's CPU mode calls (vllm-neuron, nki_cpu_simulator.md)."""

# Written by stubs/generate.py.
from typing import Any


class Any:
    """Special type indicating an unconstrained type.

    - Any is compatible with every type.
    - Any assumed to have all methods.
    - All values assumed to be instances of Any.

    Note that all the above statements are true from the point of view of
    static type checkers. At runtime, Any should not be used with instance
    checks."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class Mapping:
    """A Mapping is a generic container for associating key/value
    pairs.

    This class provides concrete generic implementations of all
    methods except for __getitem__, __iter__, and __len__."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, key: Any) -> Any: ...
    def __iter__(self) -> Any: ...
    def get(self, key: Any, default: Any = None) -> Any:
        """D.get(k[,d]) -> D[k] if k in D, else d.  d defaults to None."""
    def items(self) -> Any:
        """D.items() -> a set-like object providing a view on D's items"""
    def keys(self) -> Any:
        """D.keys() -> a set-like object providing a view on D's keys"""
    def values(self) -> Any:
        """D.values() -> an object providing a view on D's values"""

class Sequence:
    """All the operations on a read-only sequence.

    Concrete subclasses must override __new__ or __init__,
    __getitem__, and __len__."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __iter__(self) -> Any: ...
    def count(self, value: Any) -> Any:
        """S.count(value) -> integer -- return number of occurrences of value"""
    def index(self, value: Any, start: Any = 0, stop: Any = None) -> Any:
        """S.index(value, [start, [stop]]) -> integer -- return first index of value.
        Raises ValueError if the value is not present.

        Supporting start and stop arguments is optional, but
        recommended."""

def Optional(*args: Any, **kwds: Any) -> Any:
    """Optional[X] is equivalent to Union[X, None]."""
def jit(fn: Any = None, **options: Any) -> Any:
    """``@nki.jit``, ``@nki.jit()`` or ``nki.jit(fn)``: a kernel of the current language.

    ``platform_target``, of 2.27 and 2.28, chooses its generation; later releases leave that to the
    environment, so there it is a warning."""
def simulate_kernel(kernel: Any, args: Any = (), kwargs: Any = None, _lnc: Any = 1) -> Any:
    """Run a kernel, or a function as one, on numpy arrays with ``_lnc`` cores."""
