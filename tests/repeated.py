"""Every kernel that runs, runs in all forms, and their results are compared.

    python -m pytest -p tests.repeated tests/core ...
    python tests/repeated.py FILE run SCRIPT ARGS...

The first is a plugin of pytest. The second serves a script of others, and writes into FILE which
kernels it compared. Each call of a plan is made one by one, merged, recorded and in its short form,
on copies of the inputs. Results are equal to the last bit; where a kernel multiplies, within the
order of fp32 sums. A plan of more operations than are ever recorded has the first two forms.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, which has a `nki`

import pytest
import torch

from neuron_cpu.core.run import execute

LARGEST, LARGE = 1 << 22, 1 << 26  # elements of the inputs of a kernel, in tests and of others
_RANDOM = ("rand", "dropout", "rng")
compared: list[str] = []  # names of kernels, a call each


def _copy(tensor):
    copied = tensor.clone()
    copied.__dict__.update(tensor.__dict__)  # with promises about weights
    return copied


def _close(found, wanted, exact):
    if exact or not wanted.is_floating_point() or wanted.element_size() == 1:
        same = (found == wanted) | ((found != found) & (wanted != wanted))
        return bool(same.all())
    bits = 2.0**-7 if wanted.element_size() == 2 else 2.0**-16
    scale = float(wanted.float().nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 0.0
    return torch.allclose(found, wanted, rtol=4 * bits, atol=4 * bits * scale, equal_nan=True)


def run_all_forms(patch, largest=LARGEST):
    """Plans run in two or four forms from here on, those whose inputs are no larger."""
    once = execute.Plan.run

    def run(plan, inputs):
        specs = {op.spec.name for op in plan.ops}
        random = any(word in name for name in specs for word in _RANDOM)
        large = sum(tensor.numel() for tensor in inputs) > largest
        alone = plan.rows is not None or plan.both is not None or plan.arena.shadow
        if alone or random or large or any(op.spec.meets for op in plan.ops):
            return once(plan, inputs)
        name, again = plan.program.name, (plan,) * (3 if plan._records else 1)
        exact = not any(op.spec.multiplies for op in plan.ops)
        plain = execute.Plan(plan.program, False)
        forms = [once(p, [_copy(t) for t in inputs]) for p in (plain, *again)]
        assert plan._short is not None or not plan._records
        for results in forms[1:]:
            pairs = zip(results, forms[0])
            assert all(_close(a, b, exact) for a, b in pairs), f"{name} differs"
        for a, b in zip(forms[-1], forms[1]):
            assert _close(a, b, exact), f"{name} differs from its merged form"
        compared.append(name)
        return once(plan, inputs)

    patch.setattr(execute, "RECORDED", 1)
    patch.setattr(execute, "LARGE_RECORDED", 1)
    patch.setattr(execute.Plan, "run", run)


@pytest.fixture(autouse=True)
def in_all_forms(monkeypatch):
    run_all_forms(monkeypatch)


def main(file, *arguments):
    """``python -m neuron_cpu ARGUMENTS``, and the names of the kernels that were compared."""
    from neuron_cpu.__main__ import main as command

    run_all_forms(pytest.MonkeyPatch(), LARGE)
    try:
        return command(list(arguments))
    finally:
        Path(file).write_text(json.dumps(compared))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
