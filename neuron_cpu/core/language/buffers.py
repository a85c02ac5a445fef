"""Memories that kernels create tensors in: ``nl.sbuf``, ``nl.psum``, ``nl.hbm``, ``shared_hbm``."""

from ..device.unknown import Memory


class Buffer(Memory):
    """A memory to create tensors in."""

    __slots__ = ("kind", "name")
    place = None  # of `ncc` allocations: gives a tensor its address

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __repr__(self) -> str:
        return f"nl.{self.name}"


sbuf = Buffer("sbuf", "sbuf")
psum = Buffer("psum", "psum")
hbm = private_hbm = Buffer("hbm", "hbm")
shared_hbm = Buffer("shared_hbm", "shared_hbm")
BY_KIND = {made.kind: made for made in (sbuf, psum, hbm, shared_hbm)}
