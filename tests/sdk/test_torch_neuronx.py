"""The compiler's operators, the graph format, the older kernel call and logit validation."""

import neuronxcc.nki.language as nl
import pytest
import torch
from torch_neuronx import scripting
from torch_neuronx.pyhlo import hlo_pb2
from torch_neuronx.testing.validation import logit_validation
from torch_neuronx.xla_impl.ops import RmsNorm, nki_jit

from neuron_cpu.core import observe_kernel_calls
from neuron_cpu.errors import StandInError


def test_the_closed_transport_of_caches_is_refused():
    scripting.install()
    with pytest.raises(StandInError, match="with torch.distributed"):
        torch.classes.neuron.NeuronTransferEngine(64, "127.0.0.1", True, True, 0)


def test_rms_norm():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5), torch.randn(5)
    expected = x.double() / (x.double().pow(2).mean(1, keepdim=True) + 0.5).sqrt()
    got = RmsNorm.apply(x, torch.ones(5), 0.5, 1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(RmsNorm.apply(x, weight, 0.5, 1), got * weight)


def test_graph_messages_have_the_public_field_numbers():
    """The wire bytes of a module: tag = field number * 8 + type, after xla's hlo.proto."""
    module = hlo_pb2.HloModuleProto(name="m", id=7)
    computation = module.computations.add(name="c", id=1, root_id=2)
    instruction = computation.instructions.add(name="i", opcode="dot", id=2)
    instruction.operand_ids.extend([3, 4])
    instruction.dot_dimension_numbers.lhs_contracting_dimensions.append(1)
    instruction.backend_config = b"x"
    inner = (
        b"\x0a\x01i"
        + b"\x12\x03dot"
        + b"\xf2\x01\x03\x0a\x01\x01"
        + b"\x98\x02\x02"
        + b"\xa2\x02\x02\x03\x04"
        + b"\xda\x02\x01x"
    )
    middle = b"\x0a\x01c" + b"\x12" + bytes([len(inner)]) + inner + b"\x28\x01" + b"\x30\x02"
    assert module.SerializeToString() == (
        b"\x0a\x01m" + b"\x1a" + bytes([len(middle)]) + middle + b"\x28\x07"
    )


def doubling(a_hbm, out_hbm, factor=2.0):
    """Old-style kernel: (128, n) times `factor` into its last argument."""
    tile = nl.load(a_hbm)
    nl.store(out_hbm, nl.multiply(tile, factor))


def test_older_kernel_call_writes_its_last_argument():
    x = torch.arange(128 * 4, dtype=torch.float32).view(128, 4)
    out = torch.zeros_like(x)
    names = []
    with observe_kernel_calls(lambda call: names.append(call.name)):
        assert nki_jit()(doubling)(x, out, factor=3.0, kernel_name="Doubling") is out
    assert torch.equal(out, x * 3)
    assert names == ["doubling"]


def test_older_kernel_call_needs_a_tensor():
    with pytest.raises(TypeError, match="doubling was called without a tensor"):
        nki_jit()(doubling)(factor=3.0)


VOCABULARY = 40


def logits_of(ids):
    """A deterministic 'model': logits (V,) that depend on all tokens so far."""
    generator = torch.Generator().manual_seed(int((ids * torch.arange(1, len(ids) + 1)).sum()))
    return torch.randn(VOCABULARY, generator=generator) * 10


def rollout(ids, steps, change=None):
    """Greedy logits (steps, B, V); `change(position, logits)` may alter each."""
    rows = []
    for row in ids:
        row, collected = row.clone(), []
        for _ in range(steps):
            logits = logits_of(row)
            if change is not None:
                logits = change(len(row), logits.clone())
            collected.append(logits)
            row = torch.cat([row, logits.argmax()[None]])
        rows.append(torch.stack(collected))
    return torch.stack(rows, dim=1)


INPUT = torch.tensor([[3, 5], [7, 9]])
STEPS = 6


def validate(change, **options):
    expected = rollout(INPUT, STEPS)
    calls = []

    def generate(ids):
        calls.append(ids.shape[1])
        return rollout(ids, 2 + STEPS - ids.shape[1], change)

    passed, results, status = logit_validation(INPUT, generate, expected, **options)
    assert len(results) == STEPS
    return passed, calls, status


@pytest.mark.parametrize(("error", "passes"), [(0.008, True), (0.02, False)])
def test_top_five_tolerance(error, passes):
    """The largest expected logit is scaled by 1 + error, the rest stay."""

    def change(_, logits):
        logits[logits.argmax()] *= 1 + error
        return logits

    only_top = {5: (1e-5, 0.01)}
    assert validate(change, tol_map=only_top)[0] == passes


def test_divergence_restarts_with_the_expected_tokens():
    """At length 4 another token wins by far: that position fails, later ones are teacher-forced."""

    def change(length, logits):
        if length == 4:
            logits[logits.argmin()] = logits.max() + 5.0
        return logits

    passed, calls, status = validate(change)
    assert not passed
    assert calls == [2, 5]
    assert "Positions that failed: [2]" in status


def test_a_near_tie_may_diverge():
    """Two best logits 0.0004 apart may swap; 0.002 apart they may not."""

    def swap(gap):
        def change(_, logits):
            best, second = logits.topk(2).indices
            logits[second] = logits[best] + gap
            return logits

        return change

    anything = {None: (1e9, 0.05)}
    assert validate(swap(0.0004), tol_map=anything)[0]
    assert not validate(swap(0.002), tol_map=anything)[0]


def test_infinite_entries_are_left_out():
    def change(_, logits):
        logits[logits.argmin()] = -torch.inf
        return logits

    assert validate(change)[0]


def test_generate_fn_must_return_something():
    with pytest.raises(ValueError, match="returned no logits for an input of 2 tokens"):
        logit_validation(INPUT, lambda _: torch.zeros(0, 2, 4), rollout(INPUT, 3))


def test_tensors_that_are_close_by_the_names_that_nxdi_reads():
    from torch_neuronx.testing.validation import neuron_allclose

    expected = torch.tensor([1.0, 10.0])
    near = neuron_allclose(expected + 0.05, expected, rtol=0.01, atol=0.0)
    assert near.allclose and near.max_rel_error == pytest.approx(0.005, rel=1e-3)
    assert not neuron_allclose(expected + 1, expected).allclose


def test_a_report_shows_the_error_as_it_is_judged():
    """An error of 0.0336 passes a limit of 0.03, because it is rounded like the limit first."""
    expected = torch.tensor([[[1.0, -1.0, 0.0]]])
    actual = expected + torch.tensor([0.0336, 0.0336, -0.0672]) / 2
    passed, _, told = logit_validation(
        torch.zeros(1, 2, dtype=torch.int64), lambda _: actual, expected, {None: (0.0, 0.03)}
    )
    assert passed and "Top all: error 0.03360, rounded 0.03, limit 0.03." in told
