"""Rounds where a graph of the vendor's compiler does: fp32 stays between fused operators.

PyTorch rounds the result of every bf16 operator. The compiler accumulates products in fp32 PSUM and
keeps later results in fp32 until it needs bf16 again: as operand of a product, for a collective, or
in memory that outlives the graph. Sources: XLA's flag `xla_allow_excess_precision`, which is on by
default and lets a compiler drop a rounding between two operators; the compiler's options
`--disable-mixed-precision-accumulation` and its opposite, which NxDI's Qwen3-MoE asks for
(v0.7.14366, `modeling_qwen3_moe.py`, `get_compiler_args`); and a 2026 contest entry on the graphs
that its compiler left (charleshong3/nki-moe-7013 751a7bf, `qwen_with_nki.py`, lines 2470 to 2776,
and section IV of its report: under the first option operators round that take a product).

A kernel is opaque to that compiler: what it is given and what it returns is in memory, and rounded.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Operators that a compiler fuses: with fp32 operands they compute and leave fp32.
_FUSED = """
add sub rsub mul div neg abs pow square sqrt rsqrt exp reciprocal log sigmoid silu gelu tanh relu
sin cos sum mean amax _softmax where masked_fill maximum minimum clamp cat stack _to_copy
"""
# Operators that change no value: the fp32 values take the same way.
_MOVES = """
view _unsafe_view transpose t permute expand slice select clone unsqueeze squeeze split
split_with_sizes unbind alias detach
"""
_PRODUCTS = "mm bmm addmm baddbmm"
# Attribute of a bf16 tensor: its values in fp32, and how often its memory had been written then.
_FP32 = "_fp32_values"
_BLOCK = 1 << 19  # widened elements of an operand at a time: 2 MiB of fp32, about one L2 cache
# What a compiler is assumed to leave in fp32, by name: everything; sums of products alone; all but
# these, which is what --disable-mixed-precision-accumulation stands for.
PRODUCTS, ELEMENTWISE = "products", "elementwise"
ASSUMED = {
    "fused": frozenset((PRODUCTS, ELEMENTWISE)),
    "products": frozenset((PRODUCTS,)),
    "elementwise": frozenset((ELEMENTWISE,)),
}


class FusedRounding(TorchDispatchMode):
    """PyTorch in bf16 with the roundings of a fused graph, in the thread of one rank.

    A bf16 tensor that a fused operator leaves holds its rounded values, and beside them, as an
    attribute, the fp32 values that the next fused operator takes. Other readers of the tensor (a
    product, a collective, a cache) get the rounded values.
    """

    def __init__(self, keeps: frozenset[str] = ASSUMED["fused"]) -> None:
        super().__init__()
        self._keeps = keeps
        self._writes: dict[int, int] = {}  # storage -> writes in place, which outdate fp32 values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        return _way(func)(self, func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # PyTorch's: no wrapper around every operator
        return False

    def _decomposed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with self:  # in inference mode composed operators arrive whole
            return func.decompose(*args, **kwargs)

    def _other(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map(self._note_write, value)
        return func(*args, **kwargs)

    def _note_write(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()._cdata
            self._writes[storage] = self._writes.get(storage, 0) + 1

    def _wide(self, value: Any) -> Any:
        """The fp32 values of bf16 tensors, also in a list; other values unchanged."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
            return [*map(self._wide, value)] if isinstance(value, list) else value
        kept = self._beside(value)
        return value.float() if kept is None else kept

    def _beside(self, value: Any) -> torch.Tensor | None:
        """The fp32 values beside a tensor; None where there are none of today."""
        kept = getattr(value, _FP32, None)
        if kept is None or kept[1] != self._writes.get(value.untyped_storage()._cdata, 0):
            return None
        return kept[0]

    def _rounded(self, wide: torch.Tensor, kind: str) -> torch.Tensor:
        result = wide.bfloat16()
        if kind in self._keeps:
            self._keep(result, wide)
        return result

    def _keep(self, result: torch.Tensor, wide: torch.Tensor) -> None:
        setattr(result, _FP32, (wide, self._writes.get(result.untyped_storage()._cdata, 0)))

    def _fused(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on fp32 values; its result is bf16 where PyTorch's would be."""
        tensors, asked = _tensors(args), kwargs.get("dtype")
        if asked != torch.bfloat16 and all(t.dtype != torch.bfloat16 for t in tensors):
            return func(*args, **kwargs)
        if asked == torch.bfloat16:
            kwargs = kwargs | {"dtype": torch.float32}
        wide = func(*map(self._wide, args), **kwargs)
        of_dims = {tensor.dtype for tensor in tensors if tensor.dim()} or {torch.bfloat16}
        leaves = asked or functools.reduce(torch.promote_types, of_dims)
        rounds = leaves == torch.bfloat16 and wide.dtype == torch.float32
        return self._rounded(wide, ELEMENTWISE) if rounds else wide

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        kept = self._beside(args[0])
        if kept is not None:
            wide = func(kept, *args[1:], **kwargs)
            alone = isinstance(result, torch.Tensor)
            for part, own in [(result, wide)] if alone else zip(result, wide):
                self._keep(part, own)
        return result

    def _product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A product of rounded operands, which PSUM leaves in fp32."""
        if args[-1].dtype != torch.bfloat16 or PRODUCTS not in self._keeps:
            return func(*args, **kwargs)
        left, right = args[-2:]
        wide = torch.bmm(left.float(), right.float()) if left.dim() == 3 else _mm(left, right)
        if len(args) == 3:  # a bias
            wide = wide + self._wide(args[0])
        return self._rounded(wide, PRODUCTS)


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(M, K) x (K, N) of bf16 values in fp32, some columns of the right operand at a time."""
    wide, out = left.float(), torch.empty(left.shape[0], right.shape[1])
    step = max(1, _BLOCK // max(1, right.shape[0]))
    for start in range(0, right.shape[1], step):
        columns = slice(start, start + step)
        torch.mm(wide, right[:, columns].float(), out=out[:, columns])
    return out


def _tensors(values: Any) -> list[torch.Tensor]:
    inner = [tensor for value in values if isinstance(value, list) for tensor in _tensors(value)]
    return [value for value in values if isinstance(value, torch.Tensor)] + inner


@functools.cache
def _way(func: Any) -> Callable[..., Any]:
    """The method that runs an operator of PyTorch, the same at every call."""
    name, mode = func.overloadpacket.__name__, FusedRounding
    if func._can_decompose():
        return mode._decomposed
    kinds = ((_PRODUCTS, mode._product), (_MOVES, mode._moved), (_FUSED, mode._fused))
    return next((way for names, way in kinds if name in names.split()), mode._other)


# What FusedRounding is made of; one process runs one model at a time, and its ranks are threads.
_active: frozenset[str] | None = None


@contextmanager
def fused(assumed: str = "fused") -> Iterator[None]:
    """Inside the block the graphs of this process round as compiled ones, on all ranks."""
    global _active
    before, _active = _active, ASSUMED[assumed]
    try:
        yield
    finally:
        _active = before


@contextmanager
def of_graph() -> Iterator[None]:
    """Around one run of a graph, in the thread of a rank."""
    if _active is None:
        yield
        return
    with FusedRounding(_active):
        yield


def settled(value: Any) -> Any:
    """A tensor without the fp32 values beside it: ranks exchange rounded tensors."""
    if isinstance(value, torch.Tensor):
        vars(value).pop(_FP32, None)
    return value
