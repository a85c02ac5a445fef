"""PyTorch's device `neuron` on a CPU: tensors, kernels, compiled graphs, processes, a report.

`neuron_cpu.announce` names the device; whatever a program then uses of it loads this package.
"""

from neuron_cpu import announce

from . import around, autocast, cells, kernels  # noqa: F401 - kernels take its tensors from here on

announce.neuron()
autocast.install()
