"""``nki.isa``: one function per instruction, destinations first.

Source of names: aws-neuron-sdk v2.32.0, nki/api/nki/isa/__init__.py.
"""

from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.current.compute import (
    activate2, activation, activation_reduce, bn_aggr, bn_stats, exponential, reciprocal,
    scalar_tensor_tensor, tensor_partition_reduce, tensor_reduce, tensor_scalar,
    tensor_scalar_cumulative, tensor_scalar_reduce, tensor_tensor, tensor_tensor_scan,
)  # fmt: skip
from neuron_cpu.core.current.copies import (
    local_gather, memset, nc_n_gather, nc_stream_shuffle, nonzero_with_count, select_reduce,
    tensor_copy, tensor_copy_predicated,
)  # fmt: skip
from neuron_cpu.core.current.cores import core_barrier, sendrecv
from neuron_cpu.core.current.enums import (
    dge_mode, dma_engine, engine, get_nc_sub_version, get_nc_version, gpsimd_engine,
    matmul_perf_mode, nc_version, oob_mode, reduce_cmd, scalar_engine, tensor_engine,
    unknown_engine, vector_engine,
)  # fmt: skip
from neuron_cpu.core.current.operands import NkiInstruction
from neuron_cpu.core.current.products import nc_matmul, nc_matmul_mx, nc_transpose, quantize_mx
from neuron_cpu.core.current.random import (
    dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed,
)  # fmt: skip
from neuron_cpu.core.current.registers import (
    VirtualRegister, register_alloc, register_load, register_move, register_store,
)  # fmt: skip
from neuron_cpu.core.current.releases import all_released as _all_released
from neuron_cpu.core.current.selection import (
    affine_select, iota, max8, nc_find_index8, nc_match_replace8, range_select, sequence_bounds,
    topk,
)  # fmt: skip
from neuron_cpu.core.current.transfers import dma_compute, dma_copy, dma_transpose
from neuron_cpu.core.device.errors import NkiError as NkiValidationError

__all__ = [name for name in globals() if not name.startswith("_")]

globals().update(_all_released(dict(globals())))

__getattr__ = _unknown.of_module("nisa", globals(), current=True)
