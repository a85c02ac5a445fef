"""A kernel of NKI as a graph of PyHLO calls it."""

import neuronxcc.nki.language as nl
from neuronxcc.nki import FrameworkKernel
from torch_neuronx.pyhlo.scribe import TORCH

from neuron_cpu.hlo import calls


class _Binding(FrameworkKernel):
    """As a framework binds kernels to its tensors, here to shapes of PyHLO."""

    def map_framework_tensor(self, tensor):
        return tensor.sizes, tensor.shape_proto.element_type

    def translate_to_neuron_dtype(self, dtype):
        return str(TORCH[dtype]).removeprefix("torch.")


def doubled(x, out):
    nl.store(out, nl.load(x) * 2)


def call(x):
    """`doubled` of a value."""
    place = x.dtype[x.sizes]
    key = _Binding("doubled", doubled).dump_config(x, place)[0]
    return place.CustomCall(x, custom_call_target=calls.KERNEL, backend_config=key.encode())
