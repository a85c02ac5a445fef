"""Reads checkpoints: safetensors and pickle, whole and sharded, in NxDI's order of preference."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable

import torch
from safetensors.torch import load_file

from neuron_cpu.errors import CheckpointError

StateDict = dict[str, torch.Tensor]
Path = str | os.PathLike

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


def load_pickle(path: Path) -> StateDict:
    """Tensors of a pickle, mapped from the file; only tensor data is unpickled. A file from before
    PyTorch 1.6 is no archive, and is read into memory."""
    try:
        return torch.load(
            path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
        )
    except pickle.UnpicklingError as error:  # PyTorch's text advises to switch the protection off
        raise CheckpointError(
            f"{path} holds Python objects that are no tensors, which may run anybody's code and "
            "are not unpickled, expected tensors only; take the model's safetensors files."
        ) from error


def _load_sharded(index: str, read: Callable[[Path], StateDict]) -> StateDict:
    """The tensors of every file that the index names."""
    with open(index, encoding="utf-8") as reader:
        files = sorted(set(json.load(reader)["weight_map"].values()))
    merged: StateDict = {}
    for name in files:
        path = os.path.join(os.path.dirname(index), name)
        if not os.path.isfile(path):
            raise CheckpointError(
                f"{index} names {name}, which is missing, expected it "
                "beside the index; download the checkpoint again."
            )
        merged.update(read(path))
    return merged


_FORMATS: dict[str, Callable[[Path], StateDict]] = {
    SAFETENSORS_FILE: load_file,
    SAFETENSORS_INDEX: load_file,
    PICKLE_FILE: load_pickle,
    PICKLE_INDEX: load_pickle,
}


def load_state_dict(state_dict_dir: Path) -> StateDict:
    """The tensors of a folder's checkpoint, mapped from the files, not copied.

    FileNotFoundError where the folder holds none of the four formats; CheckpointError for a file
    that cannot be read.
    """
    for name, read in _FORMATS.items():
        path = os.path.join(state_dict_dir, name)
        if not os.path.isfile(path):
            continue
        sharded = name in (SAFETENSORS_INDEX, PICKLE_INDEX)
        try:
            return _load_sharded(path, read) if sharded else read(path)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path} is no readable checkpoint "
                f"({type(error).__name__}: {str(error).splitlines()[0]}), expected a complete "
                "file; download or convert it again."
            ) from error
    names = ", ".join(_FORMATS)
    raise FileNotFoundError(
        f"{state_dict_dir} holds no checkpoint, expected one of {names}; name a model folder."
    )


def without_sharing(state_dict: StateDict) -> StateDict:
    """Contiguous tensors without overlaps in memory, as safetensors wants them; few are copied."""
    seen: dict[int, str] = {}
    result: StateDict = {}
    for key, tensor in state_dict.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        if not whole or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen[tensor.untyped_storage().data_ptr()] = key
        result[key] = tensor
    return result
