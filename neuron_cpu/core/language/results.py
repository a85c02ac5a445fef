"""The results of a kernel: outputs of its Program, and the caller's tensors that carry them."""

import ast
from typing import Any

import numpy as np
import torch

from ..device.errors import refuse, warn
from ..program import source
from ..program.program import Program
from ..program.view import View
from .specialisation import from_torch, is_jax, to_numpy


def adopt_results(program: Program, result: Any) -> None:
    """Returned nl.hbm tensors become outputs, except in a grid, where each instance has its own."""
    for value in result if isinstance(result, (tuple, list)) else [result]:
        storage = value.storage if isinstance(value, View) else None
        if storage is None or storage.buffer != "hbm" or storage.role != "local":
            continue
        if storage.frame is not None:
            continue
        warn(
            "sim_private_result",
            f"kernel {program.name} returns {storage.label()}, which is private to a core, "
            "expected a tensor made with buffer=nl.shared_hbm; change nl.hbm to nl.shared_hbm",
            program.place,
        )
        storage.buffer, storage.role = "shared_hbm", "output"


def collect_outputs(program: Program, result: Any) -> None:
    """Outputs are the returned shared_hbm tensors and mutable inputs; nothing else may be.

    Raises:
        NkiError: no result, another result, a part of a tensor, or a mutable parameter that is not
            among the results.
    """
    if not program.returns:
        _collect_written(program)
        return
    values = result if isinstance(result, (tuple, list)) else [result]
    program.return_tuple = isinstance(result, (tuple, list))
    if result is None or not values:
        raise refuse(
            "err_tensor_output_not_written_to",
            f"kernel {program.name} returns nothing, expected at least one nl.shared_hbm tensor; "
            "return the output tensors",
            program.place,
        )
    for value in values:
        allowed = isinstance(value, View) and (
            value.storage.buffer == "shared_hbm" or value.storage.mutable
        )
        if not allowed:
            got = value.label() if isinstance(value, View) else type(value).__name__
            raise refuse(
                "err_unsupported_memory",
                f"kernel {program.name} returns {got}, expected tensors made with "
                "buffer=nl.shared_hbm; store the result into one and return that",
                program.place,
            )
        add_output(program, value)
    for storage in program.inputs:
        if storage.mutable and storage not in program.outputs:
            raise refuse(
                "err_mutable_parameter_not_returned",
                f"kernel {program.name} does not return its mutable parameter {storage.label()}, "
                "expected it among the results; return it, or drop the annotation",
                program.place,
            )


def add_output(program: Program, value: View) -> None:
    """Return ``value``, which has to be a whole tensor."""
    if not value.is_full():
        raise refuse(
            "sim_partial_output",
            f"kernel {program.name} returns the part {value.shape} of {value.storage.label()}, "
            "expected whole tensors; return the tensor and slice what the call returns",
            program.place,
        )
    program.outputs.append(value.storage)
    program.output_shapes.append(value.shape)


def _collect_written(program: Program) -> None:
    """Old convention: the outputs are the parameters that the kernel stores into."""
    written = {v.storage for i in program.instructions for v in i.dst}
    program.outputs = [s for s in program.inputs if s in written]
    program.output_shapes = [s.shape for s in program.outputs]
    for storage in program.inputs:
        storage.mutable = storage in written
    if not program.outputs:
        raise refuse(
            "err_tensor_output_not_written_to",
            f"kernel {program.name} stores into none of its parameters, expected at least one: "
            "with kernel_return=False outputs are parameters; store the result into one",
            program.place,
        )


def check_writable(program: Program, tensors: list[Any]) -> None:
    """Refuse to write arrays that the caller made read-only (files that are mapped, say)."""
    for storage, tensor in zip(program.inputs, tensors):
        if storage.mutable and isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
            raise refuse(
                "sim_read_only_input",
                f"kernel {program.name} writes its input {storage.label()}, which the caller made "
                "read-only, expected an array that may be written; pass a copy",
                program.name,
            )


def hand_back(
    program: Program, tensors: list[Any], hosted: list[torch.Tensor], results: list[torch.Tensor]
) -> list[Any]:
    """Results in the caller's types; of a mutable parameter the caller's own tensor, updated."""
    own: dict[int, Any] = {}
    for storage, tensor, host in zip(program.inputs, tensors, hosted):
        if not storage.mutable or is_jax(tensor):  # JAX gets what was written as a result
            continue
        own[storage.id] = tensor
        # A contiguous tensor was written in place; of another one the plan had a copy.
        if isinstance(tensor, torch.Tensor):
            if tensor.data_ptr() != host.data_ptr():
                tensor.detach().copy_(host)
        elif tensor.ctypes.data != host.data_ptr():
            tensor[...] = to_numpy(host, storage.dtype)
    # A mutable parameter comes back as the caller's own object, as on the device.
    made = [
        own[s.id] if s.id in own else from_torch(r, s.dtype, tensors)
        for s, r in zip(program.outputs, results)
    ]
    return [
        m if tuple(m.shape) == shape else m.reshape(shape)
        for m, shape in zip(made, program.output_shapes)
    ]


def returns_value(function: Any) -> bool:
    """False for a function whose source has no ``return value``: outputs are its parameters."""
    tree = source.tree_of(function)
    pending: list[ast.AST] = [] if tree is None else list(tree.body)
    found = tree is None  # no source: the convention of 2.21, which returns
    while pending and not found:
        node = pending.pop()
        found = isinstance(node, ast.Return) and node.value is not None
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):  # their returns are their own
            pending.extend(ast.iter_child_nodes(node))
    return found


def returned(program: Program, outputs: list[Any]) -> Any:
    if not program.returns:
        return None
    if program.return_tuple:
        return tuple(outputs)
    return outputs[0] if outputs else None
