"""The record of an HLO module that the estimate of a graph reads."""

import pytest
import torch
from torch_neuronx.pyhlo.scribe import HloScribe

from neuron_cpu.hlo.record import record
from neuron_cpu.runtime import outside
from neuron_cpu.runtime.recording import COLLECTIVE, TORCH, Event, TensorShape


def events(write):
    """What `write(scribe, parameter)` does; `parameter(*sizes)` makes one."""

    def entry(s):
        made = []

        def parameter(*sizes, kind="f32"):
            made.append(getattr(s, kind)[sizes].Parameter(parameter_number=len(made)))
            return made[-1]

        return write(s, parameter)

    return record(HloScribe(None)(entry).module_proto).events


def shape(*sizes, dtype=torch.float32):
    return TensorShape(sizes, dtype)


def weight_right(s, parameter):
    x = s.f32[7, 64].Tanh(parameter(7, 64))
    numbers = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    return s.f32[7, 96].Dot(x, parameter(64, 96), dot_dimension_numbers=numbers)


def weight_left(s, parameter):
    """As the package writes an output's projection, the weight behind its ring and turned."""
    x = s.f32[7, 64].Tanh(parameter(7, 64))
    weight = parameter(96, 64)
    target = "AwsNeuronTransferWithStaticRing"
    weight = s.f32[96, 64].CustomCall(weight, custom_call_target=target)
    weight = s.f32[64, 96].Transpose(weight, dimensions=[1, 0])
    numbers = {"lhs_contracting_dimensions": [0], "rhs_contracting_dimensions": [1]}
    return s.f32[96, 7].Dot(weight, x, dot_dimension_numbers=numbers)


def batched(s, parameter):
    """Scores of queries [a, b, h, d] and keys [n, b, h, d]."""
    query = s.f32[5, 2, 3, 16].Tanh(parameter(5, 2, 3, 16))
    keys = s.f32[40, 2, 3, 16].Tanh(parameter(40, 2, 3, 16))
    numbers = {f"{side}_batch_dimensions": [1, 2] for side in ("lhs", "rhs")}
    numbers |= {f"{side}_contracting_dimensions": [3] for side in ("lhs", "rhs")}
    return s.f32[2, 3, 5, 40].Dot(query, keys, dot_dimension_numbers=numbers)


@pytest.mark.parametrize(
    ("write", "name", "inputs", "macs"),
    [
        (weight_right, "mm", (shape(7, 64), shape(64, 96)), 7 * 64 * 96),
        (weight_left, "mm", (shape(7, 64), shape(64, 96)), 7 * 64 * 96),
        (batched, "bmm", (shape(6, 5, 16), shape(6, 16, 40)), 2 * 3 * 5 * 16 * 40),
    ],
)
def test_a_product_is_pytorchs_with_weights_on_the_right(write, name, inputs, macs):
    *_, found = events(write)
    assert (found.name, found.inputs, found.macs) == (name, inputs, macs)
    assert outside.work(found) == outside.work(Event("", TORCH, name, inputs, (), macs))


def scattered(s, parameter):
    cache, ids, new = parameter(128, 4), parameter(1, kind="s32"), parameter(1, 4)

    def assign(scribe):
        return [scribe.f32.Parameter(parameter_number=k) for k in (0, 1)][1]

    numbers = {"update_window_dims": [1], "inserted_window_dims": [0], "index_vector_dim": 1}
    numbers["scatter_dims_to_operand_dims"] = [0]
    return s.f32[128, 4].Scatter(
        cache, ids, new, scatter_dimension_numbers=numbers, to_apply=assign
    )


def test_an_update_of_a_cache_moves_the_new_rows_alone():
    (found,) = events(scattered)
    assert outside.moved(found) == 2 * (4 + 4 * 4)  # an index, and a row of fp32


def joined(s, parameter):
    x = s.f32[8].Convert(parameter(8))  # the same type
    flat = s.f32[2, 4].Reshape(x)

    def add(scribe):
        return scribe.f32.Add(*(scribe.f32.Parameter(parameter_number=k) for k in (0, 1)))

    return s.f32[2, 4].AllReduce(flat, replica_groups=[[0, 1]], to_apply=add)


def test_renaming_is_no_event_and_a_collective_is_one():
    (found,) = events(joined)
    assert (found.kind, found.name, found.outputs) == (COLLECTIVE, "all-reduce", (shape(2, 4),))
