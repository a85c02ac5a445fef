"""Graphs that neuronx-cc refuses, by operator and type, and the nearest that it takes."""

import pytest
import torch
import torch_neuronx

X = torch.randn(4, 8)
N = torch.arange(32, dtype=torch.int32).reshape(4, 8)
MASK = X > 0
ROWS = torch.zeros(4, 8, dtype=torch.int64)
IMAGE = torch.randn(1, 2, 8, 8)
F = torch.nn.functional

# code: what is refused and its inputs, what is taken instead and its inputs
REFUSED = {
    "NCC_EVRF029": (lambda x: torch.sort(x)[0], (X,), lambda x: torch.topk(x, 8)[0], (X,)),
    "NCC_EVRF013": (lambda x: torch.topk(x, 2)[1], (N,),
                    lambda x: torch.topk(x.float(), 2)[1], (N,)),
    "NCC_EMOD025": (torch.nonzero, (X,), lambda x: torch.where(x > 0, x, 0.0), (X,)),
    "NCC_EMOD025 selected": (lambda x, m: x[m], (X, MASK), lambda x, m: x * m, (X, MASK)),
    "NCC_ESPP004": (lambda x: x * 2, (X.double(),), lambda x: x * 2, (X,)),
    "NCC_ESPP004 inside": (lambda x: x.double().sum(1).float(), (X,), lambda x: x.sum(1), (X,)),
    "NCC_EVRF051": (lambda x: x.float(), (X.to(torch.float8_e4m3fn),), lambda x: x.float(),
                    (X.bfloat16(),)),
    "NCC_EVRF005": (lambda x: x.float(), (X.to(torch.float8_e4m3fnuz),), lambda x: x.float(),
                    (X.half(),)),
    "NCC_EVRF004": (lambda x: torch.fft.fft(x).real, (X,), lambda x: x @ x.T, (X,)),
    "NCC_EVRF035": (lambda x: torch.mm(x, x.T), (N,), lambda x: torch.mm(x.float(), x.T.float()),
                    (N,)),
    "NCC_EVRF060": (lambda x, i: x.scatter_add(0, i, x), (N, ROWS),
                    lambda x, i: x.scatter_add(0, i, x), (X, ROWS)),
    "NCC_EVRF016": (lambda x, i: x.scatter_reduce(0, i, x, "amax"), (N, ROWS),
                    lambda x, i: x.scatter_reduce(0, i, x, "amax"), (X, ROWS)),
    "NCC_EVRF062": (lambda x: x**3, (N.long(),), lambda x: x**3, (N,)),
    "NCC_EVRF022": (lambda x: x >> 1, (N.to(torch.int8),), lambda x: x >> 1, (N,)),
    "NCC_EVRF018": (lambda x: F.max_pool2d(x, 2, dilation=2), (IMAGE,),
                    lambda x: F.max_pool2d(x, 2), (IMAGE,)),
    "NCC_EVRF010": (
        lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 2, 2), stride=2, dilation=2), (IMAGE,),
        lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 2, 2), stride=2), (IMAGE,)),
    "NCC_EUOC002": (lambda x: torch.linalg.qr(x)[1], (X,), lambda x: x @ x.T, (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_code_and_what_to_write(name):
    wrong, given, right, other = REFUSED[name]
    with pytest.raises(RuntimeError, match=rf"\[{name.split()[0]}\].*; write .+"):
        torch_neuronx.trace(wrong, given)
    traced = torch_neuronx.trace(right, other)
    assert torch.equal(traced(*other), right(*other))


def test_masked_assignment_names_the_defect():
    def flipped(x, mask):
        x = x.clone()
        x[mask] = x[mask].flip(-1)
        return x

    with pytest.raises(RuntimeError, match="1381"):
        torch_neuronx.trace(flipped, (X, MASK))


def test_types_of_fp8_by_chip_and_flag(monkeypatch):
    x = (X.to(torch.float8_e4m3fn),)
    flag = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
    assert torch_neuronx.trace(lambda t: t.float(), x, compiler_args=[flag])(*x).shape == X.shape
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert torch_neuronx.trace(lambda t: t.float(), x)(*x).shape == X.shape


def test_arguments_that_a_device_refuses():
    with pytest.raises(RuntimeError, match="NCC_EARG001"):
        torch_neuronx.trace(torch.neg, X, compiler_args=["--lnc", "2"])
    with pytest.raises(TypeError, match="is a list"):
        torch_neuronx.trace(torch.neg, [X])
