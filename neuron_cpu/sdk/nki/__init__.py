"""``nki``: the kernel language of SDK 2.29 and later over the simulated NeuronCore.

Source of names and signatures: aws-neuron-sdk v2.32.0, nki/api/nki/__init__.py.
"""

from neuron_cpu.core.current.kernel import Kernel, jit, simulate
from neuron_cpu.core.device import release as _release
from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.inline import attach as _attach

from . import collectives, dtype, isa, language, meta, simulator, typing

__all__ = [
    "Kernel", "collectives", "dtype", "isa", "jit", "language", "meta", "simulate", "typing",
]  # fmt: skip

_attach(Kernel)
__getattr__ = _unknown.of_module("nki", globals(), current=True, __version__=_release.nki_version)
