"""``nki.isa.constants``: AWS's library imports the enumerations from here."""

from neuron_cpu.core.current.operands import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)

__all__ = [name for name in globals() if not name.startswith("_")]
