"""The SDK's closed kernels. A kernel runs if it has a file here; any other refuses a call."""

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

class Closed:
    """Stands for a kernel, a type or a constant that only the installed SDK has.

    A kernel refuses to be called. A type, whose name begins with a capital letter, gives a value
    that says as little: settings of kernels are made where files are imported."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Call self as a function."""
    def __getitem__(self, grid: Any) -> Any: ...

