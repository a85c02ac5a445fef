"""The search of llama.py's constants names what is there: constants, arguments, references."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from neuron_cpu.judge import cases
from neuron_cpu.tune import space
from tests.conftest import REPOSITORY

PATH = REPOSITORY / "benchmarks" / "llama_tuning.py"


@pytest.fixture(scope="module")
def tuning():
    spec = importlib.util.spec_from_file_location("llama_tuning", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mlp", "prefill", "decode", "head"])
def test_cases_and_constants_are_those_of_the_kernel(name: str, tuning) -> None:
    task = tuning.TASKS[name]
    kernel, reference = getattr(tuning, name), getattr(tuning, f"{name}_reference")
    for text in task.cases:
        positional, named = cases.case(text).resolved(vars(tuning)).meta()
        inspect.signature(kernel.function).bind(*positional, **named)
        inspect.signature(reference).bind(*positional, **named)
    source = space.Source(PATH, name)
    assert set(source.current(list(space.parse(task.space)))) == set(space.parse(task.space))
