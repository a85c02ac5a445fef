"""``neuronxcc.nki.isa``: one function per device instruction, engines and enumerations.

Source of names: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py.
"""

from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.instructions.constants import (
    dge_mode, dma_engine, engine, fp32, get_nc_version, gpsimd_engine, nc_version, oob_mode,
    reduce_cmd, scalar_engine, tensor_engine, unknown_engine, vector_engine,
)  # fmt: skip
from neuron_cpu.core.instructions.copies import (
    max8, memset, nc_find_index8, nc_match_replace8, nc_stream_shuffle, range_select,
    select_reduce, tensor_copy, tensor_copy_dynamic_dst, tensor_copy_dynamic_src,
    tensor_copy_predicated,
)  # fmt: skip
from neuron_cpu.core.instructions.dma import dma_copy, dma_transpose
from neuron_cpu.core.instructions.gpsimd import (
    affine_select, builtin_custom_op, dropout, iota, local_gather, sequence_bounds,
    tensor_partition_reduce,
)  # fmt: skip
from neuron_cpu.core.instructions.scalar import activation, activation_reduce
from neuron_cpu.core.instructions.tensor_engine import nc_matmul, nc_transpose
from neuron_cpu.core.instructions.vector import (
    bn_aggr, bn_stats, reciprocal, scalar_tensor_tensor, tensor_reduce, tensor_scalar,
    tensor_scalar_reduce, tensor_tensor, tensor_tensor_scan,
)  # fmt: skip
from neuron_cpu.core.language.labels import label_all as _label_all

__all__ = [name for name in globals() if not name.startswith("_")]

_label_all(globals(), __all__)

__getattr__ = _unknown.of_module("nisa", globals(), current=False)
