"""Warnings come from the kernel's own line, not from the simulator's."""

from __future__ import annotations

import warnings

from neuron_cpu.core.device import errors


def shown(source: str | None) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.warn("sim_test", "doubtful", source)
    (found,) = caught
    return found


def test_the_kernels_file_and_line_are_the_warnings() -> None:
    found = shown("my_kernel (/somewhere/kernels.py:12)")
    assert (found.filename, found.lineno) == ("/somewhere/kernels.py", 12)
    assert str(found.message) == "my_kernel: doubtful [sim_test]"
    assert (shown("kernels.py:3").filename, shown("kernels.py:3").lineno) == ("kernels.py", 3)


def test_a_place_without_a_line_stands_in_the_message() -> None:
    assert str(shown("my_kernel").message) == "my_kernel: doubtful [sim_test]"
    assert str(shown(None).message) == "doubtful [sim_test]"
