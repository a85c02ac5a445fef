"""`torch.autocast("neuron")`: PyTorch's common lists of operators, in the dtype of the block.

Source of the lists: PyTorch's documentation of automatic mixed precision (ops that autocast to
lower precision, to float32, and to the widest type). A kernel under `nki_op` is left as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

LOWER = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d convolution prelu addmm "
    "addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention"
)
WIDER = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow "
    "softplus layer_norm native_layer_norm group_norm rms_norm norm nuclear_norm "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp "
    "upsample_bilinear2d upsample_bicubic2d prod softmax log_softmax cumprod cumsum sum"
)
WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot "
    "scatter_add cat stack"
)
_KEY = torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_KEPT: list[torch.library.Library] = []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        floating = value.device.type == "neuron" and value.dtype in _FLOATS
        return value.to(dtype) if floating else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(one, dtype) for one in value])
    return value


def _floats(value: Any) -> list[torch.dtype]:
    if isinstance(value, (list, tuple)):
        return [dtype for one in value for dtype in _floats(one)]
    return [value.dtype] if isinstance(value, torch.Tensor) and value.dtype in _FLOATS else []


def _run(func: Any, choose: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator inside of the block, its floats in the type that `choose` says."""
    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        dtype = choose(args)
        if kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        return func(
            *_cast(args, dtype), **{name: _cast(one, dtype) for name, one in kwargs.items()}
        )


def _widest(args: Any) -> torch.dtype:
    found = _floats(args)
    return torch.float32 if torch.float32 in found or not found else found[0]


def install() -> None:
    """Register the lists; other operators pass as they are."""
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    for names, choose in (
        (LOWER, lambda _: torch.get_autocast_dtype("neuron")),
        (WIDER, lambda _: torch.float32),
        (WIDEST, _widest),
    ):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                func = getattr(packet, overload)
                if "out" not in overload and not func._schema.is_mutable:
                    library.impl(func, functools.partial(_run, func, choose))
    _KEPT.extend((library, others))
