"""Changes between releases of `nki`: new names and keywords, and spellings of 2.27 and 2.28.

Sources: signatures in aws-neuron-sdk v2.28.0 to v2.32.0 (nki/api/nki), release notes of each (2.33:
awsdocs-neuron.readthedocs-hosted.com/en/v2.33.1/release-notes/components/nki.html), and the update
guide (nki/migration/nki-0-3-0-update-guide.rst). Up to 2.28 the old spellings are the expected
ones. Later they are taken with a warning, as far as they still say what to do.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..device.errors import refuse, warn
from ..device.release import nki_since, of_nki
from ..language.labels import fitted

MATH = [
    "all", "arctan", "broadcast_to", "ceil", "copy", "cos", "dropout", "empty_like", "erf",
    "erf_dx", "exp", "expand_dims", "floor", "fmod", "full", "gather_flattened", "gelu",
    "gelu_apprx_tanh", "gelu_dx", "load", "load_transpose2d", "log", "matmul", "max", "mean", "min",
    "mish", "mod", "negative", "ones", "prod", "rand", "random_seed", "relu", "rms_norm", "sigmoid",
    "sign", "silu", "silu_dx", "sin", "softmax", "softplus", "sqrt", "square", "store", "sum",
    "tan", "tanh", "transpose", "trunc", "var", "where", "zeros_like",
]  # fmt: skip
CAME: dict[str, str] = dict.fromkeys(MATH, "2.29") | {
    "activate2": "2.30", "abs_max": "2.30", "abs_min": "2.30", "get_nc_sub_version": "2.31",
    "topk": "2.32", "fori_loop": "2.32", "while_loop": "2.32", "all_gather_v": "2.32",
} | dict.fromkeys(
    ["tiles", "blocks", "alloc_tiles", "alloc_blocks", "all_gather_v_prepare",
     "all_gather_v_trigger", "all_to_all_v_prepare", "all_to_all_v_trigger"], "2.33",
)  # fmt: skip
KEYWORDS: dict[str, dict[str, str]] = {
    "nc_matmul": {"accumulate": "2.29"},
    "nc_matmul_mx": {"accumulate": "2.29"},
    "dma_copy": {"engine": "2.29", "priority": "2.30"},
    "dma_transpose": {"priority": "2.30"},
    "dma_compute": {"oob_mode": "2.30"},
    "sendrecv": {"dma_engine": "2.29"},
    "tensor_scalar_reduce": {
        "reduce_cmd": "2.30", "reduce_init": "2.30", "reduce_res_negate": "2.32",
    },
    "scalar_tensor_tensor": dict.fromkeys(("reduce_cmd", "reduce_op", "reduce_res"), "2.33"),
    "ndarray": {"address": "2.29"},
} | dict.fromkeys(
    ["all_gather", "all_reduce", "all_to_all", "all_to_all_v", "collective_permute",
     "collective_permute_implicit", "collective_permute_implicit_reduce", "reduce_scatter"],
    {"priority": "2.30", "name": "2.31"},
)  # fmt: skip
# What a keyword of 2.27 and 2.28 is called now; None where it may be left out.
FORMER: dict[str, dict[str, str | None]] = {
    "tensor_copy": {"dtype": None},
    "dma_copy": {"unique_indices": None},
    "register_move": {"imm": "src"},
    "nc_matmul": {"is_moving_zero": "is_moving_onezero"},
    "shared_constant": {"dtype": None},
}
# Parameters in their order before 2.29.
ORDERS: dict[str, tuple[str, ...]] = {
    "affine_select": (
        "dst", "pattern", "offset", "channel_multiplier", "on_true_tile", "on_false_value",
        "cmp_op", "name",
    ),
    "dma_compute": ("dst", "srcs", "scales", "reduce_op", "name"),
}  # fmt: skip
# What else they changed, for the documentation.
OTHERS = (
    ("2.29", "accesses to memory regions by string (`buffer=\"sbuf\"`) are refused"),
    ("2.29", "`tensor_reduce(axis=1)` is axis 1; before, it was the last one of any rank"),
    ("2.31", "`quantize_mx` writes twice the scale of the OCP sample"),
    ("2.31", "stubs begin to name `permute`, `broadcast`, `expand_dim`, `slice` and `select` of "
             "tensors, `nl.average` and `nl.float8_e8m0fnu` (2.30: `nl.prelu`, `nl.bypass`; 2.32: "
             "`depends_on`); here older releases take them, too, so a device may refuse them"),
    ("2.33", "kernels are traced by Python: all of Python, no subset (`sim_parser_subset`)"),
    ("2.33", "`nl.dynamic_range` and `while` of a register are to become `nl.fori_loop` and "
             "`nl.while_loop`"),
)  # fmt: skip


def released(name: str, function: Callable) -> Callable:
    """``function`` with its release's warnings; the function itself where no release changed it."""
    came, keywords = CAME.get(name), KEYWORDS.get(name, {})
    former, order = FORMER.get(name, {}), ORDERS.get(name)
    if came is None and not (keywords or former or order):
        return function

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # as in a kernel's call
        if came is not None and not nki_since(came):
            raise _newer(f"{name}", came)
        for word in list(named):
            if word in former:
                _respell(name, word, former[word], named)
            elif word in keywords and not nki_since(keywords[word]):
                raise _newer(f"{name}({word}=)", keywords[word])
        if order is not None and len(args) > 2 and not nki_since("2.29"):
            return function(**dict(zip(order, args)), **named)
        return function(*args, **named)

    return checked


def _newer(what: str, release: str) -> Exception:
    return refuse(
        "sim_newer_release",
        f"{what} is there from SDK {release} on, expected what {of_nki()} has; choose the release "
        "with NEURON_CPU_NKI, in the environment or in the kernel's file",
    )


def _respell(name: str, word: str, now: str | None, named: dict[str, Any]) -> None:
    value = named.pop(word)
    if now is not None:
        named[now] = value
    if nki_since("2.29"):
        instead = f"{now}=" if now is not None else f"no {word}="
        warn(
            "sim_former_spelling",
            f"{name}({word}=) is a spelling of SDK 2.27 and 2.28, expected {instead} in "
            f"{of_nki()}; it says the same here",
        )


def all_released(names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a module, which refuse arguments that they or their release do not take."""
    functions = {n: f for n, f in names.items() if isinstance(f, FunctionType) and n[0] != "_"}
    return {n: released(n, fitted(f)) for n, f in functions.items()}
