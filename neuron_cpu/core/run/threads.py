"""How many threads PyTorch takes in a run: one, but in large operations all that it may have.

A token makes 550 products of a few microseconds. Divided between two threads each of them waits for
a core: on a busy machine a step takes 1.3 to 1.8 times as long, and on a quiet one nothing is
gained. Products of 100 us and more take half the time, those of 60 us two thirds.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .merge import Op

SHARED, RUN = 1 << 26, 1 << 25  # least work of an operation, and of its run, that threads share
ELEMENT = 1 << 6  # work for an element of a tile, beside a multiplication of a product
READ = 1 << 4  # and for an element that a product reads: 1 x 2048 x 8192 takes 895 us, 420 of two
_run = threading.local()  # count: the threads that the caller's PyTorch has; wide: whether in use


@contextmanager
def one() -> Iterator[None]:
    """Inside the block PyTorch takes one thread of this one's, but between `widen` and `narrow`."""
    before = getattr(_run, "count", None)
    _run.count = torch.get_num_threads()
    narrow()
    try:
        yield
    finally:
        torch.set_num_threads(_run.count)
        _run.count = before


def widen() -> None:
    _run.wide = True
    torch.set_num_threads(_run.count)


def narrow() -> None:
    _run.wide = False
    torch.set_num_threads(1)


def _work(op: Op) -> int:
    if op.instruction.op.multiplies:
        sizes = [math.prod(ref.shape) for ref in op.src]
        work = sizes[0] * math.prod(op.src[1].shape[op.batch + 1 :])
        return max(work, READ * max(sizes))
    return ELEMENT * sum(math.prod(ref.shape) for ref in op.dst)


def large(ops: list[Op]) -> set[int]:
    """Ids of the operations that all threads share: none of a run of about a millisecond, which
    would wait longer for a busy core than it gains."""
    work = {id(op): _work(op) for op in ops}
    if sum(work.values()) < RUN:
        return set()
    return {key for key, own in work.items() if own >= SHARED}


def shared(call: Callable[[], None]) -> Callable[[], None]:
    """The same call with all threads, where it runs inside of ``one``."""

    def run() -> None:
        if getattr(_run, "count", None) is None or _run.wide:
            return call()
        widen()
        try:
            call()
        finally:
            narrow()

    return run
