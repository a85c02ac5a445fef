"""What functions of numpy and PyTorch of several steps are, as a drafted kernel computes them."""

from .ranking import WRITTEN

_POOLS = (
    "lambda input, kernel_size, **_: input.reshape(*input.shape[:-2],"
    " input.shape[-2] // kernel_size, kernel_size, input.shape[-1] // kernel_size, kernel_size)"
    ".%s((-3, -1))"
)
_LOSS = (
    "lambda input, target, reduction='mean', beta=1.0, delta=1.0, label_smoothing=0.0, **_:"
    " (lambda loss: loss if reduction == 'none' else loss.sum() / len(input)"
    " if reduction == 'batchmean' else getattr(loss, reduction)())(%s)"
)
_NORM = (
    "lambda x, axes, shape, weight, bias, eps: (centred := x - x.mean(axes, True))"
    " / torch.sqrt((centred * centred).mean(axes, True) + eps)"
    " * (1.0 if weight is None else weight.reshape(shape))"
    " + (0.0 if bias is None else bias.reshape(shape))"
)
_PICKED = "torch.gather(input, 1, target.unsqueeze(1)).squeeze(1)"
_SPREAD = "like(index[None, :] == torch.arange(len(input))[:, None], source) @ source"
_PLACED = (  # in the columns of an index, one after the other
    "reduce(lambda kept, i: torch.where(torch.arange(input.shape[-1]) == index[..., i : i + 1],"
    " source[..., i : i + 1] if hasattr(source, 'shape') else value if source is None else source,"
    " kept), range(index.shape[-1]), input)"
)
_WINDOWS = (  # along the last axis, each a step further
    "lambda input, size, stride=None, padding=0, *_, **__: (lambda input, size, step: reduce("
    "torch.%s, [input[..., i : input.shape[-1] - size + 1 + i : step] for i in range(size)])%s)("
    "torch.nn.functional.pad(input, (one(padding),) * 2, value=%s) if one(padding) else input,"
    " one(size), one(stride or size))"
)
_CORNER = (
    "lambda input, k=0, diagonal=0: torch.where(torch.%s(torch.ones(tuple(input.shape[-2:])),"
    " k + diagonal) > 0, input, 0.0)"
)
# The libraries' functions written out, in the forms that kernels are for; `torch` may be numpy.
MEANS = {
    **WRITTEN,
    "addmm": "lambda input, a, b, **_: input + a @ b",
    "avg_pool2d": _POOLS % "mean",
    "max_pool2d": _POOLS % "amax",
    "conv1d": "lambda input, weight, bias=None, padding=0, groups=1, **_: (lambda input, size:"
    " sum(weight[:, :, i] @ part if groups == 1 and weight.shape[1] > 1"
    " else part * weight[:, 0, i : i + 1] for i in range(size)"
    " for part in [input[..., i : input.shape[-1] - size + 1 + i]]))(torch.nn.functional.pad("
    "input, (one(padding),) * 2) if one(padding) else input, weight.shape[-1])"
    " + (0.0 if bias is None else bias.unsqueeze(1))",
    "baddbmm": "lambda input, a, b, **_: input + a @ b",
    "bincount": "lambda input, minlength=0, **_:"
    " (input[:, None] == torch.arange(minlength)[None, :]).sum(0)",
    "diag": "lambda input: (input * torch.eye(len(input))).sum(-1)",
    "add_at": f"lambda input, index, source: input.__setitem__(..., input + {_SPREAD})",
    "addcmul": "lambda input, a, b, value=1.0, **_: input + value * a * b",
    "argmin": "lambda input, *args, **named: torch.argmax(-input, *args, **named)",
    "avg_pool1d": _WINDOWS % ("add", " / size", "0.0"),
    "adaptive_avg_pool2d": "lambda input, size: input.mean((-2, -1), keepdim=True)",
    "batch_norm": "lambda input, mean, var, weight=None, bias=None, training=False, momentum=0.1,"
    " eps=1e-5: (lambda shape: (input - mean.reshape(shape)) / torch.sqrt(var.reshape(shape) + eps)"
    " * (1.0 if weight is None else weight.reshape(shape))"
    " + (0.0 if bias is None else bias.reshape(shape)))((-1, *[1] * (input.ndim - 2)))",
    "binary_cross_entropy_with_logits": _LOSS
    % "torch.nn.functional.softplus(input) - input * target",
    "binary_cross_entropy": _LOSS % "-target * torch.clamp(torch.log(input), min=-100.0)"
    " - (1.0 - target) * torch.clamp(torch.log(1.0 - input), min=-100.0)",
    "cbrt": "lambda input: torch.sign(input) * torch.exp(torch.log(torch.abs(input)) / 3.0)",
    "celu": "lambda input, alpha=1.0, **_: torch.relu(input)"
    " + alpha * (torch.exp(torch.clamp(input, max=0.0) / alpha) - 1.0)",
    "conv2d": "lambda input, weight, bias=None, stride=1, padding=0, **_: (lambda x, step, high,"
    " wide: (sum(weight[:, :, i, j] @ x[:, i : x.shape[1] - high + 1 + i : step,"
    " j : x.shape[2] - wide + 1 + j : step].reshape(x.shape[0], -1)"
    " for i in range(high) for j in range(wide)) + (0.0 if bias is None else bias.unsqueeze(1)))"
    ".reshape(1, len(weight), (x.shape[1] - high) // step + 1, -1))((torch.nn.functional.pad("
    "input, (one(padding),) * 4) if one(padding) else input)[0], one(stride), *weight.shape[2:])",
    "cosine_similarity": "lambda a, b, dim=1, eps=1e-8: (a * b).sum(dim) / ((a * a).sum(dim).sqrt()"
    " * (b * b).sum(dim).sqrt()).clamp(min=eps)",
    "cross_entropy": _LOSS % f"torch.logsumexp(input, 1) - (1.0 - label_smoothing) * {_PICKED}"
    " - (label_smoothing * input.mean(1) if label_smoothing else 0.0)",
    "diagonal": "lambda input: (input * torch.eye(len(input))).sum(-1)",
    "diff": "lambda input, n=1, axis=-1, dim=-1: input[..., 1:] - input[..., :-1]",
    "elu": "lambda input, alpha=1.0, **_:"
    " torch.relu(input) + alpha * (torch.exp(torch.clamp(input, max=0.0)) - 1.0)",
    "embedding": "lambda input, weight, *_, **__: weight[input]",
    "exp2": "lambda input: torch.exp(input * 0.6931471805599453)",
    "expm1": "lambda input: torch.exp(input) - 1.0",
    "fmax": "lambda input, other: torch.maximum(input, other)",
    "fmin": "lambda input, other: torch.minimum(input, other)",
    "frac": "lambda input: input - torch.trunc(input)",
    "group_norm": f"lambda input, groups, weight=None, bias=None, eps=1e-5: ({_NORM})("
    "input.reshape(len(input), groups, input.shape[1] // groups, -1), (2, 3),"
    " (1, groups, input.shape[1] // groups, 1), weight, bias, eps).reshape(input.shape)",
    "hardshrink": "lambda input, lambd=0.5: torch.where(torch.abs(input) > lambd, input, 0.0)",
    "hardsigmoid": "lambda input, **_: torch.clamp(input / 6.0 + 0.5, 0.0, 1.0)",
    "hardtanh": "lambda input, min_val=-1.0, max_val=1.0, **_:"
    " torch.clamp(input, min_val, max_val)",
    "huber_loss": _LOSS % "torch.where((d := torch.abs(input - target)) <= delta, 0.5 * d * d,"
    " delta * (d - 0.5 * delta))",
    "index_add": f"lambda input, dim, index, source, **_: input + {_SPREAD}",
    "index_select": "lambda input, dim, index: input[index]",
    "instance_norm": f"lambda input, mean=None, var=None, weight=None, bias=None,"
    f" use_input_stats=True, momentum=0.1, eps=1e-5: ({_NORM})(input,"
    " tuple(range(2, input.ndim)), (-1, *[1] * (input.ndim - 2)), weight, bias, eps)",
    "isnan": "lambda input: input != input",
    "kl_div": _LOSS % "target * (torch.log(torch.clamp(target, min=1e-19)) - input)",
    "l1_loss": _LOSS % "torch.abs(input - target)",
    "lerp": "lambda input, end, weight: input + weight * (end - input)",
    "log1p": "lambda input: torch.log(input + 1.0)",
    "log2": "lambda input: torch.log(input) * 1.4426950408889634",
    "log10": "lambda input: torch.log(input) * 0.4342944819032518",
    "logaddexp": "lambda a, b: torch.maximum(a, b) + torch.log(1.0 + torch.exp(-torch.abs(a - b)))",
    "log_sigmoid": "lambda input: -torch.nn.functional.softplus(-input)",
    "glu": "lambda input, dim=-1, **_: (lambda a, b: a * torch.sigmoid(b))(*input.chunk(2, dim))",
    "hardswish": "lambda input, **_: input * torch.clamp(input + 3.0, 0.0, 6.0) / 6.0",
    "leaky_relu": "lambda input, negative_slope=0.01, **_:"
    " torch.maximum(input, input * negative_slope)",
    "linear": "lambda input, weight, bias=None, **_:"
    " input @ weight.mT + (0.0 if bias is None else bias)",
    "max_pool1d": _WINDOWS % ("maximum", "", "-float('inf')"),
    "masked_fill": "lambda input, mask, value: torch.where(mask, value, input)",
    "mean": "lambda input, *args, **named: (total := input.sum(*args, **named))"
    " * (prod(total.shape) / prod(input.shape))",
    "mse_loss": _LOSS % "(input - target) ** 2",
    "nan_to_num": "lambda input, nan=0.0, **_:"
    " torch.clamp(torch.where(input == input, input, nan), -3.4e38, 3.4e38)",
    "nll_loss": _LOSS % f"-{_PICKED}",
    "normalize": "lambda input, p=2.0, dim=1, eps=1e-12, **_:"
    " input / torch.sqrt((input * input).sum(dim, True)).clamp(min=eps)",
    "one_hot": "lambda input, num_classes: input.unsqueeze(-1) == torch.arange(num_classes)",
    "outer": "lambda a, b: a[:, None] * b[None]",
    "pairwise_distance": "lambda a, b, p=2.0, eps=1e-6, **_: ((a - b + eps) ** 2).sum(-1).sqrt()",
    "pixel_shuffle": "lambda input, r: input.reshape(-1, r, r, *input.shape[-2:])"
    ".permute(0, 3, 1, 4, 2).reshape(*input.shape[:-3], -1, input.shape[-2] * r,"
    " input.shape[-1] * r)",
    "prelu": "lambda input, weight: torch.where(input > 0.0, input, weight * input)",
    "put_along_axis": f"lambda input, index, source, axis: input.__setitem__(..., {_PLACED})",
    "scatter": f"lambda input, dim, index, source=None, value=None: {_PLACED}",
    "ptp": "lambda input, axis=None, **named: input.max(axis, **named) - input.min(axis, **named)",
    "relu6": "lambda input, **_: torch.clamp(input, 0.0, 6.0)",
    "scaled_dot_product_attention": "lambda query, key, value, attn_mask=None, dropout_p=0.0,"
    " is_causal=False, scale=None, **_: torch.softmax(torch.where(torch.ones(query.shape[-2],"
    " key.shape[-2]).tril() > 0, query @ key.mT * (scale or query.shape[-1] ** -0.5), -1e30)"
    " if is_causal else query @ key.mT * (scale or query.shape[-1] ** -0.5)"
    " + (0.0 if attn_mask is None else attn_mask), -1) @ value",
    "remainder": "lambda a, b: a - a // b * b",
    "roll": "lambda input, shifts=0, dims=-1, shift=0, axis=None: (lambda n, at:"
    " torch.concatenate([input[(*at, slice(-n, None))], input[(*at, slice(None, -n))]], len(at)))("
    "one(shifts or shift), [slice(None)] * ((one(dims) if axis is None else axis) % input.ndim))",
    "selu": "lambda input, **_: 1.0507009873554805 * (torch.relu(input)"
    " + 1.6732632423543772 * (torch.exp(torch.clamp(input, max=0.0)) - 1.0))",
    "smooth_l1_loss": _LOSS % "torch.where((d := torch.abs(input - target)) < beta,"
    " 0.5 * d * d / beta, d - 0.5 * beta)",
    "softmin": "lambda input, dim=-1, **_: torch.softmax(-input, dim)",
    "softshrink": "lambda input, lambd=0.5: input - torch.clamp(input, -lambd, lambd)",
    "softsign": "lambda input: input / (1.0 + torch.abs(input))",
    "std": "lambda *args, **named: torch.var(*args, **named) ** 0.5",
    "tril": _CORNER % "tril",
    "triu": _CORNER % "triu",
    "take": "lambda input, index, axis=0: input[(slice(None),) * axis + (index,)]",
    "tanhshrink": "lambda input: input - torch.tanh(input)",
    "threshold": "lambda input, threshold, value, **_:"
    " torch.where(input > threshold, input, value)",
    "topk": "lambda input, k, dim=-1, largest=True, sorted=True:"
    " Best(*(one[..., :k] for one in torch.sort(input, dim=dim, descending=largest)))",
    "unbind": "lambda input, dim=0: [input[(slice(None),) * (dim % input.ndim) + (i,)]"
    " for i in range(input.shape[dim])]",
    "var": "lambda input, *args, correction=None, ddof=None, unbiased=None, keepdim=False,"
    " keepdims=False, **named: (away := input - input.mean(*args, keepdims=True, **named))"
    " is None or (total := (away * away).sum(*args, keepdims=keepdim or keepdims, **named))"
    " * (1.0 / (prod(input.shape) / prod(total.shape) - next((float(one) for one in"
    " (correction, ddof, unbiased) if one is not None), torch.__name__ == 'torch')))",
}
