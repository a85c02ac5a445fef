"""Quantised checkpoints: made from a Hugging Face model, written, read and checked."""

import os
import shutil
from pathlib import Path
from typing import Any, Union

import torch
from neuronx_distributed.quantised import (
    QuantizationType,
    dtype_of,
    quantize_pytorch_model_per_channel_symmetric,
    quantize_pytorch_model_per_tensor_symmetric,
)
from safetensors.torch import save_file
from torch import nn

from neuron_cpu.errors import CheckpointError
from neuron_cpu.files import temporary_sibling, unwritable

from .checkpoint import SAFETENSORS_FILE, StateDict, load_pickle, load_state_dict, without_sharing

PathLike = Union[str, os.PathLike]
_OTHER_TOOLS_SUFFIX, _SUFFIX = ".weight_scale", ".scale"


def quantise(model: nn.Module, neuron_config: Any) -> nn.Module:
    """Quantise the model's Linear layers in place, as the configuration says."""
    dtype = dtype_of(neuron_config.quantization_dtype).value
    if _per_channel(neuron_config):
        return quantize_pytorch_model_per_channel_symmetric(
            model,
            inplace=True,
            dtype=dtype,
            modules_to_not_convert=getattr(neuron_config, "modules_to_not_convert", None),
            floor=neuron_config.contract.fp8_scale_floor,
        )
    return quantize_pytorch_model_per_tensor_symmetric(model, inplace=True, dtype=dtype)


def _per_channel(neuron_config: Any) -> bool:
    quantization_type = QuantizationType(neuron_config.quantization_type)
    return quantization_type is QuantizationType.PER_CHANNEL_SYMMETRIC


def save(state_dict: StateDict, path: Path) -> None:
    """Write a checkpoint whole: safetensors into an existing folder, else a pickle of that name."""
    target = path / SAFETENSORS_FILE if path.is_dir() else path
    holder = temporary_sibling(target)
    try:
        written = holder / target.name
        if path.is_dir():
            save_file(without_sharing(state_dict), written)
        else:
            torch.save(state_dict, written)
        os.replace(written, target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def read(path: PathLike) -> StateDict:
    """The tensors of a folder or a pickle; FileNotFoundError where neither is there."""
    if os.path.isdir(path):
        return load_state_dict(path)
    if os.path.isfile(path):
        return load_pickle(path)
    raise FileNotFoundError(
        f"The quantised checkpoint {path} does not exist, expected a folder or a file; make it "
        "with save_quantized_state_dict, or correct quantized_checkpoints_path."
    )


def with_own_names(state_dict: StateDict) -> StateDict:
    """Rename `X.weight_scale`, as other tools write it, to `X.scale`."""
    return {
        key.removesuffix(_OTHER_TOOLS_SUFFIX) + _SUFFIX
        if key.endswith(_OTHER_TOOLS_SUFFIX)
        else key: tensor
        for key, tensor in state_dict.items()
    }


def _beyond_neuron(weight: torch.Tensor) -> bool:
    """Whether some e4m3 bits mean more than 240, or NaN; the bits of 240 are 0x77."""
    return bool(((weight.contiguous().view(torch.uint8) & 0x7F) > 0x77).any())


def check(state_dict: StateDict, neuron_config: Any) -> None:
    """CheckpointError for a checkpoint that is not quantised, or not as configured."""
    path = neuron_config.quantized_checkpoints_path
    dtype, per_channel = (
        dtype_of(neuron_config.quantization_dtype).value,
        _per_channel(neuron_config),
    )
    scales = [key for key in state_dict if key.endswith(_SUFFIX)]
    if not scales:
        raise CheckpointError(
            f"{path} holds no scales, so it is not quantised, expected a checkpoint of "
            "save_quantized_state_dict; make one, or leave quantized out."
        )
    for key in scales:
        weight = state_dict.get(key.removesuffix(_SUFFIX) + ".weight")
        if weight is None or weight.dtype is not dtype:
            found = "no weight" if weight is None else f"a weight of {weight.dtype}"
            raise CheckpointError(
                f"{path} has the scale {key} beside {found}, expected a weight of {dtype}; "
                "quantise with the same quantization_dtype."
            )
        scale = state_dict[key]
        fits = [weight.shape[0], 1] if per_channel else [1]
        if list(scale.shape) != fits and not (scale.dim() == 0 and not per_channel):
            raise CheckpointError(
                f"{path} has {key} of shape {list(scale.shape)}, expected {fits} by "
                f"{neuron_config.quantization_type}; quantise with the same quantization_type."
            )
        if not scale.is_floating_point():
            raise CheckpointError(
                f"{path} has {key} in {scale.dtype}, expected scales in float32; quantise again."
            )
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise CheckpointError(
                f"{path} has NaN, infinite or negative values in {key}, expected finite scales of "
                "at least 0; quantise again."
            )
        if dtype is torch.float8_e4m3fn and _beyond_neuron(weight):
            raise CheckpointError(
                f"{path} has values beyond 240 in {key.removesuffix(_SUFFIX)}.weight, where e4m3 "
                "ends on Neuron (OCP's type ends at 448); divide such weights by 448 / 240 and "
                "multiply their scales by it."
            )
    for key, tensor in state_dict.items():
        own = key.removesuffix(".weight") + _SUFFIX
        if tensor.dtype is dtype and key.endswith(".weight") and own not in state_dict:
            raise CheckpointError(
                f"{path} has {key} in {dtype} without a scale, expected {own} beside it; quantise "
                "again."
            )
        if key.endswith("zero_point") and bool(tensor.any()):
            raise CheckpointError(
                f"{path} has the zero point {key}, expected weights that lie symmetrically around "
                "0; quantise again without zero points."
            )
