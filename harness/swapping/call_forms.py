"""Public forms of a kernel's call, recognised by the names of the kernel's parameters. A form turns
tensors of a transformers model (queries of all heads, features of all tokens) into the kernel's
operands, and the result back. A kernel of another form needs an adapter: a plain function whose
first parameter is `module`, which gets the arguments of the model's own part.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from harness.errors import UserError
from harness.settings import ATTENTION, MLP, NORM

PARTITIONS = 128
HIDDEN_KEY = -9984.0  # what is added to the score of a key that counts nothing
FLASH_TILES = (2048, 1024, 512)  # keys that the public flash attention takes at a time
Attend = Callable[["Heads"], torch.Tensor]
Forward = Callable[..., Any]

FORMS = {
    ATTENTION: (
        "flash_fwd(q, k, v, seed, ...) of nki-samples and the SDK",
        "(q, k, v, scale, ...) on [B*H, D, S], values [B*H, S, D]",
        "attention_prefill_kernel of this llama.py",
        "an adapter(module, query, key, value, attention_mask, ...)",
    ),
    NORM: ("(x, gain) or (x, gain, eps) on [T, H]", "an adapter(module, hidden_states)"),
    MLP: (
        "(x, gate, up, down) on [T, H], weights [H, F] and [F, H]",
        "swiglu_mlp_kernel of this llama.py",
        "an adapter(module, hidden_states)",
    ),
}
_FLASH = ("q", "k", "v", "seed")
_PLAIN = ("q", "k", "v")
_OWN_ATTENTION = ("x_hbm", "delta_hbm", "norm", "qkv_w_hbm", "out_w_hbm", "cos_hbm", "sin_hbm")
_OWN_MLP = ("x_hbm", "delta_hbm", "norm", "gate_hbm", "up_hbm", "down_hbm")


class Heads(NamedTuple):
    """One call of attention.

    Attributes:
        query: [B, Hq, S, D], after the position embedding.
        key, value: [B, Hkv, S, D]; each serves Hq / Hkv heads of queries.
        scale: of the scores.
        causal: whether a query sees the keys up to its own place only.
        bias: [B, 1, S, S] in the type of the queries, added to the scores; None: nothing is.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    causal: bool
    bias: torch.Tensor | None


def parameters(kernel: Any) -> tuple[str, ...]:
    """Names of a kernel's parameters, whatever `nki.jit` made of the function."""
    try:
        return tuple(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):
        return tuple(inspect.signature(kernel.func).parameters)


def is_adapter(found: Any) -> bool:
    """Whether it is an adapter: a plain function whose first parameter is `module`."""
    return inspect.isfunction(found) and parameters(found)[:1] == ("module",)


def replaces_modules(kernel: Any, at: str) -> bool:
    """Whether it replaces whole modules, rather than the attention function."""
    return at != ATTENTION or _is_own(parameters(kernel), _OWN_ATTENTION)


def _is_own(names: Sequence[str], own: Sequence[str]) -> bool:
    return tuple(names[: len(own)]) == tuple(own)


def attention(kernel: Any, home: ModuleType) -> Attend:
    """The function that computes attention with a kernel of a known form; `home` is the kernel's
    file."""
    names = parameters(kernel)
    if names[:4] == _FLASH:
        return lambda heads: _flash(kernel, getattr(home, "FlashConfig", None), heads)
    return lambda heads: _plain(kernel, names[4:], heads)


def check(kernel: Any, at: str) -> None:
    """Refuse with a UserError a kernel of no form that is known at a place."""
    names = parameters(kernel)
    known = {
        ATTENTION: names[:4] == _FLASH
        or names[:4] in [(*_PLAIN, scale) for scale in ("scale", "softmax_scale")]
        or _is_own(names, _OWN_ATTENTION),
        NORM: len(names) in (2, 3),
        MLP: len(names) == 4 or _is_own(names, _OWN_MLP),
    }
    if known[at]:
        return
    raise UserError(
        f"The kernel's parameters ({', '.join(names)}) are of no form that is known at {at}, "
        f"expected {'; or '.join(FORMS[at])}; write an adapter around it."
    )


def _flash(kernel: Any, config_class: Any, heads: Heads) -> torch.Tensor:
    """`flash_fwd[batch, kv_heads]`: q and k [B, H, D, S], v [B, Hkv, S, D], for inference.

    It adds one bias to all rows of a batch, so rows go one by one where there is one.
    """
    batch, kv_heads, length, _ = heads.key.shape
    tile = next((size for size in FLASH_TILES if length % size == 0), None)
    if tile is None:
        raise UserError(
            f"The flash attention takes keys in tiles of {' or '.join(map(str, FLASH_TILES))}, got "
            f"{length} of them; choose a --seq-len that is a multiple of {FLASH_TILES[-1]}."
        )
    options: dict[str, Any] = {
        "softmax_scale": heads.scale,
        "use_causal_mask": heads.causal,
        "mixed_precision": heads.query.dtype != torch.float32,
    }
    if config_class is not None:
        options["config"] = config_class(seq_tile_size=tile, training=False)
    q, k = (x.transpose(2, 3).contiguous() for x in (heads.query, heads.key))
    v = heads.value.contiguous()
    if heads.bias is None:
        return _first(kernel[batch, kv_heads](q, k, v, None, **options))
    if "logit_bias" not in parameters(kernel):
        raise takes_no_mask()
    bias = heads.bias.clamp(min=HIDDEN_KEY).contiguous()
    rows = [
        _first(
            kernel[1, kv_heads](
                *(x[row : row + 1].contiguous() for x in (q, k, v)),
                None,
                logit_bias=bias[row : row + 1].contiguous(),
                **options,
            )
        )
        for row in range(batch)
    ]
    return torch.cat(rows)


def _plain(kernel: Any, options: Sequence[str], heads: Heads) -> torch.Tensor:
    """kernel(q, k, v, scale): all heads side by side, each with keys and values of its own.

    A kernel with parameters `causal` and `bias` gets them.
    """
    batch, q_heads, length, width = heads.query.shape
    q, k, v = (
        x.repeat_interleave(q_heads // x.shape[1], dim=1).flatten(0, 1)
        for x in (heads.query, heads.key, heads.value)
    )
    asked = [name for name in ("causal", "use_causal_mask") if name in options]
    told: dict[str, Any] = dict.fromkeys(asked, heads.causal)
    names = [name for name in ("bias", "logit_bias") if name in options]
    if heads.bias is not None:
        if not names:
            raise takes_no_mask()
        each = heads.bias.clamp(min=HIDDEN_KEY).expand(-1, q_heads, -1, -1)
        told[names[0]] = each.flatten(0, 1).contiguous()
    turned = [x.transpose(1, 2).contiguous() for x in (q, k)]
    out = _first(kernel(*turned, v.contiguous(), heads.scale, **told))
    return out.reshape(batch, q_heads, length, width)


def takes_no_mask() -> UserError:
    """The refusal of a kernel without a bias for keys that only a bias hides."""
    return UserError(
        "The kernel takes no bias, and a layer of this model hides keys that are not later ones: "
        "padding of an encoder, or a window; give prompts of --seq-len tokens, or another kernel."
    )


def _first(results: Any) -> torch.Tensor:
    return results[0] if isinstance(results, (tuple, list)) else results


def forward(kernel: Any, home: ModuleType, at: str, module: nn.Module) -> Forward:
    """The function that replaces a module's `forward`.

    Raises:
        UserError: the module's parts do not fit the kernel's form.
    """
    if is_adapter(kernel):
        return lambda hidden_states: kernel(module, hidden_states)
    names = parameters(kernel)
    if at == NORM:
        return _norm(kernel, len(names) == 3, module)
    if at == ATTENTION:
        return _own_attention(kernel, home, module)
    return _own_mlp(kernel, home, module) if _is_own(names, _OWN_MLP) else _mlp(kernel, module)


def _norm(kernel: Any, takes_eps: bool, module: nn.Module) -> Forward:
    """kernel(x [T, H], gain [H]) -> [T, H].

    The gain is the module's result for ones, since some families keep it as a difference from 1.
    """
    eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
    features = next(module.parameters()).shape[-1]
    dtype = next(module.parameters()).dtype
    gain = (module(torch.ones(1, features)) * math.sqrt(1 + eps))[0].to(dtype)

    return _of_rows(kernel, [gain], *([eps] if takes_eps else []))


def _of_rows(kernel: Any, weights: Sequence[torch.Tensor], *numbers: float) -> Forward:
    """kernel(x [T, H], weights, numbers) -> [T, H] of hidden states [B, S, H]."""

    def run(hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = _first(kernel(rows, *(_beside(weight, rows) for weight in weights), *numbers))
        return out.reshape(hidden_states.shape)

    return run


def _beside(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The weight where x is: shapes meet shapes while a graph is estimated."""
    return weight if weight.device == x.device else weight.to(x.device)


def _linear_weights(module: nn.Module, names: Sequence[str], owner: str) -> list[torch.Tensor]:
    """Weights [out, in] of linear layers without bias."""
    weights: list[torch.Tensor] = []
    for name in names:
        layer = getattr(module, name, None)
        if not isinstance(layer, nn.Linear) or layer.bias is not None:
            raise UserError(
                f"{type(module).__name__} has no linear layer {name} without bias, which {owner} "
                "takes; write an adapter(module, ...)."
            )
        weights.append(layer.weight.detach())
    return weights


def _swiglu_weights(module: nn.Module, owner: str) -> list[torch.Tensor]:
    """Gate and up [F, H] and down [H, F]; Phi-3 has gate and up in one layer."""
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    x = torch.linspace(-4, 4, 9)
    if activation is None or not torch.allclose(activation(x), nn.functional.silu(x)):
        raise UserError(
            f"{type(module).__name__} computes no SwiGLU, which the kernel does; write an "
            "adapter(module, hidden_states)."
        )
    if hasattr(module, "gate_up_proj"):
        both, down = _linear_weights(module, ("gate_up_proj", "down_proj"), owner)
        return [*both.chunk(2), down]
    return _linear_weights(module, ("gate_proj", "up_proj", "down_proj"), owner)


def _mlp(kernel: Any, module: nn.Module) -> Forward:
    """kernel(x [T, H], gate [H, F], up [H, F], down [F, H]) -> [T, H], SwiGLU."""
    return _of_rows(kernel, [w.t().contiguous() for w in _swiglu_weights(module, "this form")])


def _columns(home: ModuleType, hidden_states: torch.Tensor) -> torch.Tensor:
    """[B, S, H] -> [H in whole tiles, B * S], in blocks of tokens."""
    return home.in_blocks(
        hidden_states.reshape(-1, hidden_states.shape[-1]), hidden_states.shape[1]
    )


def _from_columns(home: ModuleType, columns: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[H in whole tiles, B * S] -> [B, S, H]."""
    return home.from_blocks(columns, like.shape[1])[:, : like.shape[-1]].reshape(like.shape)


def _own_mlp(kernel: Any, home: ModuleType, module: nn.Module) -> Forward:
    """`swiglu_mlp_kernel` of this repository's llama.py, without its norm and residual sum."""
    gate, up, down = _swiglu_weights(module, "swiglu_mlp_kernel")
    weights = [home.kernel_layout(home.in_runs(weight, 1)) for weight in (gate, up)]
    weights.append(home.kernel_layout(home.in_runs(down, 0)))

    def run(hidden_states: torch.Tensor) -> torch.Tensor:
        columns = _columns(home, hidden_states)
        operands = [_beside(weight, columns) for weight in weights]
        out = _first(kernel(columns, None, None, *operands, length=hidden_states.shape[1]))
        return _from_columns(home, out, hidden_states)

    return run


def _own_attention(kernel: Any, home: ModuleType, module: nn.Module) -> Forward:
    """`attention_prefill_kernel` of this repository's llama.py: projections, RoPE and attention.

    Causal, without norm and residual sum. Rows padded on the right need no mask: no token sees the
    tokens behind it.
    """
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    q, k, v, out = _linear_weights(module, names, "attention_prefill_kernel")
    if any(hasattr(module, name) for name in ("q_norm", "k_norm")):
        raise UserError(
            f"{type(module).__name__} has norms of queries or keys, which attention_prefill_kernel "
            "has not; take a kernel of the attention function."
        )
    width = int(getattr(module, "head_dim"))  # noqa: B009
    heads = home.HeadShape(len(q) // width, len(k) // width, width)
    if width not in (64, PARTITIONS):
        raise UserError(
            f"attention_prefill_kernel takes heads of 64 or 128, got {width}; take another kernel."
        )
    scale = float(getattr(module, "scaling", width**-0.5))
    if not math.isclose(scale, width**-0.5):
        raise UserError(
            f"attention_prefill_kernel scales its scores by {width**-0.5:g}, expected the model's "
            f"{scale:g}; take a kernel of the attention function."
        )
    rows = torch.cat((heads.order(q, heads.group), heads.order(k, 1), v))
    weights = [
        home.kernel_layout(home.in_runs(rows, 1)),
        home.kernel_layout(home.in_runs(heads.order(out.t(), heads.group).t(), 0)),
    ]

    def tables(embeddings: tuple[torch.Tensor, torch.Tensor], batch: int) -> list[torch.Tensor]:
        """cos and sin [B or 1, S, D] -> [128, B * S], the sine of second halves negative."""
        cos, sin = (x.expand(batch, -1, -1).flatten(0, 1).t() for x in embeddings)
        half = width // 2
        turned = torch.cat((sin[:half], -sin[half:]))
        return [x.repeat(PARTITIONS // width, 1).contiguous() for x in (cos, turned)]

    def run(
        hidden_states: torch.Tensor, position_embeddings: Any = None, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        columns, batch = _columns(home, hidden_states), hidden_states.shape[0]
        operands = [_beside(weight, columns) for weight in weights]
        rotary = tables(position_embeddings, batch)
        results = kernel(columns, None, None, *operands, *rotary, heads, batch)
        return _from_columns(home, _first(results), hidden_states), None

    return run
