"""Another front end records the same instructions, without neuronxcc's calling forms or tensors."""

from __future__ import annotations

import ml_dtypes
import neuronxcc.nki as nki
import numpy as np
import pytest
import torch
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core.check.verify import verify
from neuron_cpu.core.device.dtypes import BFLOAT16, FLOAT32
from neuron_cpu.core.instructions.copies import DMA_COPY
from neuron_cpu.core.instructions.recorder import record
from neuron_cpu.core.instructions.scalar import ACTIVATION, ActivationAttrs
from neuron_cpu.core.instructions.tensor_engine import MatmulAttrs, multiply_into
from neuron_cpu.core.language.assignment import insert_initial_fills
from neuron_cpu.core.program.attributes import Attrs
from neuron_cpu.core.program.program import Program
from neuron_cpu.core.program.trace import Tracer
from neuron_cpu.core.program.view import View
from neuron_cpu.core.run.execute import Plan
from tests.core.test_isa import data


class Handle(View):
    """A tensor of a language whose tensors have neither subscripts nor operators."""

    __slots__ = ()


def by_record(parts):
    """exp of a sum of products, columns of ``a`` and ``b`` taken in ``parts`` steps."""
    program = Program("by_record", (), None)
    with Tracer(program, view_type=Handle) as tracer:

        def new(shape, dt, buffer, role="local", name=""):
            return tracer.whole(tracer.storage(shape, dt, buffer, role, name))

        a = new((128, 128), BFLOAT16, "hbm", "input", "a")
        b = new((128, 256), BFLOAT16, "hbm", "input", "b")
        out = new((128, 256), FLOAT32, "shared_hbm", "output", "out")
        left, right = new((128, 128), BFLOAT16, "sbuf"), new((128, 256), BFLOAT16, "sbuf")
        total, kept = new((128, 256), FLOAT32, "psum"), new((128, 256), FLOAT32, "sbuf")
        record(DMA_COPY, (left,), (a,), Attrs(raw=True))
        record(DMA_COPY, (right,), (b,), Attrs(raw=True))
        for _ in range(parts):
            multiply_into(total, left, right, MatmulAttrs())
        record(ACTIVATION, (kept,), (total,), ActivationAttrs(op="exp"))
        record(DMA_COPY, (out,), (kept,), Attrs(raw=True))
        insert_initial_fills(program)
        tracer.finish()
    program.inputs += [a.storage, b.storage]
    program.outputs.append(out.storage)
    program.output_shapes.append(out.shape)
    return program


@nki.jit
def by_assignment(a, b, parts):
    out = nl.ndarray((128, 256), nl.float32, buffer=nl.shared_hbm)
    left, right = nl.load(a), nl.load(b)
    total = nl.zeros((128, 256), nl.float32, buffer=nl.psum)
    for _ in nl.static_range(parts):
        total += nisa.nc_matmul(left, right)
    nl.store(out, nisa.activation(nl.exp, total))
    return out


def shape_of(program):
    """What was recorded, without names, numbers of storages and lines."""
    numbers = {}

    def region(view):
        place = numbers.setdefault(id(view.storage), len(numbers))
        return place, view.storage.buffer, *view.key(), view.dt.name

    return [
        (i.op.name, i.attrs.key(), i.attrs.group, *map(region, i.src), *map(region, i.dst))
        for i in program
    ]


@pytest.mark.parametrize("parts", [1, 3])
def test_both_front_ends_record_the_same(parts):
    a, b = data(1, (128, 128), "bfloat16", -0.2, 0.2), data(2, (128, 256), "bfloat16", -0.2, 0.2)
    program = by_record(parts)
    verify(program)
    assert all(type(v) is Handle for i in program for v in (*i.dst, *i.src))
    assert shape_of(program) == shape_of(by_assignment.trace(a, b, parts))
    hosted = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (a, b)]
    assert a.dtype == ml_dtypes.bfloat16
    assert np.array_equal(Plan(program).run(hosted)[0].numpy(), by_assignment(a, b, parts))
