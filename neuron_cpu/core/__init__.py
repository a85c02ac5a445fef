"""The simulated NeuronCore-v2: trace kernels into Programs, verify, execute and schedule them."""

from .device.errors import NkiError, NkiWarning, silence
from .device.ranks import on_ranks
from .language.kernel import Kernel, KernelCall, observe_kernel_calls, release_thread
from .program.program import Program
from .run.packing import keep_packed

__all__ = [
    "Kernel", "KernelCall", "NkiError", "NkiWarning", "Program", "keep_packed",
    "observe_kernel_calls", "on_ranks", "release_thread", "silence",
]  # fmt: skip
