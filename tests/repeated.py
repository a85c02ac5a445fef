"""A plugin of pytest: every kernel that a test runs, runs in all forms, and results are compared.

    python -m pytest -p tests.repeated tests/core ...

Each call of a plan is made one by one, merged, recorded and in its short form, on copies of the
inputs. Results are equal to the last bit; where a kernel multiplies, within the order of fp32 sums.
"""

import pytest
import torch

from neuron_cpu.core.run import execute

LARGEST = 1 << 22  # elements of the inputs of a kernel that is run again and again
_RANDOM = ("rand", "dropout", "rng")


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


@pytest.fixture(autouse=True)
def in_all_forms(monkeypatch):
    """Runs of plans, four times each."""
    once = execute.Plan.run

    def run(plan, inputs):
        specs = {op.spec.name for op in plan.ops}
        random = any(word in name for name in specs for word in _RANDOM)
        large = sum(tensor.numel() for tensor in inputs) > LARGEST
        if not plan._records or random or large or any(op.spec.meets for op in plan.ops):
            return once(plan, inputs)
        plain = execute.Plan(plan.program, False)
        exact = not any(op.spec.multiplies for op in plan.ops)
        forms = [once(p, [_copy(t) for t in inputs]) for p in (plain, plan, plan, plan)]
        assert plan._short is not None
        for results in forms[1:]:
            pairs = zip(results, forms[0])
            assert all(_close(a, b, exact) for a, b in pairs), f"{plan.program.name} differs"
        for a, b in zip(forms[3], forms[1]):
            assert _close(a, b, exact), f"{plan.program.name} differs from its merged form"
        return once(plan, inputs)

    monkeypatch.setattr(execute, "RECORDED", 1)
    monkeypatch.setattr(execute, "LARGE_RECORDED", 1)
    monkeypatch.setattr(execute.Plan, "run", run)
    yield
