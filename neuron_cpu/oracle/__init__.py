"""An oracle for those who search kernels: verdict, estimate and reason of a candidate, as JSON."""

from ..errors import UsageError

try:
    import pydantic  # noqa: F401
except ImportError as error:
    raise UsageError(
        "tune and the oracle check requests with pydantic, which is not installed; "
        "pip install pydantic."
    ) from error
