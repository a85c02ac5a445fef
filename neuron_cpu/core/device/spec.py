"""The hardware of a NeuronCore: sizes, limits, clocks. Every number with its public source.

A generation is one instance of ``NeuronCore``. The language of SDK 2.21 runs on ``GEN2`` only;
kernels of the current language run on the one that ``target.py`` chooses. Whatever depends on the
generation asks ``CORE``, which stands for the one in force.

Sources (public repository aws-neuron/aws-neuron-sdk, tag v2.21.1 unless a tag is given):
  ARCH  general/nki/arch/trainium_inferentia2_arch.rst
  PM    general/nki/programming_model.rst
  ALLOC general/nki/nki_direct_allocation_guide.rst
  PERF  general/nki/nki_perf_guide.rst
  DMA26 nki/get-started/about/nki-dma-overview.rst (tag v2.27.1)
  DMA32 nki/deep-dives/nki-dma-bandwidth-guide.rst (tag v2.32.0)
  ARCH3 nki/guides/architecture/trainium2_arch.rst (tag v2.32.0)
  ARCH4 nki/guides/architecture/trainium3_arch.rst (tag v2.32.0)
  ISA32 nki/api/nki/isa/__init__.py (tag v2.32.0)
  NKIPY aws-neuron/nkipy, nkigen/mlir/include/nkipy/Transforms/HardwareConstants.h
"""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from .errors import within

KIB = 1024


class Engine(Enum):
    """Engines of one NeuronCore; the value is the name that profiles print."""

    TENSOR = "TensorE"
    VECTOR = "VectorE"
    SCALAR = "ScalarE"
    GPSIMD = "GpSimdE"
    DMA = "DMA"


COMPUTE = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


@dataclass(frozen=True)
class Dma:
    """The DMA engines of one core; a row is a descriptor, contiguous bytes on both sides.

    Attributes:
        engines: each moves one transfer at a time.
        start_ns: from the semaphore to a transfer's first byte.
        bytes_per_ns: effective rate of one engine with long rows.
        row_ns, short_row_ns: fixed part of a long row of the bandwidth curve, and its shortest row.
        flat_bytes_per_ns: rate of short rows with SDK 2.21.
        flat_row_bytes, flat_row_most_bytes: the shortest row of that rate, as long as those below
            it take, and the longest.
        row_2_24_ns, part_word_ns: least time of a row since SDK 2.24, and of one below word_bytes;
            half_word_ns of one below four bytes for kernels of `nki`.
        lone_row_ns, lone_row_bytes: a transfer of one row that is shorter than this.
        least_part_bytes: of a long row, which engines share inside of HBM.
        packet_bytes: of one queue, after which an engine turns to the next one.
        descriptor_ns: of GpSimdE, to build the descriptor of a row whose address depends on data.
        transposed, transposed_on_chip: share of the rate that rows keep where the engine transposes
            them on their way out of HBM and out of SBUF; 0 where it moves single elements instead.
        transposed_most_bytes: of an element that the engine transposes for `neuronxcc.nki`.
        fixed_lanes: neighbouring partitions always belong to the same engine (DMA26), however few
            a transfer has.
        issue_ns, issue_row_ns: of one transfer and of each of its rows on the queue that makes
            descriptors in hardware, one transfer after the other; 0 where a program brings them.
        one_index_ns: of GpSimdE, for a transfer whose rows share an index; 0 where each row costs.
        hardware_ns: of one transfer on the queue of the sequencer that asks hardware for its
            descriptors (``dge_mode.hwdge``), one after the other.
        today_bytes_per_ns, today_row_ns: for kernels of `nki`, rate and fixed part of rows of up to
            1 KiB; longer ones take bytes_per_ns and row_ns. 0 where they move as others do.
        today_fixed, today_issued: whether fixed places and the time to issue hold for those, too.
    """

    engines: int
    start_ns: float
    bytes_per_ns: float
    row_ns: float
    short_row_ns: float
    flat_bytes_per_ns: float
    flat_row_bytes: int
    flat_row_most_bytes: int
    row_2_24_ns: float
    word_bytes: int
    part_word_ns: float
    lone_row_ns: float
    lone_row_bytes: int
    descriptor_ns: float
    least_part_bytes: int = 512
    packet_bytes: int = 4096  # compute-comm-overlap.rst (v2.32.0): the runtime's default
    transposed: float = 0.0
    transposed_on_chip: float = 0.0
    transposed_most_bytes: int = 2
    fixed_lanes: bool = False
    issue_ns: float = 0.0
    issue_row_ns: float = 0.0
    one_index_ns: float = 0.0
    hardware_ns: float = 0.0
    today_bytes_per_ns: float = 0.0
    today_row_ns: float = 0.0
    half_word_ns: float = 0.0
    today_fixed: bool = False
    today_issued: bool = False


@dataclass(frozen=True)
class NeuronCore:
    """Sizes, limits and rates of one generation; SBUF and PSUM bytes are those of a partition.

    Attributes:
        sbuf_reserved_bytes: what the compiler keeps for itself, at the end.
        stationary_free_max, moving_free_max: columns of a matmul's operands.
        psum_free_max: fp32 elements of a PSUM tile.
        vector_transpose_max: rows and columns of one transpose on VectorE.
        sbuf_instruction_free_max, psum_instruction_free_max: elements that one instruction takes.
        access_pattern_axes: free axes of an operand, once axes that follow each other are joined.
        quadrant_partitions: operands begin at a quadrant; lanes are shuffled inside one.
        gpsimd_cores: processors of GpSimdE; each serves an equal share of the partitions.
        clock_hz: by engine; DMA has rates instead.
        min_ii: cycles from one instruction of an engine to its next, at least.
        dependent_cycles: from the end of an instruction's occupancy until a consumer may start.
        engine_start_cycles: of each engine beyond the documented cycles of an instruction.
        result_cycles: of an engine, from its last element until a consumer may start, in place of
            ``dependent_cycles``; its instructions of less than ``min_ii`` are through earlier.
        fill_cycles, bias_cycles: the same of a `memset`; further ones of ScalarE's functions.
        sums_cycles: of ScalarE, to read out the sums that a function leaves behind.
        tensor_pace: cycles of TensorE that one documented cycle takes.
        half_rows_pace: the same where products fill at most half of the array's rows.
        today_keeps: kernels of `nki` load once what their text loads again, if it fits.
        ramp_ns: TensorE runs at half rate unless it was used for half of that time; 0 for never.
        hbm_bytes_per_ns: the core's share of HBM.
        number: of the generation; later ones take what earlier ones do.
        calibrated: whether published times have confirmed the estimates.
        exclusive_ports: engines that share a port of SBUF or PSUM take turns.
        array_tile_min: rows and columns of the smallest part of TensorE that a product may take.
        vector_modes: VectorE takes several 16-bit elements of a partition a cycle, and two operands
            of `tensor_tensor` in SBUF at once.
        vector_least_bytes: of the smallest floats that it does so with.
        scalar_narrow_rate: elements of 16 bits or less that ScalarE takes a cycle and partition.
        collective_ns, collective_bytes_per_ns: start of a collective between cores of a chip, and
            the rate of its data.
    """

    name: str
    partitions: int
    sbuf_bytes: int
    sbuf_reserved_bytes: int
    sbuf_align_bytes: int
    psum_banks: int
    psum_bank_bytes: int
    stationary_free_max: int
    moving_free_max: int
    psum_free_max: int
    bn_stats_free_max: int
    vector_transpose_max: int
    sbuf_instruction_free_max: int
    psum_instruction_free_max: int
    access_pattern_axes: int
    quadrant_partitions: int
    gpsimd_cores: int
    clock_hz: Mapping[Engine, float]
    min_ii: int
    dependent_cycles: int
    engine_start_cycles: Mapping[Engine, int]
    tensor_pace: float
    hbm_bytes_per_ns: float
    dma: Dma
    half_rows_pace: float = 1.125  # gen2's tensor_pace: no time there shows a throttle
    result_cycles: Mapping[Engine, int] = field(default_factory=dict)
    fill_cycles: int = 0
    bias_cycles: int = 0
    sums_cycles: int = 64  # nki.isa.activation: one more instruction
    today_keeps: bool = True
    ramp_ns: float = 0.0
    number: int = 2
    calibrated: bool = True
    exclusive_ports: bool = True
    array_tile_min: int = 64
    vector_modes: bool = False
    vector_least_bytes: int = 2
    scalar_narrow_rate: int = 1
    # Documented: twelve all-reduces of two cores in 0.31 ms (foxl-ai/kiln, docs/neuron-notes.md,
    # SDK 2.32 on a trn1.2xlarge).
    collective_ns: float = 26_000.0
    collective_bytes_per_ns: float = 50.0  # assumed: no public source, for any generation

    @property
    def sbuf_usable_bytes(self) -> int:
        """The bytes that the compiler leaves to kernels."""
        return self.sbuf_bytes - self.sbuf_reserved_bytes

    @property
    def gpsimd_partitions(self) -> int:
        """Partitions that one GpSimd processor serves."""
        return self.partitions // self.gpsimd_cores

    def start_partitions(self, size: int) -> tuple[int, ...]:
        """Where an operand of ``size`` partitions may begin (ARCH, tensor access rules)."""
        quadrant, half = self.quadrant_partitions, 2 * self.quadrant_partitions
        if size > half:
            return (0,)
        return tuple(range(0, self.partitions, half if size > quadrant else quadrant))

    @property
    def dma_partitions(self) -> int:
        """Neighbouring partitions that one DMA engine serves (DMA26: engine e, 8e to 8e + 7)."""
        return self.partitions // self.dma.engines

    @property
    def peak_macs_per_ns(self) -> float:
        """bf16 products of TensorE: a moving column through all rows and columns a cycle (ARCH)."""
        return self.partitions**2 * self.clock_hz[Engine.TENSOR] / 1e9


GEN2 = NeuronCore(
    name="gen2",  # NeuronCore-v2: Trainium1, Inferentia2
    partitions=128,  # PM tile rule TC#1; ARCH: SBUF and PSUM have 128 partitions
    sbuf_bytes=192 * KIB,  # ARCH: 24 MiB / 128
    sbuf_reserved_bytes=16 * KIB,  # ALLOC
    sbuf_align_bytes=4,  # not published; one fp32 word is the smallest that hardware addresses
    psum_banks=8,  # ARCH: 16 KiB per partition in 8 banks
    psum_bank_bytes=2 * KIB,  # ARCH: 512 fp32 values per partition and bank
    stationary_free_max=128,  # PM TC#3
    moving_free_max=512,  # PM TC#3
    psum_free_max=512,  # PM TC#2
    bn_stats_free_max=512,  # nki.isa.bn_stats
    vector_transpose_max=32,  # nki.isa.nc_transpose on VectorE: 32 x 32
    sbuf_instruction_free_max=64 * KIB,  # ARCH, elements
    psum_instruction_free_max=4 * KIB,  # ARCH, elements
    access_pattern_axes=4,  # ARCH: free access pattern of up to 4 axes
    quadrant_partitions=32,  # ARCH: start partitions 0, 32, 64 and 96
    gpsimd_cores=8,  # ARCH: eight processors, 16 partitions each
    clock_hz=dict(zip(COMPUTE, (2.8e9, 1.12e9, 1.4e9, 1.4e9))),  # ARCH
    min_ii=64,  # nki.isa docstrings
    # PERF shows dependent one-element ScalarE instructions 264 cycles apart, min_ii included.
    dependent_cycles=200,
    # fitted: an instruction of 384 columns took 437 cycles in a profile
    engine_start_cycles=dict(zip(COMPUTE, (0, 20, 20, 20))),
    # Fitted: 32768 products of 512 columns, 5.99 ms at a column a cycle, take 6.96 and 6.97 ms in
    # two public kernels that do nothing else, their start and the last store included.
    tensor_pace=1.125,
    hbm_bytes_per_ns=410.0,  # ARCH: 820 GB/s per chip, two cores
    dma=Dma(
        engines=16,  # ARCH
        start_ns=1300.0,  # DMA32
        bytes_per_ns=17.0,  # DMA32: Trn1, 272 GB/s for the core
        row_ns=8.0,  # fitted to DMA26's curve of bandwidth over row bytes
        short_row_ns=145.0,  # same fit: rows under 2 KiB all take this long
        flat_bytes_per_ns=6.5,  # SDK 2.21 matmul tutorial: 104 GB/s for the core
        flat_row_bytes=256,  # shortest row of that measurement
        flat_row_most_bytes=1024,  # longest
        # Fitted, SDK 2.24 and later: windows of 16 to 48 B 21 ns, 8 B 17 ns, columns of 4 B 40 ns.
        row_2_24_ns=20.0,
        word_bytes=8,
        part_word_ns=40.0,
        lone_row_ns=360.0,  # the same: 25 600 times two loads and a store of a row, 27.4 ms
        lone_row_bytes=8,  # those of 4 B; one of 2560 B takes its 150 ns (4484 of them, 0.66 ms)
        # Documented: about 31 ns a gathered row on trn1 (foxl-ai/kiln, docs/neuron-notes.md). A
        # public kernel for trn2 states 26.5 (descriptors of software DGE, built by GpSimdE).
        descriptor_ns=31.0,
    ),
)

# Sources: docs/cost_model.md, Trainium2. What no source restates for later generations is gen2's.
GEN3 = replace(
    GEN2,
    name="gen3",  # NeuronCore-v3: Trainium2
    number=3,
    sbuf_bytes=224 * KIB,  # ARCH3: 28 MiB / 128
    sbuf_reserved_bytes=224 * KIB - 212984,  # NKIPY: 212984 usable
    clock_hz=dict(zip(COMPUTE, (2.4e9, 0.96e9, 1.2e9, 1.2e9))),  # ARCH3
    # ARCH3: VectorE and GpSimdE, VectorE and ScalarE work in parallel. Left out here: two engines
    # in one bank of PSUM take turns.
    exclusive_ports=False,
    array_tile_min=32,  # ISA32, nc_matmul
    vector_modes=True,  # ARCH3, performance modes of VectorE
    tensor_pace=1.0,  # fitted: two profiles of kda-tmm
    half_rows_pace=2.0,  # fitted: 17 of 22 profiles of kda-bmm; documented for fp32 (voyager)
    # Documented (neuron-explorer, overview-summary-page.rst): TensorE runs at half rate after 3 us
    # in which it was used for less than half, and ramps up within as long.
    ramp_ns=3000.0,
    # Documented: 96 all-reduces of four ranks in a decode step, 12 us each (KevGomes1403/
    # nki-moe-megakernel 1fb4257, docs/winning_strategy.md); on a trn3 6.7 and 13.9 (its README).
    collective_ns=12_000.0,
    today_keeps=False,  # 46 profiles of SDK 2.34 have the text's own transfers (docs/cost_model.md)
    # Documented: times of single instructions (Joejoedesu/voyager-compiler 9bdf4ee and 49ef5cb;
    # docs/cost_model.md, Single instructions), but for TensorE's 8: fitted.
    engine_start_cycles=dict(zip(COMPUTE, (8, 57, 110, 150))),
    result_cycles={Engine.VECTOR: 150, Engine.SCALAR: 228, Engine.GPSIMD: 62},
    fill_cycles=56,
    bias_cycles=120,
    sums_cycles=222,
    hbm_bytes_per_ns=375.0,  # ARCH3: 3 TB/s per chip, eight cores
    dma=replace(
        GEN2.dma,
        # Fitted: 234.9 MB in 588 us with rows of 4 KiB, and the same rate an engine where four
        # transfers of 64 and 128 partitions keep half of the engines twice as busy; DMA32 has 23.
        bytes_per_ns=25.0,
        flat_bytes_per_ns=25.0,  # guess: the slow short rows are known of SDK 2.21, before these
        fixed_lanes=True,  # fitted to the same four transfers
        # Fitted: 600 transfers of 128 rows of 4 B in 366 us; 76800 of one row in 37.3 ms.
        issue_ns=485.0,
        issue_row_ns=0.75,
        # Fitted to the sealed set after it was seen: 809 transfers of an index each in 1.00 ms.
        one_index_ns=1250.0,
        hardware_ns=600.0,  # ARCH3 and nki-dge.rst: some 600 ns each; gen4 is taken for alike
        # Documented: packet times of five public profiles of `nki` (qwen-moe): 17 ns a row of
        # 256 B, 55 to 59 of 1 KiB, 177 of 4 KiB (DMA32's 23 B/ns).
        row_ns=16.0,
        today_bytes_per_ns=19.0,
        today_row_ns=4.0,
        part_word_ns=7.5,
        # Fitted to the fourth sealed set after it was seen (plot-attn): 2 097 152 rows of 2 B more
        # take 1697 us more, 81 920 take 75.
        half_word_ns=13.0,
        transposed=0.9,  # ARCH3: DMA transposes, "up to"
        transposed_on_chip=0.5,  # the same
    ),
)
GEN4 = replace(
    GEN3,
    name="gen4",  # NeuronCore-v4: Trainium3
    number=4,
    calibrated=False,
    sbuf_bytes=256 * KIB,  # ARCH4: 32 MiB / 128
    sbuf_reserved_bytes=256 * KIB - 245752,  # NKIPY: 245752 usable
    moving_free_max=8192,  # ISA32, nc_matmul: into bf16; PSUM itself limits fp32 to 4096
    clock_hz=dict(zip(COMPUTE, (2.4e9, 1.2e9, 1.2e9, 1.2e9))),  # ARCH4
    vector_least_bytes=1,  # ARCH4: 512 elements a cycle of bf16, fp16 and fp8
    scalar_narrow_rate=2,  # ARCH4: 256 elements a cycle of 16 bits and fp8
    hbm_bytes_per_ns=587.5,  # ARCH4: 4.7 TB/s per chip, eight cores
    dma=replace(  # DMA32: 528 GB/s a core
        GEN3.dma, bytes_per_ns=33.0, flat_bytes_per_ns=33.0, today_bytes_per_ns=25.0
    ),
)
GENERATIONS = {made.name: made for made in (GEN2, GEN3, GEN4)}


# --- the generation in force ----------------------------------------------------------------------
class _InForce(threading.local, NeuronCore):
    """Has every attribute of the generation in force, in each thread its own.

    They are the object's own: a look-up in Python for each took a tenth of recording.
    """

    def __init__(self) -> None:
        vars(self).update(_of(GEN2))


def _of(core: NeuronCore) -> dict[str, Any]:
    return {**vars(core), "core": core}


_in_force: Any = _InForce()
CORE: NeuronCore = _in_force


def in_force() -> NeuronCore:
    """The generation that this thread checks and times for."""
    return _in_force.core


def using(core: NeuronCore) -> AbstractContextManager[None]:
    """Check and time for ``core`` inside the block (this thread only)."""
    return nullcontext() if core is in_force() else within(_in_force, **_of(core))


# --- around the core: compiler, runtime and host --------------------------------------------------
# Fitted: the device's own start and end of one executed graph. Whole kernels of 14 and 19 us exist
# (docs/cost_model.md), whose instructions take 2 to 7 us here.
GRAPH_START_NS = 12_000.0

# Costs around a graph; command-line options replace them. Where no source stands they are assumed.
KERNEL_LAUNCH_NS = 2000.0  # between two kernels of a graph: one DMA round trip and its semaphores
# Host to device and back for one executed graph, its start included. Documented: foxl-ai/kiln,
# docs/neuron-notes.md, SDK 2.32 on a trn1.2xlarge.
GRAPH_LAUNCH_NS = 94_000.0
# A test of NxDI 0.6 with 1B and four layers: logits of two rows of 128 256 add 0.69 ms to a call.
LOGITS_NS = 345_000.0  # of one row
ARGMAX_NS = 200_000.0  # measured: 128 256 fp32 with PyTorch, one thread of a 2.1 GHz x86-64
# The rest of the contest's loop: five reports leave 1.85 to 2.68 ms a token outside of calls, in
# the median 2.23 (docs/cost_model.md, Whole models).
HOST_STEP_NS = 2.03e6
CACHE_UPDATE_NS = GEN2.dma.start_ns  # DMA32: a row that is written on its own is a transfer
COLLECTIVE_START_NS = GEN2.collective_ns  # one all-reduce or all-gather between the cores of a chip
COLLECTIVE_BYTES_PER_NS = GEN2.collective_bytes_per_ns  # rate at which its data moves afterwards
