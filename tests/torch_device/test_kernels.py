"""Kernels on tensors of the device: called directly, wrapped, registered, compiled."""

import warnings
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import pytest
import torch
import torch_neuronx
from neuronxcc import nki as older
from neuronxcc.nki import language as older_nl
from neuronxcc.nki import typing as older_nt
from torch import nn
from torch_neuronx import nki_op, wrap_nki

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.torch_device.tensor import NeuronTensor


@nki.jit
def scaled(x: Any, factor: float, powers: tuple = (1,), kind: Any = nl.float32) -> Any:
    """factor * sum(powers) * x in `kind`, and x itself."""
    tile_sb = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=x)
    first = nl.ndarray(x.shape, dtype=kind, buffer=nl.shared_hbm)
    second = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=second, src=tile_sb)
    nisa.tensor_scalar(dst=tile_sb, data=tile_sb, op0=nl.multiply, operand0=factor * sum(powers))
    nisa.dma_copy(dst=first, src=tile_sb)
    return first, second


@nki.jit
def put(cache: Any, rows: Any, returned: bool) -> Any:
    """Write rows to the front of the cache; the result is the cache, else the rows."""
    tile_sb = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=rows)
    nisa.dma_copy(dst=cache[0 : rows.shape[0]], src=tile_sb)
    if returned:
        return cache
    copy = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=copy, src=tile_sb)
    return copy


@older.jit
def older_put(cache: older_nt.mutable_tensor, rows: Any) -> Any:
    older_nl.store(cache[0:2, 0:4], older_nl.load(rows[0:2, 0:4]) + older_nl.load(cache[0:2, 0:4]))
    return cache


@nki_op("tests_device::scaled", mutates_args={})
def scaled_op(
    x: torch.Tensor, factor: float, shift: torch.Tensor | None = None, twice: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """With PyTorch's operators around the kernel, an optional tensor and constants."""
    padded = nn.functional.pad(x, (0, 1))
    first, second = scaled(padded, factor * 2 if twice else factor)
    first = first if shift is None else first + shift
    return first[:, :-1], second.sum(-1)


@nki_op("tests_device::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return scaled(x * x, 1.0)[0]


square.register_autograd(
    lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@nki_op("tests_device::put", mutates_args={"cache"})
def put_op(cache: torch.Tensor, rows: torch.Tensor) -> None:
    put(cache, rows, True)


@nki_op("tests_device::put_returned", mutates_args={"cache"})
def put_returned(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return put(cache, rows, True)


def on_device(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("neuron")


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="neuron", **{"fullgraph": True, **options})


FORMS: dict[str, Any] = {
    "direct": lambda x: scaled(x, 1.5, (2, 1)),
    "by keyword": lambda x: scaled(factor=1.5, powers=[1, 2][:0] or (2, 1), x=x),
    "wrapped": lambda x: wrap_nki(scaled)(x, 1.5, powers=(2, 1)),
    "in brackets": lambda x: wrap_nki(scaled)[1](x, 1.5, (2, 1)),
    "of a slice": lambda x: scaled(torch.cat([x, x])[: x.shape[0]], 1.5, (2, 1)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_a_kernel_is_called_on_the_device(name: str, run: Any) -> None:
    x = on_device(5, 7)
    first, second = run(lambda v: FORMS[name](v + 0))(x)
    assert type(first) is type(second) is NeuronTensor
    torch.testing.assert_close(first.cpu(), 4.5 * x.cpu())
    assert torch.equal(second.cpu(), x.cpu())


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_an_operator_has_optional_arguments_and_several_results(run: Any) -> None:
    x, shift = on_device(4, 6), on_device(4, 1)
    for given, twice in ((None, False), (shift, True)):
        first, second = run(lambda v, s, t=twice: scaled_op(v, 3.0, s, twice=t))(x, given)
        expected = x.cpu() * (6 if twice else 3) + (0 if given is None else shift.cpu())
        torch.testing.assert_close(first.cpu(), expected)
        torch.testing.assert_close(second.cpu(), x.cpu().sum(-1))
    assert torch.ops.tests_device.scaled(x, 1.0)[0].is_neuron


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_autograd_goes_through_a_registered_gradient(run: Any) -> None:
    x = on_device(3, 5).requires_grad_()
    run(lambda v: square(v * 2).sum())(x).backward()
    torch.testing.assert_close(x.grad.cpu(), 8 * x.detach().cpu())


def test_a_kernel_without_gradient_says_so_where_one_is_asked_for() -> None:
    x = on_device(2, 3).requires_grad_()
    assert torch.equal(scaled(x, 1.0)[1].detach().cpu(), x.detach().cpu())
    with pytest.raises(RuntimeError, match="kernel scaled has no gradient.*register_autograd"):
        scaled(x, 1.0)[0].sum().backward()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        scaled_op(x, 1.0)[0].sum().backward()


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", ["direct", "None", "returned"])
def test_writes_go_through_to_the_argument(run: Any, form: str) -> None:
    def step(cache: torch.Tensor, rows: torch.Tensor) -> Any:
        view = cache[1:4]
        if form == "direct":
            return put(view, rows, True) + 0
        if form == "None":
            put_op(view, rows)
            return cache[1:4] + 0
        return put_returned(view, rows) + 0

    cache, rows = torch.zeros(5, 4, device="neuron"), on_device(2, 4)
    got = run(step)(cache, rows)
    expected = torch.zeros(5, 4)
    expected[1:3] = rows.cpu()
    assert torch.equal(cache.cpu(), expected) and torch.equal(got.cpu(), expected[1:4])


def test_a_write_that_is_not_returned_is_a_warning_in_a_compiled_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, rows = torch.zeros(3, 4, device="neuron"), on_device(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(cache, rows, False)  # eager: nothing is lost
    with pytest.warns(NkiWarning, match="put writes its argument cache .* all of three"):
        compiled(lambda c, r: put(c, r, False))(cache.zero_(), rows)
    assert torch.equal(cache[:2].cpu(), rows.cpu())
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    with pytest.raises(Exception, match="sim_write_not_returned"):
        compiled(lambda c, r: put(c, r, False))(cache, rows)


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_the_older_language_writes_its_mutable_parameter(run: Any) -> None:
    cache, rows = torch.ones(2, 4, device="neuron"), on_device(2, 4)
    got = run(lambda c, r: older_put(c, r) + 0)(cache, rows)
    torch.testing.assert_close(cache.cpu(), rows.cpu() + 1)
    assert torch.equal(got.cpu(), cache.cpu())


def test_a_grid_inside_of_the_wrapper_is_lost_as_on_a_device() -> None:
    with pytest.warns(NkiWarning, match=r"write wrap_nki\(scaled\)\[1\].*sim_wrapped_grid"):
        assert wrap_nki(scaled[1]).grid == ()


@nki.jit
def illegal(x: Any) -> Any:
    tile_sb = nl.ndarray((256, 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile_sb, src=x)
    return x


def test_messages_are_those_of_a_direct_call() -> None:
    x = torch.zeros(256, 4)
    with pytest.raises(NkiError) as direct:
        illegal(x)
    with pytest.raises(NkiError) as ours:
        illegal(x.to("neuron"))
    assert str(ours.value) == str(direct.value) and "test_kernels.py" in str(ours.value)


@pytest.mark.parametrize(
    "kind, said, act",
    [
        (RuntimeError, "beside one on neuron:0", lambda x: put(x, torch.ones(2, 4), True)),
        (ValueError, "given the kernel scaled", lambda x: nki_op("tests_device::no", scaled)),
        (ValueError, "annotation", lambda x: nki_op("tests_device::no", lambda v: v)),
        (AttributeError, "no attribute 'nothing'", lambda x: torch_neuronx.nothing),
    ],
)
def test_what_is_refused(kind: type, said: str, act: Any) -> None:
    with pytest.raises(kind, match=said):
        act(on_device(3, 4))


# --- torch.compile --------------------------------------------------------------------------------
class Cached(nn.Module):
    """A module with a state that each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.add_(x)
        return square(self.layer(x)) + self.kept


def test_a_compiled_module_keeps_its_buffers_and_trains() -> None:
    torch.manual_seed(0)
    ours = Cached().to("neuron")
    torch.manual_seed(0)
    theirs = Cached()
    torch._dynamo.reset()
    ours.compile(backend="neuron", fullgraph=True)
    x = on_device(2, 4)
    for _ in range(2):
        got, expected = ours(x), theirs.layer(x.cpu()) ** 2 + theirs.kept.add_(x.cpu())
        torch.testing.assert_close(got.cpu(), expected)
        got.sum().backward()
        expected.sum().backward()
    torch.testing.assert_close(ours.layer.weight.grad.cpu(), theirs.layer.weight.grad)
    torch.testing.assert_close(ours.kept.cpu(), theirs.kept)


def test_a_graph_is_captured_once_for_a_signature_and_breaks_where_it_must() -> None:
    torch_neuronx.reset_dynamo_metrics()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = scaled(x, 2.0)[0]
        torch._dynamo.graph_break()
        return y + 1

    run = compiled(step, fullgraph=False, dynamic=False)
    for rows in (2, 2, 3, 2):
        x = on_device(rows, 4)
        torch.testing.assert_close(run(x).cpu(), 2 * x.cpu() + 1)
    assert torch_neuronx.get_dynamo_metrics() == {"graphs": 4}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "neuron"])
def test_backward_goes_through_graphs_of_pytorchs_own_backends(backend: str) -> None:
    layer = nn.Linear(4, 3).to("neuron")
    torch._dynamo.reset()
    torch.compile(layer, backend=backend)(on_device(2, 4)).sum().backward()
    expected = on_device(2, 4).cpu().sum(0).expand(3, 4)
    torch.testing.assert_close(layer.weight.grad.cpu(), expected)


def test_a_kernel_of_tensors_on_the_host_runs_there() -> None:
    x = on_device(3, 4).cpu()
    torch._dynamo.reset()
    run = torch.compile(lambda x: scaled(x, 1.5, (2, 1))[0] + 1)
    torch.testing.assert_close(run(x), scaled(x, 1.5, (2, 1))[0] + 1)


def test_sizes_are_constants() -> None:
    for options in ({"dynamic": True}, {}):
        run = compiled(lambda x: x * 2, **options)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="dynamic=False"):
            for rows in (3, 4, 5):
                run(on_device(rows, 4))


def test_a_model_of_the_host_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    x = on_device(2, 4).cpu()

    def step(v: torch.Tensor) -> torch.Tensor:
        return model(v) + torch.arange(3, device=v.device) + torch.ones(3)

    expected = step(x)
    got = compiled(step)(x)
    assert got.is_neuron
    torch.testing.assert_close(got.cpu(), expected)
    got.sum().backward()
    assert model.weight.grad.device.type == "cpu"
    monkeypatch.setenv("TORCH_NEURONX_RETAIN_DEVICE_MODE", "1")
    assert not compiled(step)(x).is_neuron
    monkeypatch.setenv("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1")
    with pytest.raises(Exception, match="Input 0 of the graph is on cpu"):
        compiled(step)(x)
