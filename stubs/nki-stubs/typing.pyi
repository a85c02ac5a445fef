"""``nki.typing``: shapes of parameters, as ``nt.tensor[128, 512]``."""

# Written by stubs/generate.py.
from typing import Any

MYPY = False
if MYPY:
    def __getattr__(name: str) -> Any: ...
else:
    class mutable_tensor(Any):
        def __class_getitem__(cls, sizes: Any) -> Any: ...
    class tensor(Any):
        def __class_getitem__(cls, sizes: Any) -> Any: ...
