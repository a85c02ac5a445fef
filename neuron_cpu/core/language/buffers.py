"""Memories that kernels create tensors in: ``nl.sbuf``, ``nl.psum``, ``nl.hbm``, ``shared_hbm``."""

from typing import Any, NoReturn

from ..device.unknown import not_callable


class Buffer:
    """A memory to create tensors in."""

    __slots__ = ("kind", "name")

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise not_callable(self)


sbuf = Buffer("sbuf", "sbuf")
psum = Buffer("psum", "psum")
hbm = private_hbm = Buffer("hbm", "hbm")
shared_hbm = Buffer("shared_hbm", "shared_hbm")
BY_KIND = {made.kind: made for made in (sbuf, psum, hbm, shared_hbm)}
