"""``llama``: every name of llama.py and the files beside it, that of the last file that has it.

A constant that is set here is set in all files that read it.
"""

from __future__ import annotations

import importlib
from typing import Any

FILES = [
    importlib.import_module(name)
    for name in (
        "llama_extended", "llama_ranks", "llama_cached", "llama_layers", "llama_families",
        "llama_quantised", "llama_adapters", "llama",
    )
]  # fmt: skip


class Every:
    def __getattr__(self, name: str) -> Any:
        for file in FILES:
            if hasattr(file, name):
                return getattr(file, name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        for file in FILES:
            if hasattr(file, name):
                setattr(file, name, value)

    @property
    def values(self) -> list[Any]:
        return [value for file in FILES for value in vars(file).values()]


llama = Every()
