"""PyHLO's operators and the vendor's custom calls, run by XLA, against numpy."""

import numpy as np
import pytest
import torch

pytest.importorskip("jaxlib", reason="XLA's compiler is in jaxlib: make transformers-neuronx")
import jaxlib
from neuronxcc.nki import FrameworkKernel
from scipy import special
from torch_neuronx.pyhlo.scribe import HloScribe

from neuron_cpu.errors import CompileError
from neuron_cpu.hlo import execute
from tests.hlo import kernels

A = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
B = np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)
IDS = np.array([4, 0, 2], dtype=np.int32)


def built(write, *arrays, ranks=1):
    """The compiled graph of `write(scribe, *parameters)`."""

    def entry(s):
        kinds = {"float32": s.f32, "int32": s.s32, "bool": s.pred}
        values = [
            kinds[str(array.dtype)][array.shape].Parameter(parameter_number=number)
            for number, array in enumerate(arrays)
        ]
        return write(s, *values)

    neff = execute.to_neff(HloScribe(None)(entry).module_proto.SerializeToString())
    return execute.Executable(neff, ranks)


def run(write, *arrays):
    """The outputs of one rank."""
    outputs = built(write, *arrays)([[torch.from_numpy(array)] for array in arrays])
    return [output[0].numpy() for output in outputs]


def apply(name):
    """What a reduction applies."""

    def pair(s):
        return getattr(s.f32, name)(*(s.f32.Parameter(parameter_number=k) for k in (0, 1)))

    return pair


def elementwise(name):
    return lambda s, *values: getattr(s.f32[values[0].sizes], name)(*values)


def compared(direction):
    return lambda s, a, b: s.pred[a.sizes].Compare(a, b, comparison_direction=direction)


def reduced(s, a, b):
    zero = s.f32.Constant(constant_value=0)
    return s.f32[3].Reduce(a, zero, dimensions=[1], to_apply=apply("Add"))


def windowed(s, a, b):
    ones = {"stride": 1, "window_dilation": 1, "base_dilation": 1}
    window = [{"size": 1, **ones}, {"size": 5, "padding_low": 4, **ones}]
    zero = s.f32.Constant(constant_value=0)
    return s.f32[3, 5].ReduceWindow(a, zero, to_apply=apply("Add"), window={"dimensions": window})


def contracted(s, a, b):
    numbers = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [1]}
    return s.f32[3, 3].Dot(a, b, dot_dimension_numbers=numbers)


def gathered(s, a, ids):
    numbers = {"offset_dims": [0], "collapsed_slice_dims": [1], "start_index_map": [1]}
    numbers["index_vector_dim"] = 1
    sizes = [3, 1]
    return s.f32[3, 3].Gather(a, ids, gather_dimension_numbers=numbers, gather_slice_sizes=sizes)


def scattered(s, a, ids, b):
    numbers = {"update_window_dims": [0], "inserted_window_dims": [1], "index_vector_dim": 1}
    numbers["scatter_dims_to_operand_dims"] = [1]
    updates = s.f32[3, 3].Slice(b, slice_dimensions=[{"limit": 3, "stride": 1}] * 2)
    return s.f32[3, 5].Scatter(
        a, ids, updates, scatter_dimension_numbers=numbers, to_apply=apply("Add")
    )


def padded(s, a, b):
    sides = [{"edge_padding_low": 1}, {"edge_padding_high": 2, "interior_padding": 1}]
    minus = s.f32.Constant(constant_value=-1)
    return s.f32[4, 11].Pad(a, minus, padding_config={"dimensions": sides})


def moved(s, a, b):
    """A dynamic slice at (1, 2), written back at (0, 0)."""
    starts = [s.s32.Constant(constant_value=value) for value in (1, 2, 0)]
    part = s.f32[2, 3].DynamicSlice(a, *starts[:2], dynamic_slice_sizes=[2, 3])
    return s.f32[3, 5].DynamicUpdateSlice(b, part, starts[2], starts[2])


def normalised(s, a, b):
    one, zero = (
        s.f32[5].Broadcast(s.f32.Constant(constant_value=value), dimensions=[]) for value in (1, 0)
    )
    shape = s.tuple(s.f32[3, 5], s.f32[5], s.f32[5])
    made = shape.BatchNormTraining(a, one, zero, epsilon=1e-5, feature_index=1)
    return made.get_tuple_element(0)


def custom(target, config, dtype="f32", sizes=(3, 5)):
    def write(s, *values):
        kind = getattr(s, dtype)[sizes]
        return kind.CustomCall(*values, custom_call_target=target, backend_config=config)

    return write


def top_k(s, a, b):
    shape = s.tuple(s.f32[3, 2], s.u32[3, 2])
    return shape.CustomCall(a, custom_call_target="AwsNeuronTopK", backend_config=b"2")


def rms_norm(s, a, b):
    weight = s.f32[5].Reshape(s.f32[1, 5].Slice(b, slice_dimensions=_first_row()))
    epsilon = s.f32.Constant(constant_value=0.1)
    return custom("AwsNeuronRmsNorm", b"1")(s, a, weight, epsilon)


def _first_row():
    return [{"limit": 1, "stride": 1}, {"limit": 5, "stride": 1}]


ROUNDED = A / np.sqrt((A**2).mean(1, keepdims=True) + 0.1) * B[0]
MOVED = B.copy()
MOVED[:2, :3] = A[1:3, 2:5]
SCATTERED = A.copy()
SCATTERED[:, IDS] += B[:, :3]
PADDED = np.full((4, 11), -1, np.float32)
PADDED[1:, :9:2] = A
TANH = np.tanh(np.sqrt(2 / np.pi) * (A + 0.044715 * A**3))
CASES = {
    "add": (elementwise("Add"), (A, B), A + B),
    "maximum": (elementwise("Maximum"), (A, B), np.maximum(A, B)),
    "sine": (elementwise("Sin"), (A,), np.sin(A)),
    "cosine": (elementwise("Cos"), (A,), np.cos(A)),
    "tanh": (elementwise("Tanh"), (A,), np.tanh(A)),
    "logistic": (elementwise("Logistic"), (A,), special.expit(A)),
    "log": (lambda s, a: s.f32[3, 5].Log(s.f32[3, 5].Abs(a)), (A,), np.log(abs(A))),
    "root": (lambda s, a: s.f32[3, 5].Rsqrt(s.f32[3, 5].Abs(a)), (A,), abs(A) ** -0.5),
    "less": (compared("LT"), (A, B), A < B),
    "reduce": (reduced, (A, B), A.sum(1)),
    "reduce-window": (windowed, (A, B), np.cumsum(A, 1)),
    "dot": (contracted, (A, B), A @ B.T),
    "gather": (gathered, (A, IDS), A[:, IDS]),
    "scatter": (scattered, (A, IDS, B), SCATTERED),
    "pad": (padded, (A, B), PADDED),
    "dynamic slices": (moved, (A, B), MOVED),
    "reverse": (lambda s, a: s.f32[3, 5].Reverse(a, dimensions=[1]), (A,), A[:, ::-1]),
    "transpose": (lambda s, a: s.f32[5, 3].Transpose(a, dimensions=[1, 0]), (A,), A.T),
    "iota": (lambda s, a: s.s32[2, 3].Iota(dimensions=[1]), (A,), np.arange(3) + np.zeros((2, 1))),
    "convert": (lambda s, a: s.s32[3, 5].Convert(a), (A,), A.astype(np.int32)),
    "batch norm": (normalised, (A, B), (A - A.mean(0)) / np.sqrt(A.var(0) + 1e-5)),
    "softmax": (custom("AwsNeuronSoftmax", b"0"), (A,), special.softmax(A, 0)),
    "gelu": (custom("AwsNeuronGeluApprxTanh", b""), (A,), A / 2 * (1 + TANH)),
    "argmax": (custom("AwsNeuronArgMax", b"1", "u32", (3,)), (A,), A.argmax(1)),
    "rms norm": (rms_norm, (A, B), ROUNDED),
    "static ring": (custom("AwsNeuronTransferWithStaticRing", b""), (A,), A),
}


@pytest.mark.parametrize("name", CASES)
def test_operator(name):
    write, arrays, expected = CASES[name]
    np.testing.assert_allclose(run(write, *arrays)[0], expected, rtol=2e-5, atol=1e-6)


def test_top_k_and_the_first_of_equal_values():
    equal = np.array([[1, 7, 7, 0, 7]] * 3, np.float32)
    values, places = run(top_k, equal, equal)
    assert values.tolist() == [[7, 7]] * 3
    assert places.tolist() == [[1, 2]] * 3
    assert run(custom("AwsNeuronArgMax", b"1", "u32", (3,)), equal)[0].tolist() == [1] * 3


def collective(name, sizes, **options):
    """A collective of two ranks over (3, 5)."""
    if name in ("AllReduce", "ReduceScatter"):
        options["to_apply"] = apply("Add")
    return lambda s, a: getattr(s.f32[sizes], name)(a, replica_groups=[[0, 1]], **options)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (collective("AllReduce", (4, 5)), [lambda a, b: a + b] * 2),
        (
            collective("AllGather", (8, 5), dimensions=[0]),
            [lambda a, b: np.concatenate([a, b])] * 2,
        ),
        (
            collective("ReduceScatter", (2, 5), dimensions=[0]),
            [lambda a, b: (a + b)[:2], lambda a, b: (a + b)[2:]],
        ),
        (
            collective("AllToAll", (4, 5), dimensions=[0]),
            [
                lambda a, b: np.concatenate([a[:2], b[:2]]),
                lambda a, b: np.concatenate([a[2:], b[2:]]),
            ],
        ),
    ],
)
def test_collective_of_two_ranks(write, expected):
    ranks = [np.concatenate([x, x[:1]]) for x in (A, B)]
    outputs = built(write, ranks[0], ranks=2)([[torch.from_numpy(rank) for rank in ranks]])
    for got, wanted in zip(outputs[0], expected):
        np.testing.assert_allclose(got.numpy(), wanted(*ranks), rtol=1e-6)


def test_a_kernel_travels_with_its_graph(monkeypatch):
    """What `save` wrote runs in a process that never traced the kernel."""

    def entry(s):
        return kernels.call(s.f32[3, 5].Parameter(parameter_number=0))

    neff = execute.to_neff(HloScribe(None)(entry).module_proto.SerializeToString())
    monkeypatch.setattr(FrameworkKernel, "traced", {})
    graph = execute.Executable(neff, 1)
    for array in (A, B):
        assert torch.equal(graph([[torch.from_numpy(array)]])[0][0], torch.from_numpy(2 * array))


def drawn(s, a):
    ends = [s.f32.Constant(constant_value=value) for value in (2, 4)]
    return s.f32[3, 500].Rng(*ends, distribution=1)


def test_random_numbers_are_the_same_on_every_rank():
    graph = built(drawn, A, ranks=2)
    inputs = [[torch.from_numpy(A)] * 2]
    (first, second), (third, _) = graph(inputs)[0], graph(inputs)[0]
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert 2 <= first.min() < 2.1 and 3.9 < first.max() <= 4


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (custom("AwsNeuronFlash", b""), "calls AwsNeuronFlash, expected one of AwsNeuronSoftmax"),
        (custom("AwsNeuronSoftmax", b"last"), r"says nothing \(ValueError: invalid literal"),
        (elementwise("Whatever"), "refuses the graph entry.*whatever.*; write it with operators"),
        (lambda s, a: s.f32[3, 4].Add(a, a), "refuses the graph entry"),
    ],
)
def test_a_graph_is_refused_in_one_sentence(write, said):
    with pytest.raises(CompileError, match=said) as refused:
        built(write, A)
    assert "\n" not in str(refused.value)


def test_a_jaxlib_of_another_interface_is_refused(monkeypatch):
    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    with pytest.raises(ImportError, match=r"jaxlib 0.10.2 is installed, expected 0.7.2"):
        execute.xla_client.__wrapped__()


def test_a_file_from_elsewhere_is_refused():
    neff = execute.MAGIC + b"\x0a\xff"
    for file in (b"", b"NEFF of a device", neff):
        with pytest.raises(CompileError, match="is not one of this neuron_cpu, is damaged"):
            execute.Executable(file, 1)
