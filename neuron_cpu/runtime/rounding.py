"""Where a graph of the vendor's compiler rounds: fp32 stays between operators that it fuses.

PyTorch rounds the result of every bf16 operator. The compiler accumulates products in fp32 PSUM and
keeps what follows them in fp32 until it needs bf16 again: as operand of a product, for a
collective, or in memory that outlives the graph. Sources: XLA's flag `xla_allow_excess_precision`,
which is on by default and lets a compiler drop a rounding between two operators; the compiler's
option `--disable-mixed-precision-accumulation`, whose name says what holds without it; and the
comments of a 2026 contest entry on the graphs that its compiler left (charleshong3/nki-moe-7013
751a7bf, `qwen_with_nki.py`, lines 2470 to 2776).
"""

import functools
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Operators that a compiler fuses: with fp32 operands they compute and leave fp32.
_FUSED = frozenset(
    ("add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "square", "sqrt", "rsqrt", "exp")
    + ("reciprocal", "log", "sigmoid", "silu", "gelu", "tanh", "relu", "sin", "cos", "sum", "mean")
    + ("amax", "_softmax", "where", "masked_fill", "maximum", "minimum", "clamp", "cat", "stack")
    + ("_to_copy",)
)
# Operators that change no value: the fp32 values take the same way.
_MOVES = frozenset(
    ("view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "select", "clone")
    + ("unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "alias", "detach")
)
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
# Attribute of a bf16 tensor: its values in fp32, and how often its memory had been written then.
_FP32 = "_fp32_values"
_BLOCK = 1 << 19  # widened elements of an operand at a time: 2 MiB of fp32, about one L2 cache


class FusedRounding(TorchDispatchMode):
    """PyTorch in bf16 with the roundings of a fused graph, in the thread of one rank.

    A bf16 tensor that a fused operator leaves holds its rounded values, and beside them, as an
    attribute, the fp32 values that the next fused operator takes. Whoever else reads the tensor
    (a product, a collective, a cache) meets the rounded ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._writes: Dict[int, int] = {}  # storage -> writes in place, which outdate fp32 values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[dict] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():  # in inference mode composed operators arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            return self._product(func, args, kwargs)
        if name in _MOVES:
            return self._moved(func, args, kwargs)
        if name in _FUSED:
            return self._fused(func, args, kwargs)
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map(self._note_write, value)
        return func(*args, **kwargs)

    def _note_write(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()._cdata
            self._writes[storage] = self._writes.get(storage, 0) + 1

    def _wide(self, value: Any) -> Any:
        """The fp32 values of a bf16 tensor; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
            return value
        kept = getattr(value, _FP32, None)
        if kept is not None and kept[1] == self._writes.get(value.untyped_storage()._cdata, 0):
            return kept[0]
        return value.float()

    def _rounded(self, wide: torch.Tensor) -> torch.Tensor:
        result = wide.to(torch.bfloat16)
        self._keep(result, wide)
        return result

    def _keep(self, result: torch.Tensor, wide: torch.Tensor) -> None:
        setattr(result, _FP32, (wide, self._writes.get(result.untyped_storage()._cdata, 0)))

    def _fused(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        """An operator on fp32 values; its result is bf16 where PyTorch's would be."""
        types = {tensor.dtype for tensor in _tensors(args)}
        asked = kwargs.get("dtype")
        if torch.bfloat16 not in types | {asked}:
            return func(*args, **kwargs)
        if asked == torch.bfloat16:
            kwargs = kwargs | {"dtype": torch.float32}
        wide = func(*tree_map(self._wide, args), **kwargs)
        of_dims = [tensor.dtype for tensor in _tensors(args) if tensor.dim()] or [torch.bfloat16]
        leaves = asked or functools.reduce(torch.promote_types, of_dims)
        rounds = leaves == torch.bfloat16 and wide.dtype == torch.float32
        return self._rounded(wide) if rounds else wide

    def _moved(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if hasattr(args[0], _FP32):
            wide = func(self._wide(args[0]), *args[1:], **kwargs)
            if isinstance(result, torch.Tensor):
                self._keep(result, wide)
            else:
                for part, own in zip(result, wide):
                    self._keep(part, own)
        return result

    def _product(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        """A product of rounded operands, which PSUM leaves in fp32."""
        if args[-1].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        left, right = args[-2:]
        wide = torch.bmm(left.float(), right.float()) if left.dim() == 3 else _mm(left, right)
        if len(args) == 3:  # a bias
            wide = wide + self._wide(args[0])
        return self._rounded(wide)


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(M, K) x (K, N) of bf16 values in fp32, some columns of the right operand at a time."""
    wide, out = left.float(), torch.empty(left.shape[0], right.shape[1])
    step = max(1, _BLOCK // max(1, right.shape[0]))
    for start in range(0, right.shape[1], step):
        columns = slice(start, start + step)
        torch.mm(wide, right[:, columns].float(), out=out[:, columns])
    return out


def _tensors(tree: Any) -> List[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for branch in tree for tensor in _tensors(branch)]
    return []


_active = False  # one process runs one model at a time; its ranks are threads


@contextmanager
def fused() -> Iterator[None]:
    """Inside the block the graphs of this process round as compiled ones, on all ranks."""
    global _active
    before, _active = _active, True
    try:
        yield
    finally:
        _active = before


@contextmanager
def of_graph() -> Iterator[None]:
    """Around one run of a graph, in the thread of a rank."""
    if not _active:
        yield
        return
    with FusedRounding():
        yield


def settled(value: Any) -> Any:
    """A tensor without the fp32 values beside it: what travels between ranks is rounded."""
    if isinstance(value, torch.Tensor):
        vars(value).pop(_FP32, None)
    return value
