"""Tensors of the device `neuron`: each wraps a tensor in the host's memory.

Every operator on one of them comes to `run`, which unwraps, calls PyTorch's own operator on the
host and wraps what comes back. That adds about 10 us to an operator (docs/torch_device.md).

NeuronCores have no 64-bit types. So int64 and float64 are computed in 32 bits, and a result keeps
the type that the program sees (AWS Neuron documentation, TorchNeuron's dtype handling).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .state import LOGGER, STATE, Held

aten = torch.ops.aten
HOST = torch.device("cpu")
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
FALLBACK = "NEURON_FALLBACK_ENABLED"  # 0: an operator that the device leaves to the CPU is refused
_NARROW = {torch.float64: torch.float32, torch.int64: torch.int32}
_WIDE = frozenset((torch.int64, torch.float64, torch.float32))
_FORMATS = (None, torch.contiguous_format, torch.preserve_format)

# Linear algebra of LAPACK, which TorchNeuron leaves to the CPU. Random numbers come from the host's
# generator, too, as they do there (huggingface/diffusers, pull request 13289).
_ON_HOST = (
    "linalg_qr _linalg_svd _linalg_eigh linalg_eig linalg_cholesky_ex cholesky cholesky_inverse "
    "linalg_inv_ex linalg_lu_factor_ex linalg_lu linalg_ldl_factor_ex _linalg_slogdet _linalg_det "
    "linalg_lstsq triangular_solve linalg_solve_triangular"
)
# What moves or makes values and computes none: 64-bit values pass through unchanged.
_CARRIES = (
    "_to_copy copy_ _copy_from clone fill_ zero_ full_like empty_like zeros_like ones_like "
    "new_empty new_full new_zeros new_ones new_empty_strided cat stack _local_scalar_dense "
    "resize_ lift_fresh lift_fresh_copy is_same_size equal"
)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index")
_MOVES = "copy_ _copy_from _to_copy _foreach_copy_ set_"  # between devices


class NeuronTensor(torch.Tensor):
    """A tensor of the device.

    Attributes:
        host: the same values in the host's memory; tensors of one storage share it.
        held: counts the bytes for as long as a tensor of the storage lives.
    """

    host: torch.Tensor
    held: Held

    @staticmethod
    def __new__(cls, value: Any, requires_grad: bool = False) -> NeuronTensor:
        made: Any = torch.as_tensor(value).detach().to(STATE.device())
        return made.requires_grad_(requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return run(func, *args, **(kwargs or {}))

    @property
    def data(self) -> NeuronTensor:  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, NeuronTensor) and isinstance(self, NeuronTensor):
            self.host, self.held = value.host, value.held

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shown = torch._tensor_str._tensor_str(self.host.detach(), len("tensor("))
        whole = super().__repr__(  # type: ignore[call-arg]
            tensor_contents=tensor_contents or shown
        )
        return whole.replace("NeuronTensor(", "tensor(", 1)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        return self.host.detach().tolist()

    def numpy(self, *_: Any, **_options: Any) -> Any:
        raise TypeError(
            f"can't convert a tensor of {self.device} to numpy, expected one on cpu; call .cpu() "
            "first."
        )

    def __array__(self, *_: Any, **_options: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        if self.held.storage is None:
            self.held.storage = storage_over(self.host.untyped_storage(), self.device)
        return self.held.storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol != torch.serialization.DEFAULT_PROTOCOL:  # pickle's own call, between processes
            is_parameter = getattr(self, "_is_param", False)
            return _unpickled, (self.host.detach(), self.device, self.requires_grad, is_parameter)
        # as of a plain tensor: the storage carries the device, which `map_location` may change
        place = self.storage_offset(), tuple(self.size()), self.stride()
        storage = torch.storage.TypedStorage(
            wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True
        )
        plain: tuple[Any, ...] = (storage, *place, self.requires_grad, {})
        made = torch._utils._rebuild_tensor_v2, plain
        if not getattr(self, "_is_param", False):
            return made
        return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, {})

    def __coerce_same_metadata_as_tangent__(self, _: Any, kind: Any = None) -> NeuronTensor:
        """Itself: where AOTAutograd expects a plain tensor, it is one of the device."""
        return self

    def __deepcopy__(self, memo: dict) -> NeuronTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy meets a tensor that an operator made, expected one that the program "
                "created; detach it."
            )
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied
        return copied


class _Storage(torch.UntypedStorage):
    """The storage of tensors of the device; `host` is the memory that it stands for."""

    host: torch.UntypedStorage

    def cpu(self) -> torch.UntypedStorage:
        return self.host.clone()

    def nbytes(self) -> int:
        return self.host.nbytes()

    size = nbytes

    def resize_(self, size: int) -> _Storage:  # type: ignore[override]
        self.host.resize_(int(size))
        return self


def storage_over(host: torch.UntypedStorage, device: torch.device) -> Any:
    make: Any = torch._C._construct_storage_from_data_pointer
    made = make(host.data_ptr(), device, host.nbytes())
    made.__class__, made.host = _Storage, host
    return made


def wrapped(host: torch.Tensor, device: torch.device, held: Held | None = None) -> NeuronTensor:
    """A tensor of the device over `host`, whose memory it shares."""
    make: Any = torch.Tensor._make_wrapper_subclass
    made = make(
        NeuronTensor,
        host.size(),
        host.stride(),
        host.storage_offset(),
        dtype=host.dtype,
        device=device,
    )
    made.host = host
    made.held = Held(host.untyped_storage().nbytes()) if held is None else held
    return made


# --- operators ------------------------------------------------------------------------------------
class _Operator(NamedTuple):
    """What the schema of an operator says."""

    name: str  # aten::add
    on_host: bool  # the device leaves it to the CPU
    narrows: bool  # it computes, so 64-bit values become 32-bit ones
    moves: bool  # it takes tensors of two devices
    views: bool  # its results share their first argument's memory
    written: tuple[tuple[int, str], ...]  # arguments, by place and name
    returned: tuple[tuple[int, str] | None, ...]  # the argument that each result is


_KNOWN: dict[Any, _Operator] = {}
_OWN: dict[Any, Callable] = {}  # operators that run on tensors of the device as they are


def own(func: Any, run: Callable) -> None:
    """`run` takes the calls of operator `func`, with tensors of the device."""
    _OWN[func] = run


def _known(func: Any) -> _Operator:
    schema = func._schema
    name = func._overloadpacket.__name__
    by_set = {}
    written = []
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written.append((place, argument.name))
            by_set[tuple(alias.before_set)] = (place, argument.name)
    aliases = [one.alias_info for one in schema.returns]
    returned = tuple(None if one is None else by_set.get(tuple(one.before_set)) for one in aliases)
    views = any(one is not None and not one.is_write for one in aliases)
    is_aten = func.namespace == "aten"
    takes = any(str(one.type).find("Tensor") >= 0 for one in schema.arguments)
    _KNOWN[func] = known = _Operator(
        f"{func.namespace}::{name}",
        is_aten and name in _ON_HOST.split(),
        is_aten and takes and not views and name not in _CARRIES.split(),
        name in _MOVES.split() or not is_aten,
        views,
        tuple(written),
        returned if any(returned) else (),
    )
    return known


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One operator with tensors of the device, or one that makes them."""
    if func in _OWN:
        return _OWN[func](*args, **kwargs)
    if STATE.forked:
        STATE.refuse_fork()
    known = _KNOWN.get(func) or _known(func)
    call = _Call(func, known)
    host_args = [call.hosted(one) for one in args]
    host_kwargs = {name: call.hosted(one) for name, one in kwargs.items()} if kwargs else kwargs
    if known.written and known.narrows:  # in place: what is written stays wide until it is written
        for place, name in known.written:
            if place < len(args):
                host_args[place] = _host(args[place])
            elif name in kwargs:
                host_kwargs[name] = _host(kwargs[name])
    if known.on_host:
        _fall_back(known.name)
    else:
        STATE.executed.add(known.name)
    target = kwargs.get("device") if kwargs else None
    if target is not None:
        target = torch.device(target)
        host_kwargs["device"] = target if target.type == "meta" else HOST
        call.device = STATE.device(target.index) if target.type == "neuron" else None
    if kwargs:
        _check_layout(host_kwargs)
    try:
        out = func(*host_args, **host_kwargs)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{known.name} has no kernel on neuron here, expected an operator that PyTorch's CPU "
            "has; compute it with others."
        ) from error
    for place, name in known.written:
        _written(args[place] if place < len(args) else kwargs.get(name), known)
    if known.returned:
        out = _given(known.returned, args, kwargs, call, out)
    elif type(out) is torch.Tensor:
        if target is None or call.device is not None:
            if out.dtype in _WIDE and known.narrows and out.dim():
                out = call.widened(out, kwargs.get("dtype"))
            out = wrapped(out, call.device or STATE.device(), call.held if known.views else None)
    elif not isinstance(out, (int, float, bool)):
        out = call.made(out)
    if STATE.observer is not None:
        STATE.observer(func, args, kwargs, out)
    return out


class _Call:
    """One call on its way to the host and back."""

    __slots__ = ("device", "func", "held", "known", "narrowed")

    def __init__(self, func: Any, known: _Operator) -> None:
        self.func, self.known = func, known
        self.device: torch.device | None = None
        self.held: Held | None = None
        self.narrowed = False  # whether float64 arguments went to the host as float32

    def hosted(self, value: Any) -> Any:
        """An argument as the host takes it."""
        kind = type(value)
        if kind is NeuronTensor:
            host = value.host
            if self.device is None:
                self.device, self.held = value.device, value.held
            elif self.device != value.device and not self.known.moves and host.dim():
                self._mixed(value)
            if host.dtype in _NARROW and self.known.narrows and host.dim():
                return self._narrow(host)
            return host
        if kind is list or kind is tuple:
            return kind([self.hosted(one) for one in value])
        if isinstance(value, torch.Tensor):
            # A device takes places in another tensor from the CPU: canallee/
            # native-torch-autoporting-trainium 1cbf869 ran `x[torch.arange(n), y]` on one.
            places = self.known.name in _INDEXING and not value.is_floating_point()
            if value.dim() and not self.known.moves and not places:
                self._mixed(value)
            return value
        if kind is torch.device:
            return HOST if value.type == "neuron" else value
        return value

    def _mixed(self, value: torch.Tensor) -> None:
        raise RuntimeError(
            f"{self.known.name} is called with a tensor of shape {list(value.shape)} on "
            f"{value.device}, expected all of its tensors on {self.device or STATE.device()} (one "
            f"number may be on cpu); move it with .to('neuron')."
        )

    def _narrow(self, host: torch.Tensor) -> torch.Tensor:
        self.narrowed = self.narrowed or host.dtype is torch.float64
        narrow = host.to(_NARROW[host.dtype])
        # Operators that take positions want int64: their values pass through 32 bits all the same.
        return narrow if narrow.dtype is torch.float32 else narrow.to(torch.int64)

    def widened(self, out: torch.Tensor, asked: Any) -> torch.Tensor:
        """A result in the program's type, with values of 32 bits."""
        if out.dtype is torch.int64:
            return out.to(torch.int32).to(torch.int64)
        if out.dtype is torch.float64 or self.narrowed and asked is None:
            return out.to(torch.float32).to(torch.float64)
        return out

    def made(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            if type(out) is NeuronTensor or out.device.type != "cpu":
                return out
            held = self.held if self.known.views else None
            return wrapped(out, self.device or STATE.device(), held)
        if isinstance(out, (list, tuple)):
            return type(out)([self.made(one) for one in out])
        return out


def _host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_host(one) for one in value])
    return value.host if type(value) is NeuronTensor else value


def _check_layout(kwargs: dict) -> None:
    """Refuse formats that the device has not; pinned memory is the host's."""
    kwargs.pop("pin_memory", None)
    if kwargs.get("memory_format") not in _FORMATS:
        raise RuntimeError(
            f"A tensor of the device is asked for in {kwargs['memory_format']}, expected "
            "contiguous_format or preserve_format, the only memory formats of neuron; leave "
            "memory_format out."
        )


def _fall_back(name: str) -> None:
    if os.environ.get(FALLBACK, "1").lower() in ("0", "false"):
        raise RuntimeError(
            f"{name} has no kernel on neuron, and {FALLBACK}=0 forbids the CPU in its place, "
            f"expected an operator of the device; set {FALLBACK}=1, or compute it before the move."
        )
    if name not in STATE.fallbacks:
        STATE.fallbacks.add(name)
        LOGGER.warning("%s is executed via CPU fallback: neuron has no kernel for it.", name)


def _written(value: Any, known: _Operator) -> None:
    """A tensor whose host was written: its values in 32 bits, its sizes the host's."""
    if isinstance(value, (list, tuple)):
        for one in value:
            _written(one, known)
    if type(value) is not NeuronTensor:
        return
    host = value.host
    if host.dtype in _NARROW and known.narrows and host.dim():
        host.copy_(host.to(_NARROW[host.dtype]))
    if host.size() != value.size() or host.stride() != value.stride():
        follow(value)


def follow(value: NeuronTensor) -> None:
    """Give a tensor the sizes that its host has."""
    host = value.host
    storage = torch._C.TensorBase.untyped_storage(value)
    was = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with torch._C._ExcludeDispatchKeyGuard(_PYTHON):
            aten.set_.source_Storage_storage_offset(
                value, storage, host.storage_offset(), host.size(), host.stride()
            )
    finally:
        torch._C._set_meta_in_tls_dispatch_include(was)
    value.held.resize(host.untyped_storage().nbytes())


def _given(returned: tuple, args: tuple, kwargs: dict, call: _Call, out: Any) -> Any:
    """The results of an operator that returns arguments of its own."""

    def one(at: Any, value: Any) -> Any:
        if at is None:
            return call.made(value)
        place, name = at
        return args[place] if place < len(args) else kwargs[name]

    if len(returned) == 1:
        return one(returned[0], out)
    return tuple(map(one, returned, out))


def _set(value: NeuronTensor, source: Any, *place: Any) -> NeuronTensor:
    """`set_`: the memory of a storage or of a tensor of the device."""
    if isinstance(source, torch.Tensor):
        source, place = source.untyped_storage(), place or _place(source)
    if not isinstance(source, _Storage):
        raise RuntimeError(
            f"set_ gives a tensor of neuron a storage on {source.device}, expected one on neuron; "
            "move it with .to('neuron')."
        )
    if not place:
        place = 0, (source.nbytes() // value.host.element_size(),), (1,)
    value.host = torch.empty(0, dtype=value.dtype).set_(source.host, *place)  # type: ignore
    value.held = Held(source.nbytes())
    value.held.storage = source
    follow(value)
    return value


def _place(value: torch.Tensor) -> tuple:
    return value.storage_offset(), value.size(), value.stride()


for _overload in aten.set_.overloads():
    own(getattr(aten.set_, _overload), _set)


# --- files ----------------------------------------------------------------------------------------
def _tag(storage: Any) -> str | None:
    return str(storage.device) if storage.device.type == "neuron" else None


def _at(storage: Any, location: str) -> Any:
    """A storage that `torch.load` read, on the device of its tag or of `map_location`."""
    if not location.startswith("neuron"):
        return None
    return storage_over(storage, STATE.device(torch.device(location).index))


def _unpickled(host: torch.Tensor, device: torch.device, grad: bool, is_parameter: bool) -> Any:
    made = wrapped(host, device)
    return torch.nn.Parameter(made, grad) if is_parameter else made.requires_grad_(grad)


torch.serialization.register_package(15, _tag, _at)  # in front of PyTorch's own of other devices
