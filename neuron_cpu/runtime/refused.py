"""Operators that neuronx-cc refuses, by type and size, as the vendor's error pages tell.

`core/device/refusals.json` has the codes with their sources and what to write instead. Operators
are seen as PyTorch dispatches them. What they do to values is not asked: a traced graph is refused
for what its operators are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.device import refusals
from .tape import tensors_of

Tensors = Sequence[torch.Tensor]
Rule = Callable[[Tensors, Any, Any], bool]  # operands, args, keywords

WIDE = (torch.int32, torch.int64)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
LARGEST = 4 * 2**30  # bytes of an output


def _integers(tensors: Tensors, kinds: Sequence[torch.dtype] = WIDE) -> bool:
    return any(one.dtype in kinds for one in tensors)


def _no_floats(tensors: Tensors) -> bool:
    return any(not one.dtype.is_floating_point and not one.dtype.is_complex for one in tensors)


def _by_mask(_: Tensors, args: Any, __: Any) -> bool:
    """Whether a boolean tensor chooses elements."""
    indices = args[1] if len(args) > 1 else ()
    kinds = [one.dtype for one in indices if isinstance(one, torch.Tensor)]
    return torch.bool in kinds or torch.uint8 in kinds


def _dilated_both(_: Tensors, args: Any, __: Any) -> bool:
    """Whether a transposed convolution, whose stride dilates the input, dilates its kernel, too."""
    stride, dilation, transposed = args[3], args[5], args[6]
    return transposed and max(stride) > 1 and max(dilation) > 1


def _dilated(_: Tensors, args: Any, named: Any) -> bool:
    return max(args[4] if len(args) > 4 else named.get("dilation", [1])) > 1


# operators, code, whether it is refused
_ROWS: tuple[tuple[str, str, Rule], ...] = (
    ("sort argsort msort", "NCC_EVRF029", lambda *_: True),
    ("topk", "NCC_EVRF013", lambda given, *_: _no_floats(given[:1])),
    ("nonzero masked_select _unique2", "NCC_EMOD025", lambda *_: True),
    ("unique_dim unique_consecutive", "NCC_EMOD025", lambda *_: True),
    ("index", "NCC_EMOD025", _by_mask),
    ("mm bmm addmm baddbmm mv dot", "NCC_EVRF035", lambda given, *_: _integers(given)),
    (
        "scatter_add scatter_add_ index_add index_add_",
        "NCC_EVRF060",
        lambda given, *_: _integers(given[:1]),
    ),
    (
        "scatter_reduce scatter_reduce_ index_reduce index_reduce_",
        "NCC_EVRF016",
        lambda given, *_: _no_floats(given[:1]),
    ),
    ("pow", "NCC_EVRF062", lambda given, *_: _integers(given, (torch.int64,))),
    (
        "__rshift__ __irshift__ bitwise_right_shift",
        "NCC_EVRF022",
        lambda given, *_: given[0].dtype not in (torch.int32, torch.uint32),
    ),
    ("triangular_solve linalg_solve_triangular", "NCC_EVRF001", lambda *_: True),
    ("linalg_qr", "NCC_EUOC002", lambda *_: True),
    ("convolution", "NCC_EVRF010", _dilated_both),
    ("max_pool2d_with_indices", "NCC_EVRF018", _dilated),
)
RULES = {name: (code, rule) for names, code, rule in _ROWS for name in names.split()}


def refusal(
    name: str, args: Any, named: Any, given: Tensors, made: Tensors, fp8: bool
) -> str | None:
    """Why neuronx-cc would end on an operator, with its code and what to write instead; or None.

    Args:
        given, made: tensors among the arguments and results.
        fp8: whether float8_e4m3fn is refused (trn1 and trn2 without the flag that reads it as
            float8_e4m3).
    """
    code = _of_types((*given, *made), fp8)
    rule = RULES.get(name)
    if code is None and rule is not None and rule[1](given, args, named):
        code = rule[0]
    if code is None and any(one.numel() * one.element_size() > LARGEST for one in made):
        code = "NCC_EVRF024"
    return None if code is None else said(code, f"aten.{name} of {_words(given or made)}")


def of_input(tensor: torch.Tensor, fp8: bool) -> str | None:
    """The same for an input of a graph."""
    if fp8 and tensor.dtype is torch.float8_e4m3fn:
        return said("NCC_EVRF051", f"an input of {_words([tensor])}")
    code = _of_types([tensor], fp8)
    return None if code is None else said(code, f"an input of {_words([tensor])}")


def _of_types(tensors: Tensors, fp8: bool) -> str | None:
    for one in tensors:
        if one.dtype.is_complex:
            return "NCC_EVRF004"
        if one.dtype in FNUZ:
            return "NCC_EVRF005"
        if one.dtype is torch.float64 and one.ndim:  # Python's numbers become 0-d tensors
            return "NCC_ESPP004"
        if fp8 and one.dtype is torch.float8_e4m3fn:
            return "NCC_ESPP047"
    return None


def said(code: str, what: str) -> str:
    """One sentence: the code, what it is about, the rule, and what to write."""
    entry = next(one for one in refusals.refusals() if one.code == code)
    more = "; aws-neuron-sdk 1381: x[mask] = x[mask].flip(-1) was wrong on a trn2" * (
        code == "NCC_EMOD025"
    )
    return f"[{code}] {what}: {entry.rule} ({entry.source}{more}); write {entry.legal}"


def _words(tensors: Tensors) -> str:
    return ", ".join(f"{str(one.dtype)[6:]} {list(one.shape)}" for one in tensors)


class Refused(RuntimeError):
    """neuronx-cc would refuse the graph."""


class Refusing(TorchDispatchMode):
    """Refuses, inside the block, operators on what depends on `inputs` or `weights` alike.

    Raises:
        Refused: with the compiler's code, and what to write instead.
    """

    def __init__(self, fp8: bool) -> None:
        super().__init__()
        self.fp8 = fp8

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        named = kwargs or {}
        name = func.overloadpacket.__name__
        given = tensors_of((args, named))
        if name in RULES:  # before it runs: it may be one that PyTorch ends on, too
            told = refusal(name, args, named, given, (), self.fp8)
            if told is not None:
                raise Refused(told)
        result = func(*args, **named)
        told = refusal(
            "" if name in RULES else name, args, named, given, tensors_of(result), self.fp8
        )
        if told is not None:
            raise Refused(told)
        return result
