"""A sequence's keys and values, moved from one loaded model to another."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from neuronx_distributed_inference.modules.kvcache.transfer import (
    SequenceState,
    export_kv,
    import_kv,
)

from tests.conftest import REPOSITORY

PROMPT = [5, 17, 101, 3, 44]


def prefilled(app, line):
    """The logits behind a prompt on a line."""
    ids = torch.tensor([PROMPT])
    positions = torch.arange(len(PROMPT))[None]
    return app(input_ids=ids, position_ids=positions, seq_ids=torch.tensor([line])).logits[0, -1]


def decoded(app, line, token, steps=4):
    """Logits of greedy steps behind the prompt."""
    found = []
    for position in range(len(PROMPT), len(PROMPT) + steps):
        output = app(
            input_ids=torch.tensor([[token]]),
            attention_mask=torch.ones(1, position),
            position_ids=torch.tensor([[position]]),
            seq_ids=torch.tensor([line]),
        )
        found.append(output.logits[0, -1])
        token = int(found[-1].argmax())
    return torch.stack(found)


def test_decode_goes_on_on_another_line_of_another_model(tiny_llama, application):
    """Two ranks; the line that receives held a longer sequence before."""
    _, folder = tiny_llama()
    options = dict(tp_degree=2, is_continuous_batching=True, batch_size=2, ctx_batch_size=1)
    there, here = (application(folder, **options) for _ in range(2))
    token = int(prefilled(here, 0).argmax())
    state = export_kv(here, 0, len(PROMPT), token)
    expected = decoded(here, 0, token)
    layers, ranks, heads, head_dim, bytes_each = 2, 2, 1, 8, 4
    assert state.nbytes == 2 * layers * ranks * heads * len(PROMPT) * head_dim * bytes_each
    longer = torch.arange(3, 23)[None]
    there(input_ids=longer, position_ids=torch.arange(20)[None], seq_ids=torch.tensor([1]))
    import_kv(there, 1, state)
    found = decoded(there, 1, state.token)  # another row of a product may round otherwise
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for wrong in (
        SequenceState(5, 1, state.rows[:-1]),
        SequenceState(5, 1, [rows.half() for rows in state.rows]),
        SequenceState(48, 1, state.rows),
    ):
        with pytest.raises(ValueError, match="expected 8 of .* fewer tokens than max_length 48"):
            import_kv(there, 1, wrong)
    here.neuron_config.padding_side = "left"
    with pytest.raises(ValueError, match="got padding_side 'left', expected 'right'"):
        export_kv(here, 0, 5, 1)


@pytest.mark.full
def test_prefill_and_decode_in_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    script = REPOSITORY / "benchmarks" / "disaggregated.py"
    run = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "transfer: 196,608 bytes" in run.stdout and "16 tokens are equal" in run.stdout
