"""``neuronxcc.nki``: decorators and runners of SDK 2.21 over the simulated NeuronCore."""

# Written by stubs/generate.py.
from typing import Any

from . import compiler as compiler
from . import isa as isa
from . import language as language
from . import typing as typing

class FrameworkKernel:
    """The base of a framework's own binding: it traces a kernel for its kind of tensors.

    Outputs are the kernel's last parameters.
    Source: aws-neuron/transformers-neuronx 1ade6d7, nki/compile.py.

    Attributes:
        traced: every program that this process traced, by its fingerprint."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call self as a function."""
    def __getitem__(self, grid: Any) -> Any: ...
    def check(kernel, reference: Any, *args: Any, outputs: Any = None, **named: Any) -> Any:
        """Whether a kernel is legal and right on adversarial values of the arguments' shapes.

        Args:
            reference: numpy or PyTorch function of the same arguments.
            outputs: makes results comparable (`judge.references.comparable`).

        Raises:
            UsageError: the reference fails."""
    def dump_config(self, *tensors: Any) -> Any:
        """Trace and check the kernel: the fingerprint, and the names of inputs and outputs."""
    func: Any
    func_name: Any
    def here(self, args: Any, kwargs: Any) -> Any:
        """A call of tensors that no device has."""
    def map_framework_tensor(self, tensor: Any) -> Any:
        """The shape and the type of one of its tensors: a subclass says it."""
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
    traced: Any
    def translate_to_neuron_dtype(self, dtype: Any) -> Any:
        """Numpy's type of one of its types: a subclass says it."""

class tensor:
    """A tensor in HBM, SBUF or PSUM, or a part of one (``neuronxcc.nki.tensor``).

    Attributes:
        shape: sizes, partition axis first for a tile.
        dtype: element type, equal to ``nl.bfloat16`` etc. (an np.dtype, except for tf32).
        ndim, itemsize, buffer: as the names say."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __add__(self, other: Any) -> Any: ...
    def __and__(self, other: Any) -> Any: ...
    def __ge__(self, other: Any) -> Any: ...
    def __getitem__(self, key: Any) -> Any: ...
    def __gt__(self, other: Any) -> Any: ...
    def __iadd__(self, other: Any) -> Any: ...
    def __imul__(self, other: Any) -> Any: ...
    def __isub__(self, other: Any) -> Any: ...
    def __iter__(self) -> Any: ...
    def __itruediv__(self, other: Any) -> Any: ...
    def __le__(self, other: Any) -> Any: ...
    def __lshift__(self, other: Any) -> Any: ...
    def __lt__(self, other: Any) -> Any: ...
    def __mul__(self, other: Any) -> Any: ...
    def __neg__(self) -> Any: ...
    def __or__(self, other: Any) -> Any: ...
    def __pow__(self, other: Any) -> Any: ...
    def __radd__(self, other: Any) -> Any: ...
    def __rand__(self, other: Any) -> Any: ...
    def __rlshift__(self, other: Any) -> Any: ...
    def __rmul__(self, other: Any) -> Any: ...
    def __ror__(self, other: Any) -> Any: ...
    def __rpow__(self, other: Any) -> Any: ...
    def __rrshift__(self, other: Any) -> Any: ...
    def __rshift__(self, other: Any) -> Any: ...
    def __rsub__(self, other: Any) -> Any: ...
    def __rtruediv__(self, other: Any) -> Any: ...
    def __rxor__(self, other: Any) -> Any: ...
    def __setitem__(self, key: Any, value: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any: ...
    def __truediv__(self, other: Any) -> Any: ...
    def __xor__(self, other: Any) -> Any: ...
    def as_tile(self) -> Any: ...
    def assert_shape(self, shape: Any) -> Any:
        """Check the shape and return the tensor."""
    def astype(self, dtype: Any) -> Any: ...
    def bitcast(self, dt: Any) -> Any:
        """The same bits as another type of the same size."""
    def block(self, *args: Any, **kwargs: Any) -> Any: ...
    def blocks(self) -> Any:
        """Numbers of the tiles of an on-chip storage that the region reaches into."""
    def blocks_last(self, *args: Any, **kwargs: Any) -> Any: ...
    def box_of(self, part: Any) -> Any:
        """The box that ``slice_box`` made ``part`` with; of a view without overlapping axes."""
    def brief(self) -> Any:
        """For lists of operands: tensor, offset, sizes and type."""
    def broadcast_to(self, *sizes: Any, shape: Any = None) -> Any: ...
    buffer: Any
    by_data: Any
    def check_bounds(self) -> Any:
        """Refuse elements outside of the storage's axes, once masks have cut the region."""
    current_language: Any
    dt: Any
    dtype: Any
    def expand_dims(self, axis: Any) -> Any:
        """View with a size-1 axis at ``axis``."""
    def flattened(self) -> Any:
        """The tile with one free axis, or None where its strides or conditions do not allow it."""
    free_size: Any
    def grounded(self) -> Any:
        """The same bytes in elements of a size that divides all types of this memory.

        With one element size this is the view itself, otherwise a view with a further axis: the
        parts of an element."""
    def is_full(self) -> Any:
        """True when the view is the whole storage in its own order."""
    itemsize: Any
    def key(self) -> Any:
        """Identity of the region: two views with equal keys are the same elements."""
    def label(self) -> Any:
        """For messages: name, shape, dtype and memory."""
    ndim: Any
    def nothing(self) -> Any:
        """The view under a condition that does not hold: instructions on it are not recorded.

        The class keeps that, so that views of this view select nothing either."""
    def numpy(self) -> Any:
        """Current values (eager mode only)."""
    offset: Any
    on_chip: Any
    oob: Any
    paxis: Any
    def reshape(self, *sizes: Any, shape: Any = None) -> Any:
        """View with other sizes, one of them possibly -1; the partition axis stays unchanged."""
    scalar_offsets_anywhere: Any
    selects_nothing: Any
    shape: Any
    size: Any
    def slice_box(self, box: Any) -> Any:
        """Sub-view by one slice of step 1 per axis, as masks cut operands."""
    start_partition: Any
    storage: Any
    strides: Any
    def view(self, dtype: Any) -> Any:
        """The same bits as another type of the same size."""
    def whole(self, *args: Any, **kwargs: Any) -> Any: ...
    def widened(self, shape: Any) -> Any:
        """Zero-stride view of ``shape``; missing trailing axes count as axes of size 1."""

def baremetal(kernel: Any = None, **options: Any) -> Any:
    """Run a kernel without a framework: numpy in, numpy out. Nothing is compiled, so file names of
    compiler artifacts have no effect."""
def benchmark(kernel: Any = None, warmup: Any = 10, iters: Any = 100, save_neff_name: Any = None, save_trace_name: Any = None, additional_compile_opt: Any = '', dma_profile: Any = 'sdk2.25') -> Any:
    """Decorator: calls estimate the latency and leave it in ``kernel.benchmark_result``.

    There is no executable, so ``save_neff_name`` writes nothing; ``save_trace_name`` writes a
    Chrome trace under that name. ``dma_profile`` is not in the SDK."""
def jit(func: Any = None, mode: Any = 'auto', **options: Any) -> Any:
    """Make a kernel of ``func``: ``@nki.jit``, ``@nki.jit()`` or ``nki.jit(f, mode=)``.

    A kernel returns torch tensors for torch tensors, and numpy arrays for numpy arrays. Every mode
    runs on the simulator; ``mode="benchmark"`` is ``nki.benchmark``. ``kernel_return=False`` means
    the old convention, where outputs are parameters that the kernel writes in place. So does a
    function without ``return`` in the modes without a framework graph. ValueError for an unknown
    mode or platform."""
def profile(func: Any = None, working_directory: Any = None, save_neff_name: Any = 'file.neff', save_trace_name: Any = 'profile.ntff', additional_compile_opt: Any = '', overwrite: Any = False, profile_nth: Any = 1, num_execs: Any = 1, dma_profile: Any = 'sdk2.25') -> Any:
    """Decorator: calls write an estimated profile into ``working_directory`` (absolute path).

    The trace is Chrome JSON, so ``.json`` is added to ``save_trace_name``; without ``overwrite``
    an existing one is refused. ``dma_profile`` is not in the SDK."""
def simulate_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``kernel`` (decorated or plain) on numpy arrays and return numpy arrays. Output
    parameters of kernels of the old convention are filled in place."""
def trace(func: Any = None, **options: Any) -> Any:
    """Make a kernel that only other kernels call: ``@nki.trace``, or with options."""
