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
`Boundaries` lets single tensors pass in fp32 instead, as if kernel and graph were one.
"""

import functools
import re
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuron_cpu.core import Kernel, Program, kernels_run_by
from neuron_cpu.core.language.specialisation import hand_back, to_torch
from neuron_cpu.core.run.boundaries import carriers
from neuron_cpu.core.run.execute import Plan

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
# Attribute of a bf16 tensor: its values in fp32, how often its memory had been written then, and
# the site that they come from.
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


class Site(NamedTuple):
    """Where a tensor may be rounded: of a kernel, or of a module whose operator made it."""

    where: str
    what: str
    of_kernel: bool


class Boundaries:
    """Sites that round in a run besides the graph's, and the values seen there.

    Attributes:
        closes: whether a site rounds.
        operators: whether operators of PyTorch are sites, too.
        met: sites in the order of the run, and whether rounding changes an element there.
        read: sites whose fp32 values somebody took.
    """

    def __init__(self, operators: bool) -> None:
        self.operators = operators
        self.closes: Callable[[Site], bool] = lambda site: False
        self.met: Dict[Site, bool] = {}
        self.read: Set[Site] = set()
        self._plans: Dict[Any, Tuple[Plan, Set[Any]]] = {}

    def passes(self, site: Site, wide: torch.Tensor) -> bool:
        """Whether `wide` stays unrounded at a site."""
        if not self.met.get(site):
            self.met[site] = not torch.equal(wide, wide.to(torch.bfloat16).float())
        return not self.closes(site)

    def plan(self, program: Program, given: FrozenSet[int]) -> Tuple[Plan, Set[Any]]:
        """This thread's plan of a kernel that rounds nothing at its boundary, and which storages
        carry fp32 values, where those inputs have some."""
        key = threading.get_ident(), program, given
        if key not in self._plans:
            carried = carriers(program, [program.inputs[k] for k in given])
            self._plans[key] = Plan(program, wide=carried), carried
        return self._plans[key]


class FusedRounding(TorchDispatchMode):
    """PyTorch in bf16 with the roundings of a fused graph, in the thread of one rank.

    A bf16 tensor that a fused operator leaves holds its rounded values, and beside them, as an
    attribute, the fp32 values that the next fused operator takes. Other readers of the tensor (a
    product, a collective, a cache) get the rounded values.
    """

    def __init__(
        self, keeps: FrozenSet[str] = ASSUMED["fused"], boundaries: Optional[Boundaries] = None
    ) -> None:
        super().__init__()
        self._keeps, self._boundaries = keeps, boundaries
        self._counts: Counter[Tuple[str, str]] = Counter()
        self._writes: Dict[int, int] = {}  # storage -> writes in place, which outdate fp32 values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[dict] = None
    ) -> Any:
        return _way(func)(self, func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # PyTorch's: no wrapper around every operator
        return False

    def _decomposed(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        with self:  # in inference mode composed operators arrive whole
            return func.decompose(*args, **kwargs)

    def _other(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
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
        return value.float() if kept is None else self._read(*kept)

    def _beside(self, value: Any) -> Optional[Tuple[torch.Tensor, Optional[Site]]]:
        """The fp32 values beside a tensor and their site; None where there are none of today."""
        kept = getattr(value, _FP32, None)
        if kept is None or kept[1] != self._writes.get(value.untyped_storage()._cdata, 0):
            return None
        return kept[0], kept[2]

    def _read(self, wide: torch.Tensor, site: Optional[Site]) -> torch.Tensor:
        if self._boundaries is not None and site is not None:
            self._boundaries.read.add(site)
        return wide

    def _rounded(self, wide: torch.Tensor, name: str, kind: str) -> torch.Tensor:
        result, site = wide.bfloat16(), None
        if kind not in self._keeps:
            return result
        if self._boundaries is not None and self._boundaries.operators:
            place = getattr(_place, "where", "")
            self._counts[place, name] += 1
            count = self._counts[place, name]
            what = name.strip("_") + (f" {count}" if count > 1 else "")
            site = Site(re.sub(r"\.\d+", ".*", place), what, False)
            if not self._boundaries.passes(site, wide):
                return result
        self._keep(result, wide, site)
        return result

    def _keep(self, result: torch.Tensor, wide: torch.Tensor, site: Optional[Site]) -> None:
        setattr(result, _FP32, (wide, self._writes.get(result.untyped_storage()._cdata, 0), site))

    def _fused(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
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
        name = func.overloadpacket.__name__
        return self._rounded(wide, name, ELEMENTWISE) if rounds else wide

    def _moved(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        kept = self._beside(args[0])
        if kept is not None:
            wide, site = func(kept[0], *args[1:], **kwargs), kept[1]
            if isinstance(result, torch.Tensor):
                self._keep(result, wide, site)
            else:
                for part, own in zip(result, wide):
                    self._keep(part, own, site)
        return result

    def _product(self, func: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        """A product of rounded operands, which PSUM leaves in fp32."""
        if args[-1].dtype != torch.bfloat16 or PRODUCTS not in self._keeps:
            return func(*args, **kwargs)
        left, right = args[-2:]
        wide = torch.bmm(left.float(), right.float()) if left.dim() == 3 else _mm(left, right)
        if len(args) == 3:  # a bias
            wide = wide + self._wide(args[0])
        return self._rounded(wide, func.overloadpacket.__name__, PRODUCTS)

    def run_kernel(self, kernel: Kernel, program: Program, tensors: List[Any]) -> List[Any]:
        """The results of a kernel that takes and gives fp32 values where boundaries let them."""
        assert self._boundaries is not None
        bounds = self._boundaries
        kept = {k: w for k, t in enumerate(tensors) if (w := self._beside(t)) is not None}
        plan, carried = bounds.plan(program, frozenset(kept))
        hosted = [to_torch(tensor) for tensor in tensors]
        for k, (wide, site) in kept.items():
            storage = program.inputs[k]
            if storage not in carried:
                continue
            if bounds.passes(Site(kernel.name, storage.name, True), self._read(wide, site)):
                hosted[k] = wide.contiguous()
        made = plan.run(hosted)
        narrow = [r.to(s.dtype.torch) for r, s in zip(made, program.outputs)]
        results = hand_back(program, tensors, hosted, narrow)
        for storage, tensor in zip(program.inputs, tensors):
            if storage.mutable:
                self._note_write(tensor)
        for k, (storage, result, wide) in enumerate(zip(program.outputs, results, made)):
            site = Site(kernel.name, f"result {k}", True)
            if storage in carried and bounds.passes(site, wide):
                self._keep(result, wide.reshape(result.shape), site)
        return results


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(M, K) x (K, N) of bf16 values in fp32, some columns of the right operand at a time."""
    wide, out = left.float(), torch.empty(left.shape[0], right.shape[1])
    step = max(1, _BLOCK // max(1, right.shape[0]))
    for start in range(0, right.shape[1], step):
        columns = slice(start, start + step)
        torch.mm(wide, right[:, columns].float(), out=out[:, columns])
    return out


def _tensors(values: Any) -> List[torch.Tensor]:
    inner = [tensor for value in values if isinstance(value, list) for tensor in _tensors(value)]
    return [value for value in values if isinstance(value, torch.Tensor)] + inner


@functools.cache
def _way(func: Any) -> Callable[..., Any]:
    """The method that runs an operator of PyTorch, the same at every call."""
    name, mode = func.overloadpacket.__name__, FusedRounding
    if func._can_decompose():
        return mode._decomposed
    kinds = ((_PRODUCTS, mode._product), (_MOVES, mode._moved), (_FUSED, mode._fused))
    return next((way for names, way in kinds if name in names), mode._other)


# What FusedRounding is made of; one process runs one model at a time, and its ranks are threads.
_active: Optional[Tuple[FrozenSet[str], Optional[Boundaries]]] = None
_place = threading.local()  # whose operators run in this thread


@contextmanager
def fused(assumed: str = "fused", boundaries: Optional[Boundaries] = None) -> Iterator[None]:
    """Inside the block the graphs of this process round as compiled ones, on all ranks."""
    global _active
    before, _active = _active, (ASSUMED[assumed], boundaries)
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
    with FusedRounding(*_active) as mode, ExitStack() as stack:
        if _active[1] is not None:
            stack.enter_context(kernels_run_by(mode.run_kernel))
        yield


def within(where: str) -> None:
    """The operators of this thread that follow are a module's."""
    _place.where = where


def settled(value: Any) -> Any:
    """A tensor without the fp32 values beside it: ranks exchange rounded tensors."""
    if isinstance(value, torch.Tensor):
        vars(value).pop(_FP32, None)
    return value
