"""How many threads PyTorch takes in a run: one, but in operations that gain by it all it may have.

A token makes 550 products of a few microseconds, which threads do not make faster. Operations of
32,768 elements or 3 x 2^20 multiplications take two thirds of the time with two, if both cores are
free and the other worker still spins (``neuron_cpu/__init__.py``). Beside one busy loop each waits
for the core that the other one has: a layer of a prompt of 640 took 280 ms instead of 60. So after
runs that waited for a third of their time nothing is shared for AFTER times as long. No result
depends on it: packed products and oneDNN's, and tiles element by element, have the same bits with
any number of threads. BLAS has not, so its products take one.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from .merge import Op

# oneDNN knows the widest vectors of every CPU, MKL those of Intel's: 200 GFLOPS a core against 95
# on an EPYC of 2024. Its calls cost more, so small products stay with BLAS; and all of them where
# AVX2 is the widest that a CPU has: MKL does 75 to 90 GFLOPS of 95 then, oneDNN 45 to 60.
ONE_DNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX2"
LARGE = 3 << 20  # multiplications
# Least multiplications of a product, or work for a tile, that threads share. OpenMP of macOS knows
# no bounded spinning, and to wake a worker takes 40 us.
SHARED = LARGE if sys.platform == "linux" and "GOMP_SPINCOUNT" in os.environ else 1 << 24
ELEMENT = LARGE >> 15  # for each element of a tile; PyTorch divides no fewer than 2^15
AFTER = 32
_run = threading.local()  # count: the threads that the caller's PyTorch has; wide: whether in use;
# tried: whether they were in this run
_busy_until = _waited = 0.0  # of the process; the latter is a part of the time of its last runs


@contextmanager
def one() -> Iterator[None]:
    """Inside the block PyTorch takes one thread of this one's, but between `widen` and `narrow`."""
    global _busy_until, _waited
    before = getattr(_run, "count", None)
    _run.count, _run.tried = torch.get_num_threads(), False
    narrow()
    start, used = time.perf_counter(), time.thread_time()
    try:
        yield
    finally:
        torch.set_num_threads(_run.count)
        _run.count = before
        if _run.tried:
            end = time.perf_counter()
            _waited = (_waited + 1 - (time.thread_time() - used) / (end - start)) / 2
            if _waited > 0.3:
                _busy_until = end + AFTER * (end - start)


def widen() -> None:
    if _run.count > 1 and time.perf_counter() >= _busy_until:
        _run.tried = _run.wide = True
        torch.set_num_threads(_run.count)


def narrow() -> None:
    _run.wide = False
    torch.set_num_threads(1)


def at_once(job: Callable[[Any], Any], parts: list) -> None:
    """Do parts of a job that seldom hold Python's lock, in as many of Python's threads as the
    caller's PyTorch has."""
    with ThreadPoolExecutor(_run.count, "", torch.set_num_threads, (1,)) as pool:
        list(pool.map(torch.inference_mode()(job), parts))


def _work(op: Op) -> int:
    if op.instruction.op.multiplies:  # with more threads BLAS has other bits
        work = math.prod(op.src[0].shape) * math.prod(op.src[1].shape[op.batch + 1 :])
        return work * ONE_DNN
    return ELEMENT * sum(math.prod(ref.shape) for ref in op.dst)


def large(ops: list[Op]) -> set[int]:
    """Ids of the operations that all threads share."""
    return {id(op) for op in ops if _work(op) >= SHARED}


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
