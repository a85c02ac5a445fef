"""Names of operators: ``nl`` functions, numpy functions and strings all mean the same op codes.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki.api.shared.rst (supported math operators).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..device.errors import refuse

_NUMPY: dict[Any, str] = {
    np.add: "add",
    np.subtract: "subtract",
    np.multiply: "multiply",
    np.divide: "divide",
    np.maximum: "maximum",
    np.minimum: "minimum",
    np.max: "maximum",
    np.min: "minimum",
    np.sum: "add",
    np.prod: "multiply",
    np.power: "power",
    np.equal: "equal",
    np.not_equal: "not_equal",
    np.greater: "greater",
    np.greater_equal: "greater_equal",
    np.less: "less",
    np.less_equal: "less_equal",
    np.logical_and: "logical_and",
    np.logical_or: "logical_or",
    np.logical_xor: "logical_xor",
    np.logical_not: "logical_not",
    np.bitwise_and: "bitwise_and",
    np.bitwise_or: "bitwise_or",
    np.bitwise_xor: "bitwise_xor",
    np.invert: "invert",
    np.left_shift: "left_shift",
    np.right_shift: "right_shift",
    np.exp: "exp",
    np.log: "log",
    np.sqrt: "sqrt",
    np.square: "square",
    np.tanh: "tanh",
    np.sin: "sin",
    np.arctan: "arctan",
    np.sign: "sign",
    np.abs: "abs",
    np.absolute: "abs",
    np.copy: "copy",
    np.reciprocal: "reciprocal",
    np.mod: "mod",
    np.fmod: "fmod",
    np.all: "logical_and",
    np.any: "logical_or",
}
_ALIASES = {
    "max": "maximum",
    "min": "minimum",
    "sum": "add",
    "prod": "multiply",
    "all": "logical_and",
}


def name_of(op: Any) -> str:
    """Op code of an operator argument.

    Raises:
        NkiError: the object is no operator of the language.
    """
    own = getattr(op, "nki_name", None)
    if own is not None:
        return _ALIASES.get(own, own)
    try:
        found = _NUMPY.get(op)
    except TypeError:
        found = None
    if found is None and isinstance(op, str):
        found = _ALIASES.get(op, op)
    if found is None:
        raise refuse(
            "sim_unknown_operator",
            f"operator {getattr(op, '__name__', op)} is none of the language, expected an nl or "
            "numpy function such as nl.add or np.exp; give it by name, as op=nl.add or op0=nl.add",
        )
    return found


def named(name: str, function: Callable) -> Callable:
    """Mark a function as operator ``name``, so that it can be passed as ``op=``."""
    function.__name__ = function.__qualname__ = name
    function.nki_name = name  # type: ignore[attr-defined]
    return function
