"""`torch_neuronx.trace` and what takes its result: files, replicas, weights, places on cores.

Signatures: AWS Neuron documentation, the pages of the inference API of torch-neuronx. A device gets
a graph. Here the module stays Python; one run on the example inputs traces and verifies its
kernels. Python that reads values therefore passes, until the module is saved: a file holds the
graph that runs on shapes alone, its weights and the form of its inputs.
"""

import contextlib
import io
import itertools
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree

from neuron_cpu import announce, files
from neuron_cpu.core.device.target import DEFAULT_BEFORE, chosen, named_cores
from neuron_cpu.errors import CompileError, StandInError
from neuron_cpu.runtime import refused

FP8_FLAG = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
Inputs = torch.Tensor | tuple[torch.Tensor, ...]
Form = list[tuple[tuple[int, ...], torch.dtype]]
_MAGIC = b"neuron_cpu trace 2\n"
_OF_PICKLE = (
    *(RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, ImportError),
    pickle.UnpicklingError,
)
_NUMBERS = itertools.count(1)
_CORES = 2  # of a trn1.2xlarge, where no variable names them


def trace(
    func: Callable[..., Any],
    example_inputs: Inputs,
    *_: Any,
    input_output_aliases: dict | None = None,
    compiler_workdir: str | None = None,
    compiler_args: str | Sequence[str] | None = None,
    partitioner_config: Any | None = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> nn.Module:
    """The module that runs `func` on inputs of the same shapes and types.

    Raises:
        NotImplementedError: inputs are to be aliases of outputs, or parts to run on the CPU.
        TypeError: inputs are a list, or one is no tensor.
        RuntimeError: neuronx-cc refuses an operator, a type or an argument, with its code.
    """
    del compiler_workdir  # the compiler's
    if input_output_aliases or partitioner_config is not None:
        raise NotImplementedError(
            "torch_neuronx.trace of the stand-in keeps no state between calls and runs all of a "
            "module, expected neither input_output_aliases nor partitioner_config; leave them out."
        )
    if isinstance(example_inputs, list):
        raise TypeError(
            "example_inputs of torch_neuronx.trace is a list, expected a tensor or a tuple of "
            "tensors; write tuple(inputs)."
        )
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    for at, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"Input {at} of torch_neuronx.trace is {type(tensor).__name__}, expected a tensor; "
                "pass other values by a wrapper around the module."
            )
    traced = _Traced(func, inputs, not inline_weights_to_neff)
    if cpu_backend:
        traced._run(inputs)
        return traced
    with refused.Refusing(_reads_no_fp8(inputs, compiler_args)):
        traced._run(inputs)
    return traced


class NeuronModule(nn.Module):
    """A traced module: it runs on inputs of one form, or of several batches (`dynamic_batch`)."""

    def __init__(self, form: Form, separate: bool, name: str) -> None:
        super().__init__()
        self._form, self._separate, self._batches = form, separate, False
        self._name = f"trace {next(_NUMBERS)}: {name}"
        self._events: list[Any] | None = None  # of its graph, where a report asks for them

    def forward(self, *inputs: torch.Tensor) -> Any:
        form = _form(inputs)
        if form == self._form:
            return self._call(inputs)
        if self._batches and [_row(one) for one in form] == [_row(one) for one in self._form]:
            return _in_parts(self._call, inputs, self._form[0][0][0])
        raise ValueError(
            f"The traced module takes inputs of {_words(self._form)}, got {_words(form)}; pad "
            "them, or trace it anew."
        )

    def _call(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run the module, and tell the report of `neuron_cpu run --report` where one is written."""
        state = sys.modules.get(f"{announce.ROOM}.state")
        if state is not None and state.STATE.graphs is not None:
            if self._events is None:
                self._events = self._listed()
            state.STATE.graphs(self._name, self._events)
        return self._run(inputs)

    def _compiled(self, func: Callable[..., Any]) -> tuple[Any, "_Flat"]:
        """The graph of a function of the module's inputs; CompileError where values are read."""
        runtime, flat = _runtime(), _Flat(func)
        examples = [torch.zeros(shape, dtype=dtype) for shape, dtype in self._form]
        with runtime.ranks.rank_context(runtime.ranks.Group(0, 1)):
            return runtime.graph.compile_graph(flat, examples, {}, "traced", 0), flat

    def _listed(self) -> list[Any]:
        """What the graph runs; nothing, and a warning, where the module reads values."""
        try:
            return self._compiled(self._unwatched)[0].record.events
        except CompileError as error:
            warnings.warn(f"The report lacks {self._name}: {error}", stacklevel=2)
            return []

    def _unwatched(self, *inputs: torch.Tensor) -> Any:
        return self._run(inputs)

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        raise NotImplementedError

    def _content(self) -> dict[str, Any]:
        raise NotImplementedError

    def save(self, file: Any, _extra_files: dict | None = None) -> None:
        """Write the graph into a file; `torch.jit.save` calls this.

        Raises:
            CompileError: the module's Python reads values of its inputs.
        """
        content = self.save_to_buffer(_extra_files)
        with open(file, "wb") as opened:
            opened.write(content)

    def save_to_buffer(self, _extra_files: dict | None = None) -> bytes:
        """The content of such a file."""
        buffer = io.BytesIO()
        torch.save(self._content() | {"extra": dict(_extra_files or {})}, buffer)
        return files.sealed(_MAGIC, buffer.getvalue())


def _reads_no_fp8(inputs: Sequence[torch.Tensor], given: str | Sequence[str] | None) -> bool:
    """Whether float8_e4m3fn is refused; refuses inputs and compiler arguments of a chip at once."""
    core = chosen(DEFAULT_BEFORE)
    words = given.split() if isinstance(given, str) else [*(given or ())]
    fp8 = core.number < 4 and FP8_FLAG not in words
    if core.number == 2 and any(w in " ".join(words) for w in ("--lnc 2", "--lnc=2")):
        raise refused.Refused(refused.said("NCC_EARG001", f"compiler_args={given!r}"))
    for tensor in inputs:
        told = refused.of_input(tensor, fp8)
        if told is not None:
            raise refused.Refused(told)
    return fp8


class _Traced(NeuronModule):
    """Runs a module of Python."""

    def __init__(self, func: Callable[..., Any], inputs: Sequence[torch.Tensor], separate: bool):
        super().__init__(_form(inputs), separate, getattr(func, "__name__", type(func).__name__))
        self._func = func

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():
            return self._func(*inputs)

    def _content(self) -> dict[str, Any]:
        compiled, flat = self._compiled(self._func)
        tape, known = compiled.tape, dict(flat.named_parameters())
        return {
            "graph": tape.to_bytes(),
            "weights": {name: known[name].detach() for name in tape.weights},
            "tree": _pytree.treespec_dumps(flat.tree),
            "form": self._form,
            "separate": self._separate,
            "batches": self._batches,
        }


class _Flat(nn.Module):
    """A function whose results are a list of tensors; `tree` says what they were."""

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__()
        self.func = func
        self.tree: Any = None
        owner = getattr(func, "__self__", None)
        if isinstance(owner, nn.Module):
            self.of_method = owner  # its parameters are weights of the graph

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        found, self.tree = _pytree.tree_flatten(self.func(*inputs))
        return found


class _Loaded(NeuronModule):
    """Runs the graph of a file."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        super().__init__(content["form"], content["separate"], name)
        self._batches, self._file = content["batches"], content
        self._tree = _pytree.treespec_loads(content["tree"])
        self._tape = _runtime().tape.Tape.from_bytes(content["graph"])

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        own, ranks = [tensor.clone() for tensor in inputs], _runtime().ranks
        with torch.no_grad(), ranks.rank_context(ranks.Group(0, 1)):
            found = self._tape.run(own, self._file["weights"], {})
        return _pytree.tree_unflatten(found, self._tree)

    def _content(self) -> dict[str, Any]:
        return self._file | {"batches": self._batches}


@contextlib.contextmanager
def told_of(file: Any, kinds: tuple[type[Exception], ...] = _OF_PICKLE) -> Iterator[None]:
    """Errors of these kinds mean that a file is cut short or comes from elsewhere."""
    try:
        yield
    except StandInError:
        raise
    except kinds as error:
        reason = " ".join(str(error).split())[:120]
        raise StandInError(
            f"{file} cannot be read ({reason}), expected a whole file of torch.jit.save, written "
            "here or with TorchScript alone; save it again."
        ) from error


def _traced_file(content: bytes, name: str, extra: dict | None) -> NeuronModule:
    found = torch.load(io.BytesIO(content), weights_only=False)
    if extra is not None:
        extra.update({key: found["extra"].get(key, "") for key in extra})
    return _Loaded(found, name)


# What begins a file of ours -> what reads its content, with its name and `_extra_files`.
READERS: dict[bytes, Callable[[bytes, str, dict | None], Any]] = {_MAGIC: _traced_file}


def _load(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.jit.load`, of our files too. StandInError for one that is cut short."""
    with contextlib.ExitStack() as stack:
        named = isinstance(file, (str, bytes, os.PathLike))
        opened = stack.enter_context(open(file, "rb")) if named else file
        start, magic = opened.tell(), opened.read(len(_MAGIC))
        reader = READERS.get(magic)
        if reader is not None:
            with told_of(file):
                content = files.unsealed(magic, magic + opened.read())
                name = os.path.basename(str(getattr(file, "name", file)))
                return reader(content, name, kwargs.get("_extra_files"))
        opened.seek(start)
    with told_of(file, (RuntimeError,)):
        return original(file, *args, **kwargs)


def install() -> None:
    """Let `torch.jit.load` know our files, once a process."""
    original = torch.jit.load
    if getattr(original, "knows_traces", False):
        return

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        return _load(original, file, *args, **kwargs)

    load.knows_traces = True  # type: ignore[attr-defined]
    torch.jit.load = load  # type: ignore[assignment]


# --- What takes a traced module -------------------------------------------------------------------
class DataParallel(nn.Module):
    """Replicas of a traced module, each with a part of the batch; the results are one replica's.

    `num_workers` and `split_size` are attributes as in the SDK: no thread is needed for them here.
    """

    def __init__(
        self,
        model: NeuronModule,
        device_ids: Sequence[int | str] | None = None,
        dim: int = 0,
        set_dynamic_batching: bool = True,
    ) -> None:
        super().__init__()
        _traced(model, "DataParallel")
        cores = range(_cores()) if device_ids is None else device_ids
        self.device_ids = [int(str(core).removeprefix("nc:")) for core in cores]
        if not self.device_ids or not all(0 <= core < _cores() for core in self.device_ids):
            raise ValueError(
                f"DataParallel got device_ids {device_ids}, expected some of 0 to {_cores() - 1}, "
                "the cores of this process; change them, or set NEURON_RT_NUM_CORES."
            )
        self.module, self.dim = model, dim
        self.num_workers, self.split_size = 2 * len(self.device_ids), 0
        self._dynamic = set_dynamic_batching and dim == 0

    def disable_dynamic_batching(self) -> None:
        """Take inputs of one length along `dim` alone: the compiled one times the cores."""
        self._dynamic = False

    def forward(self, *inputs: torch.Tensor) -> Any:
        length, compiled = inputs[0].shape[self.dim], self.module._form[0][0][self.dim]
        if not self._dynamic and length != compiled * len(self.device_ids):
            raise ValueError(
                f"DataParallel without dynamic batching got {length} along dimension {self.dim}, "
                f"expected {compiled} for each of {len(self.device_ids)} cores; pad the input."
            )
        return _in_parts(self.module._call, inputs, compiled, self.dim)


def dynamic_batch(neuron_script: NeuronModule) -> NeuronModule:
    """The module for inputs of any batch: dimension 0 of all inputs and outputs is the batch."""
    _traced(neuron_script, "dynamic_batch")._batches = True
    return neuron_script


def replace_weights(neuron_model: NeuronModule, weights: nn.Module | Mapping) -> None:
    """Give a module that was traced with `inline_weights_to_neff=False` other weights."""
    state = weights.state_dict() if isinstance(weights, nn.Module) else dict(weights)
    if not _traced(neuron_model, "replace_weights")._separate:
        raise ValueError(
            "replace_weights got a module whose weights are part of its graph, expected one of "
            "torch_neuronx.trace(..., inline_weights_to_neff=False); trace it anew."
        )
    if isinstance(neuron_model, _Loaded):
        own = {name.removeprefix("func."): t for name, t in neuron_model._file["weights"].items()}
    else:
        own = dict(cast(nn.Module, neuron_model._func).named_parameters())
    wrong = [n for n, t in own.items() if n not in state or state[n].shape != t.shape]
    if wrong:
        raise ValueError(
            f"replace_weights got no {wrong[0]} of shape {list(own[wrong[0]].shape)}, expected one "
            "for each weight of the graph; take the state of the same module."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def lazy_load(trace: NeuronModule, enable_lazy_load: bool = True) -> None:
    """Load the module when it first runs: nothing is loaded onto a core here."""
    _traced(trace, "lazy_load")


def async_load(trace: NeuronModule, enable_async_load: bool = True) -> None:
    """Load the module beside what goes on: a load is over at once here."""
    _traced(trace, "async_load")


def move_trace_to_device(trace: NeuronModule, device_id: int = 0) -> None:
    """Put separate weights onto a core, whose number is checked."""
    set_neuron_cores(_traced(trace, "move_trace_to_device"), device_id)


def set_neuron_cores(trace: nn.Module, start_nc: int = -1, nc_count: int = -1) -> None:
    """Put a module onto cores, which are checked: every core computes the same here."""
    first, count = max(start_nc, 0), max(nc_count, 1)
    if start_nc < -1 or nc_count == 0 or nc_count < -1 or first + count > _cores():
        raise ValueError(
            f"Cores {first} to {first + count - 1} are asked for, expected some of {_cores()} from "
            "0 on; change start_nc and nc_count, or set NEURON_RT_NUM_CORES."
        )


def set_multicore(trace: nn.Module) -> None:
    """Put a module onto all cores."""


@contextlib.contextmanager
def neuron_cores_context(start_nc: int = -1, nc_count: int = -1) -> Iterator[None]:
    """Modules that are loaded inside of the block go to these cores, which are checked."""
    set_neuron_cores(nn.Module(), start_nc, nc_count)
    yield


@contextlib.contextmanager
def multicore_context() -> Iterator[None]:
    """Modules that are loaded inside of the block go to all cores."""
    yield


def _runtime() -> Any:
    """The runtime, which takes a second to import: most programs trace and write no file."""
    from neuron_cpu.runtime import graph, ranks, tape

    return SimpleNamespace(graph=graph, ranks=ranks, tape=tape)


def _cores() -> int:
    return named_cores() or _CORES


def _traced(model: Any, name: str) -> Any:
    if not isinstance(model, NeuronModule):
        raise TypeError(
            f"torch_neuronx.{name} got a {type(model).__name__}, expected what torch_neuronx.trace "
            "has made; trace the module first."
        )
    return model


def _in_parts(
    run: Callable[[Sequence[torch.Tensor]], Any],
    inputs: Sequence[torch.Tensor],
    size: int,
    dim: int = 0,
) -> Any:
    """The results of inputs in parts of `size` along `dim`, the last of which is filled up."""
    length, found = inputs[0].shape[dim], []
    tree: Any = None
    for start in itertools.takewhile(lambda at: at < length, itertools.count(0, size)):
        kept = min(size, length - start)
        parts = [tensor.narrow(dim, start, kept) for tensor in inputs]
        if kept < size:
            fill = [part.narrow(dim, 0, 1).repeat_interleave(size - kept, dim) for part in parts]
            parts = [torch.cat(pair, dim) for pair in zip(parts, fill, strict=True)]
        flat, tree = _pytree.tree_flatten(run(parts))
        found.append([t if kept == size else t.narrow(dim, 0, kept) for t in flat])
    return _pytree.tree_unflatten([torch.cat(parts, dim) for parts in zip(*found)], tree)


def _form(inputs: Sequence[torch.Tensor]) -> Form:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]


def _row(form: tuple[tuple[int, ...], torch.dtype]) -> tuple[tuple[int, ...], torch.dtype]:
    return form[0][1:], form[1]


def _words(form: Form) -> str:
    return ", ".join(f"{list(shape)} {str(dtype)[6:]}" for shape, dtype in form) or "nothing"
