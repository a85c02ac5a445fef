"""lab/saved_graph.py: the time of a graph of PyHLO, and files that it refuses."""

import sys

import pytest
import torch
from torch_neuronx.pyhlo.scribe import HloScribe

from lab import saved_graph
from neuron_cpu.core.time import cost
from neuron_cpu.hlo.execute import MAGIC
from neuron_cpu.runtime import outside
from neuron_cpu.runtime.recording import TORCH, Event, TensorShape


def entry(s):
    """A product with a weight, and a sum over two ranks."""
    x = s.bf16[1, 512].Parameter(parameter_number=0)
    weight = s.bf16[512, 2048].Parameter(parameter_number=1)
    numbers = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    product = s.bf16[1, 2048].Dot(x, weight, dot_dimension_numbers=numbers)

    def add(scribe):
        return scribe.bf16.Add(*(scribe.bf16.Parameter(parameter_number=k) for k in (0, 1)))

    return s.bf16[1, 2048].AllReduce(product, replica_groups=[[0, 1]], to_apply=add)


NEFF = MAGIC + HloScribe(None)(entry).module_proto.SerializeToString()


def test_times_are_those_of_pytorchs_operators():
    found = saved_graph.estimate(NEFF, ranks=2)
    product, joined = found.operators
    shapes = [TensorShape(sizes, torch.bfloat16) for sizes in ((1, 512), (512, 2048), (1, 2048))]
    event = Event("", TORCH, "mm", tuple(shapes[:2]), tuple(shapes[2:]), 512 * 2048)
    assert (product.name, product.macs) == ("mm", event.macs)
    assert (product.bytes, product.time_ns) == (outside.moved(event), outside.work(event).ns(False))
    assert joined.time_ns == cost.Overheads().collective(2 * 2048, 2)


def test_the_command_prints_the_operators(tmp_path, monkeypatch, capsys):
    file = tmp_path / "graph.neff"
    file.write_bytes(NEFF)
    monkeypatch.setattr(sys, "argv", ["saved_graph", str(file), "--tp-degree", "2"])
    assert saved_graph.main() == 0
    said = capsys.readouterr().out
    assert "estimated, not measured" in said
    assert "all-reduce" in said and "token_generation_model" in said


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "cut short"), (NEFF[:-9], "cut short"), (None, "No such file")]
)
def test_another_file_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, content, said):
    file = tmp_path / "graph.neff"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["saved_graph", str(file), "--tp-degree", "2"])
    with pytest.raises(SystemExit) as ended:
        saved_graph.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
