"""``nki``: the kernel language of SDK 2.29 and later over the simulated NeuronCore."""

# Written by stubs/generate.py.
from typing import Any

from . import collectives as collectives
class dtype:
    """``nki.dtype``: the element types, for annotations."""
    float32: Any
    tfloat32: Any
    bfloat16: Any
    float16: Any
    float8_e4m3: Any
    float8_e5m2: Any
    int32: Any
    int16: Any
    int8: Any
    uint32: Any
    uint16: Any
    uint8: Any
    bool_: Any
    float8_e4m3fn: Any
    float8_e8m0fnu: Any
    float8_e4m3fn_x4: Any
    float8_e5m2_x4: Any
    float4_e2m1fn_x4: Any

from . import isa as isa
from . import language as language
from . import meta as meta
from . import typing as typing

class Kernel:
    """A function under ``nki.jit``: callable with torch tensors or numpy arrays.

    ``kernel[2](...)`` runs it on both physical cores of a logical core (gen3 and later). Inputs
    that the kernel writes are updated in place. Inside another kernel the function is inlined."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call self as a function."""
    def __getitem__(self, cores: Any) -> Any: ...
    def check(kernel, reference: Any, *args: Any, outputs: Any = None, **named: Any) -> Any:
        """Whether a kernel is legal and right on adversarial values of the arguments' shapes.

        Args:
            reference: numpy or PyTorch function of the same arguments.
            outputs: makes results comparable (`judge.references.comparable`).

        Raises:
            UsageError: the reference fails."""
    func: Any
    func_name: Any
    def here(self, args: Any, kwargs: Any) -> Any:
        """A call of tensors that no device has."""
    name: Any
    def on_host(self, *args: Any, **kwargs: Any) -> Any:
        """The call with tensors in the host's memory, whoever has the others."""
    def profile(kernel, *args: Any, baseline: Any = None, html: Any = '', **named: Any) -> Any:
        """Where the time of a call goes, estimated; nothing is computed.

        Args:
            baseline: another kernel of the same arguments, shown beside it.
            html: a file that gets the page.

        Raises:
            NkiError: the kernel is not legal with these arguments."""
    today: Any
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The verified Program for these arguments (only shapes, types and constants count)."""
    def trace_with_values(self, *args: Any, **kwargs: Any) -> Any:
        """The verified Program for these values, of a kernel whose control flow is data.

        It runs on copies while it is recorded: the arguments stay unchanged."""
    def with_schedule(self, edges: Any) -> Any:
        """The kernel with instructions ordered by name: pairs (consumer, producer or producers)."""

def jit(fn: Any = None, **options: Any) -> Any:
    """``@nki.jit``, ``@nki.jit()`` or ``nki.jit(fn)``: a kernel of the current language.

    ``platform_target``, of 2.27 and 2.28, chooses its generation; later releases leave that to the
    environment, so there it is a warning."""
def simulate(kernel: Any, *args: Any) -> Any:
    """``nki.simulate(kernel)(*args)``: every kernel is simulated here; functions become kernels."""
