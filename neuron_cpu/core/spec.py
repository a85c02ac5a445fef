"""What a NeuronCore-v2 is: sizes, limits, clocks. Every number with its public source.

Sources (public repository aws-neuron/aws-neuron-sdk, tag v2.21.1 unless a tag is given):
  ARCH  general/nki/arch/trainium_inferentia2_arch.rst
  PM    general/nki/programming_model.rst
  ALLOC general/nki/nki_direct_allocation_guide.rst
"""

from __future__ import annotations

from enum import Enum

KIB = 1024


class Engine(Enum):
    """Engines of one NeuronCore; the value is the name that profiles print."""

    TENSOR = "TensorE"
    VECTOR = "VectorE"
    SCALAR = "ScalarE"
    GPSIMD = "GpSimdE"
    DMA = "DMA"


# --- geometry -------------------------------------------------------------------------------------
PARTITIONS = 128  # PM tile rule TC#1; ARCH: SBUF and PSUM have 128 partitions
SBUF_PARTITION_BYTES = 192 * KIB  # ARCH: 24 MiB / 128
SBUF_USABLE_BYTES = 176 * KIB  # ALLOC: the compiler reserves the last 16 KiB of each partition
PSUM_BANKS = 8  # ARCH: 16 KiB per partition in 8 banks
PSUM_BANK_BYTES = 2 * KIB  # ARCH: 512 fp32 values per partition and bank
STATIONARY_FREE_MAX = 128  # PM TC#3
MOVING_FREE_MAX = 512  # PM TC#3
PSUM_FREE_MAX = 512  # PM TC#2
BN_STATS_FREE_MAX = 512  # nki.isa.bn_stats
VECTOR_TRANSPOSE_MAX = 32  # nki.isa.nc_transpose on VectorE: 32 x 32
SBUF_INSTRUCTION_FREE_MAX = 64 * KIB  # ARCH: elements per partition of one instruction
PSUM_INSTRUCTION_FREE_MAX = 4 * KIB
ACCESS_PATTERN_AXES = 4  # ARCH: free access pattern of up to 4 axes

# --- clocks, Hz (ARCH) ----------------------------------------------------------------------------
CLOCK_HZ = {
    Engine.TENSOR: 2.8e9,
    Engine.VECTOR: 1.12e9,
    Engine.SCALAR: 1.4e9,
    Engine.GPSIMD: 1.4e9,
}


def legal_start_partitions(size: int) -> tuple[int, ...]:
    """Start partitions an operand of ``size`` partitions may have (ARCH, tensor access rules)."""
    if size > 64:
        return (0,)
    return (0, 64) if size > 32 else (0, 32, 64, 96)
