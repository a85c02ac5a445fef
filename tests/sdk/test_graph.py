"""What the tracer counts: every way in which PyTorch multiplies matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_neuronx.pyhlo.hlo_pb2 import HloModuleProto

from harness.figures import graphs
from neuron_cpu.errors import CompileError
from neuron_cpu.runtime import graph

X, Y = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)
W, BIAS = torch.zeros(7, 4), torch.zeros(7)
HEADS = torch.zeros(2, 6, 3, 8)


class Function(nn.Module):
    """A model of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize(
    ("function", "inputs", "macs"),
    [
        (lambda x, w: F.linear(x, w), (X, W), 2 * 3 * 4 * 7),
        (lambda x, w: F.linear(x[0], w), (X, W), 3 * 4 * 7),
        (torch.matmul, (X, Y), 2 * 3 * 4 * 5),
        (torch.bmm, (X, Y), 2 * 3 * 4 * 5),
        (lambda x, y: torch.baddbmm(torch.zeros(2, 3, 5), x, y), (X, Y), 2 * 3 * 4 * 5),
        (lambda x, w: torch.einsum("...k,nk->...n", x, w), (X, W), 2 * 3 * 4 * 7),
        (torch.mv, (W, torch.zeros(4)), 7 * 4),
        (torch.dot, (BIAS, BIAS), 7),
        (F.scaled_dot_product_attention, (HEADS, HEADS, HEADS), 2 * 2 * 6 * 3 * 3 * 8),
        (lambda x: (x * x).sum(), (X,), 0),
    ],
)
def test_macs(function, inputs, macs):
    record = graph.trace(Function(function), inputs, "tag", 1)
    assert sum(row["macs"] for row in record.operators) == macs
    assert file_macs(graph.hlo_module(record).SerializeToString()) == macs


def file_macs(serialised):
    """MACs of a graph file from its dimension numbers, as the driver counts a device compile."""
    module = HloModuleProto()
    module.ParseFromString(serialised)
    (computation,) = module.computations
    shapes = {item.id: item.shape.dimensions for item in computation.instructions}
    dots = [item for item in computation.instructions if item.opcode == "dot"]
    return sum(
        graphs.dot_macs(*(shapes[i] for i in item.operand_ids), item.dot_dimension_numbers)
        for item in dots
    )


def test_python_may_look_at_constants():
    """Ranges, literals and buffers have values while tracing, wherever they are asked to be."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("limit", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            frequencies = 1.0 / torch.arange(1, 5, device=x.device).float().to(x.device)
            kept = [f if f > 1 / self.limit else f / 2 for f in frequencies]
            scale = torch.tensor(kept, device=x.device)
            assert scale.tolist() == [1.0, 0.25, pytest.approx(1 / 6), 0.125]
            with torch.autocast(device_type=x.device.type, enabled=False):
                return x * scale.to(x.device) + x.to(scale.device)

    record = graph.trace(nn.Sequential(Rotary()), (X,), "tag", 1)
    assert record.elementwise["0"]["mul"] > 0  # by the module that asks


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer, x: buffer.copy_(x),
        lambda buffer, x: buffer[0].add_(x[0]),
        lambda buffer, x: torch.add(x, 1, out=buffer),
    ],
    ids=["copy", "view", "out"],
)
def test_a_constant_written_with_inputs_is_none_any_more(write):
    def function(x):
        buffer = torch.zeros(2, 3, 4)
        assert buffer.sum().item() == 0.0
        write(buffer, x)
        assert buffer.shape == (2, 3, 4)
        return buffer.sum().item()

    with pytest.raises(CompileError, match="reads a tensor's value"):
        graph.trace(Function(function), (X,), "tag", 1)
