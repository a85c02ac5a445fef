"""The custom calls of the vendor's compiler, each as a computation of XLA's own operators; kernels
of NKI run on the simulator, which XLA calls back.

Names, operands and configurations: aws-neuron/transformers-neuronx 1ade6d7 (hlo.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import torch
from neuronxcc.nki import FrameworkKernel
from torch_neuronx.pyhlo.scribe import HloScribe, HloShape
from torch_neuronx.pyhlo.xla_data_pb2 import PrimitiveType

from ..core import Program
from ..core.language.specialisation import to_torch
from ..core.run.execute import Plan
from ..errors import CompileError
from ..sandbox import records

KERNEL = "AwsNeuronCustomNativeKernel"
_TYPED = 4  # hlo.proto, CustomCallApiVersion: the call whose configuration is typed
_UNIFORM = 1  # xla_data.proto, RandomDistribution; the other one is normal
_THREAD = ThreadPoolExecutor(1)  # stacks of XLA's own threads are too small for PyTorch
_STREAMS = count()


def _reduce(x: HloShape, dim: int, operator: str, start: float) -> HloShape:
    """`x` reduced over one dimension."""
    kind = x.dtype

    def apply(scribe: HloScribe) -> HloShape:
        pair = [kind.Parameter(parameter_number=number) for number in (0, 1)]
        return getattr(kind, operator)(*pair)

    sizes = [*x.sizes[:dim], *x.sizes[dim + 1 :]]
    first = kind.Constant(constant_value=start)
    return kind[sizes].Reduce(x, first, dimensions=[dim], to_apply=apply)


def _spread(x: HloShape, like: HloShape, without: int) -> HloShape:
    """`x` broadcast to the sizes of `like`, whose dimension `without` it lacks."""
    kept = [dim for dim in range(len(like.sizes)) if dim != without]
    return x.dtype[like.sizes].Broadcast(x, dimensions=kept)


def _filled(kind: HloShape, sizes: tuple[int, ...], value: float) -> HloShape:
    return kind[sizes].Broadcast(kind.Constant(constant_value=value))


def _softmax(result: HloShape, x: HloShape, config: bytes) -> HloShape:
    """Softmax over dimension `config`, in fp32."""
    dim, wide = int(config), x.scribe.f32[x.sizes]
    x = wide.Convert(x)
    powers = wide.Exp(wide.Subtract(x, _spread(_reduce(x, dim, "Maximum", -math.inf), x, dim)))
    return result.Convert(wide.Divide(powers, _spread(_reduce(powers, dim, "Add", 0), x, dim)))


def _rms_norm(
    result: HloShape, x: HloShape, weight: HloShape, epsilon: HloShape, config: str
) -> HloShape:
    """x * rsqrt(mean(x^2) + epsilon) * weight over dimension `config`, in fp32."""
    dim, f32 = int(config), x.scribe.f32
    wide = f32[x.sizes]
    x = wide.Convert(x)
    squares = _reduce(wide.Multiply(x, x), dim, "Add", 0)
    flat = f32[squares.sizes]
    mean = flat.Multiply(squares, _filled(f32, squares.sizes, 1 / x.sizes[dim]))
    mean = flat.Add(mean, flat.Broadcast(f32.Convert(epsilon)))
    scaled = wide.Multiply(x, _spread(flat.Rsqrt(mean), x, dim))
    weights = wide.Broadcast(f32[weight.sizes].Convert(weight), dimensions=[dim])
    return result.Convert(wide.Multiply(scaled, weights))


def _gelu(result: HloShape, x: HloShape, config: bytes) -> HloShape:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), in fp32."""
    f32 = x.scribe.f32
    wide = f32[x.sizes]
    x = wide.Convert(x)
    cube = wide.Multiply(wide.Multiply(x, x), x)
    inner = wide.Add(x, wide.Multiply(cube, _filled(f32, x.sizes, 0.044715)))
    tanh = wide.Tanh(wide.Multiply(inner, _filled(f32, x.sizes, math.sqrt(2 / math.pi))))
    half = wide.Multiply(x, _filled(f32, x.sizes, 0.5))
    return result.Convert(wide.Multiply(half, wide.Add(tanh, _filled(f32, x.sizes, 1))))


def _sorted(x: HloShape, dim: int) -> tuple[HloShape, HloShape]:
    """The values in descending order over a dimension and their places, ties by place."""
    kind, s32 = x.dtype, x.scribe.s32

    def larger(scribe: HloScribe) -> HloShape:
        left, right, *_ = (
            of.Parameter(parameter_number=number)
            for number, of in enumerate((kind, kind, s32, s32))
        )
        return scribe.pred.Compare(left, right, comparison_direction="GT")

    places = s32[x.sizes].Iota(dimensions=[dim])
    both = x.scribe.tuple(kind[x.sizes], s32[x.sizes])
    ordered = both.Sort(x, places, dimensions=[dim], to_apply=larger, is_stable=True)
    return ordered.get_tuple_element(0), ordered.get_tuple_element(1)


def _first(x: HloShape, dim: int, count: int) -> HloShape:
    sizes = [count if place == dim else size for place, size in enumerate(x.sizes)]
    ranges = [{"start": 0, "limit": size, "stride": 1} for size in sizes]
    return x.dtype[sizes].Slice(x, slice_dimensions=ranges)


def _top_k(result: HloShape, x: HloShape, config: bytes) -> HloShape:
    """The `config` largest of the last dimension, and their places."""
    found = [_first(part, len(x.sizes) - 1, int(config)) for part in _sorted(x, len(x.sizes) - 1)]
    kinds = [HloShape(x.scribe, shape) for shape in result.shape_proto.tuple_shapes]
    return result.Tuple(*(kind.Convert(part) for kind, part in zip(kinds, found)))


def _arg_max(result: HloShape, x: HloShape, config: bytes) -> HloShape:
    """The place of the largest over dimension `config`, the first of equal ones."""
    _, places = _sorted(x, int(config))
    return result.Convert(places.dtype[result.sizes].Reshape(_first(places, int(config), 1)))


def _copy(result: HloShape, x: HloShape, config: bytes) -> HloShape:
    """Move weights through a ring of buffers: the value stays as it is."""
    return result.Copy(x)


def _call_back(result: HloShape, run: Callable[..., Any], *operands: HloShape) -> HloShape:
    """A call of `run`, from arrays to a tuple of arrays, in the middle of a graph."""
    made = result.scribe.callbacks
    made.append(run)
    return result.CustomCall(
        *operands,
        custom_call_target="xla_ffi_python_cpu_callback",
        custom_call_api_version=_TYPED,
        backend_config=f"{{index = {len(made) - 1} : ui64}}".encode(),
    )


def _arrays(result: HloShape) -> list[tuple[tuple[int, ...], Any]]:
    """Sizes and numpy's types of one result or several."""
    shapes = result.shape_proto.tuple_shapes or [result.shape_proto]
    return [(tuple(s.dimensions), NUMPY[s.element_type]) for s in shapes]


def put_kernels(module: Any) -> None:
    """Put the programs of its kernels into an HloModuleProto, so that it runs in any process.

    Raises:
        CompileError: a kernel that `FrameworkKernel` has not traced here.
    """
    for call in (i for c in module.computations for i in c.instructions):
        if call.custom_call_target == KERNEL:
            program = FrameworkKernel.traced.get(call.backend_config.decode())
            if program is None:
                raise CompileError(
                    "The graph calls a kernel of NKI that this process has not traced, expected "
                    "what FrameworkKernel.dump_config gave as backend_config; trace it here."
                )
            call.backend_config = records.dumped({"program": program})


def program_of(config: bytes) -> Program:
    """The program of a kernel in a module, checked.

    Raises:
        CompileError: `put_kernels` has not written it.
    """
    try:
        return records.program(records.loaded(config))
    except (ValueError, TypeError, LookupError, AttributeError):
        raise CompileError(
            "The graph calls a kernel of NKI whose program cannot be read, expected what `compile` "
            "or `save` wrote on this machine; compile the model again."
        ) from None


def _kernel(result: HloShape, *inputs: HloShape, config: bytes) -> HloShape:
    """A kernel of NKI, which writes its last arguments."""
    results, plan = _arrays(result), Plan(program_of(config))

    def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        made = [np.empty(*each) for each in results]
        tensors = [to_torch(array) for array in (*map(np.asarray, arrays), *made)]
        _THREAD.submit(plan.run, tensors).result()
        return tuple(made)

    return _call_back(result, run, *inputs)


def _rng(result: HloShape, first: HloShape, second: HloShape, distribution: int) -> HloShape:
    """Random numbers, the same on every rank; `torch.initial_seed` when the graph is loaded
    decides."""
    (sizes, kind), seed = _arrays(result)[0], [torch.initial_seed(), next(_STREAMS)]
    streams: dict[int, np.random.Generator] = {}

    def run(first: Any, second: Any, rank: Any) -> tuple[np.ndarray]:
        stream = streams.setdefault(int(rank), np.random.default_rng(seed))
        low, high = float(np.asarray(first)), float(np.asarray(second))
        drawn = stream.normal(low, high, sizes)
        if distribution == _UNIFORM:
            drawn = low + (high - low) * stream.random(sizes)
        return (np.asarray(drawn).astype(kind),)

    return _call_back(result, run, first, second, result.scribe.u32.ReplicaId())


NUMPY = {
    PrimitiveType.PRED: np.bool_,
    PrimitiveType.S8: np.int8,
    PrimitiveType.S32: np.int32,
    PrimitiveType.U32: np.uint32,
    PrimitiveType.F16: np.float16,
    PrimitiveType.F32: np.float32,
    PrimitiveType.BF16: ml_dtypes.bfloat16,
}
CALLS: dict[str, Callable[..., HloShape]] = {
    "AwsNeuronSoftmax": _softmax,
    "AwsNeuronRmsNorm": _rms_norm,
    "AwsNeuronGeluApprxTanh": _gelu,
    "AwsNeuronTopK": _top_k,
    "AwsNeuronArgMax": _arg_max,
    "AwsNeuronTransferWithStaticRing": _copy,
    KERNEL: _kernel,
}


class _Lowering(HloScribe):
    """Writes what the custom calls of a module compute.

    Attributes:
        callbacks: what XLA calls back, by number.
    """

    def __init__(self, module: Any) -> None:
        ids = [each.id for c in module.computations for each in [c, *c.instructions]]
        super().__init__(first_id=max(ids) + 1)
        self.callbacks: list[Callable[..., Any]] = []


def expand(module: Any) -> list[Callable[..., Any]]:
    """Replace the custom calls of an HloModuleProto by calls of computations, in place.

    Returns:
        What XLA calls back, by number: kernels and random numbers, arrays to arrays.

    Raises:
        CompileError: a custom call that the table lacks, or a kernel that cannot be read.
    """
    scribe = _Lowering(module)
    for computation in module.computations:
        shapes = {i.id: i.shape for i in computation.instructions}
        for instruction in computation.instructions:
            operands = [shapes[id] for id in instruction.operand_ids]
            if instruction.opcode == "custom-call":
                write = partial(
                    _written_by(instruction.custom_call_target), config=instruction.backend_config
                )
            elif instruction.opcode == "rng":
                write = partial(_rng, distribution=instruction.distribution)
            else:
                continue
            _replace(scribe, instruction, operands, write)
    computations = [*scribe.module_proto.computations, *module.computations]
    del module.computations[:]
    module.computations.extend(computations)  # what is called stands before its callers
    return scribe.callbacks


def _written_by(target: str) -> Callable[..., HloShape]:
    if target not in CALLS:
        raise CompileError(
            f"The graph calls {target}, expected one of {', '.join(CALLS)}; neuron_cpu knows no "
            "other custom call of the compiler, so write it with operators of HLO."
        )
    return CALLS[target]


def _replace(
    scribe: _Lowering, instruction: Any, operands: list[Any], write: Callable[..., HloShape]
) -> None:
    """Let an instruction call a computation that `write` writes."""

    def body(scribe: HloScribe) -> HloShape:
        values = [
            HloShape(scribe, shape).Parameter(parameter_number=number)
            for number, shape in enumerate(operands)
        ]
        return write(HloShape(scribe, instruction.shape), *values)

    scribe.compute(body)
    instruction.opcode = "call"
    instruction.called_computation_ids.append(scribe.module_proto.computations[-1].id)
    for field in ("custom_call_target", "backend_config", "distribution"):
        instruction.ClearField(field)
