"""Reading what a compiled model consists of, from the stand-in's record and from graph.hlo."""

import base64
import json

import pytest
from torch_neuronx.pyhlo import hlo_pb2

from harness.figures import graphs


def write_hlo(folder, submodel, kernel_config):
    """One dot of (4, 2, 3) x (4, 3, 5), batched over the 4, and one kernel call."""
    module = hlo_pb2.HloModuleProto(name="m")
    computation = module.computations.add(name="main", id=1)
    for number, shape in ((1, (4, 2, 3)), (2, (4, 3, 5))):
        parameter = computation.instructions.add(name="p", opcode="parameter", id=number)
        parameter.shape.dimensions.extend(shape)
    dot = computation.instructions.add(name="d", opcode="dot", id=3)
    dot.operand_ids.extend((1, 2))
    dot.dot_dimension_numbers.lhs_contracting_dimensions.append(2)
    dot.dot_dimension_numbers.rhs_contracting_dimensions.append(1)
    dot.dot_dimension_numbers.lhs_batch_dimensions.append(0)
    dot.dot_dimension_numbers.rhs_batch_dimensions.append(0)
    call = computation.instructions.add(name="k", opcode="custom-call", id=4)
    call.custom_call_target = graphs.KERNEL_TARGET
    call.backend_config = kernel_config
    other = computation.instructions.add(name="o", opcode="custom-call", id=5)
    other.custom_call_target = "SomethingElse"
    path = folder / "graphs" / submodel / "_tp0_bk0" / "model" / "graph.hlo"
    path.parent.mkdir(parents=True)
    path.write_bytes(module.SerializeToString())


def kernel_config(**values):
    return base64.b64encode(json.dumps(values).encode())


def test_device_graphs_count_dots_and_kernels(tmp_path):
    write_hlo(tmp_path, "token_generation_model", kernel_config(func_name="mlp", mac_count="80"))
    (graph,) = graphs.read(tmp_path)
    assert graph.macs == 4 * 2 * 3 * 5 + 80
    assert graph.nki_share == pytest.approx(80 / 200)
    assert graph.uncounted_kernels == []


@pytest.mark.parametrize("config", [kernel_config(func_name="mlp"), b"not base64 json"])
def test_kernels_without_a_count_are_told_not_taken_for_zero(tmp_path, config):
    write_hlo(tmp_path, "context_encoding_model", config)
    (graph,) = graphs.read(tmp_path)
    assert graph.macs == 120 and len(graph.uncounted_kernels) == 1
