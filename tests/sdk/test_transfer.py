"""A sequence's keys and values, moved from one loaded model to another."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from neuronx_distributed_inference.modules.kvcache import transfer_line
from neuronx_distributed_inference.modules.kvcache.transfer import (
    Header,
    SequenceState,
    export_kv,
    import_kv,
    receive_header,
    receive_rows,
    send_kv,
)
from neuronx_distributed_inference.modules.kvcache.transfer_line import TransferLine

from neuron_cpu.errors import CollectiveError
from neuron_cpu.processes.torchrun import Place

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

    here.neuron_config.padding_side = "right"
    here.neuron_config.flash_decoding_enabled = True
    with pytest.raises(ValueError, match="got flash_decoding_enabled True"):
        export_kv(here, 0, 5, 1)


def test_keys_stored_the_other_way_round_travel_as_the_others(tiny_llama, application, monkeypatch):
    """From a cache of keys (lines, heads, D, length) into another one."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.3")
    _, folder = tiny_llama()
    options = dict(is_continuous_batching=True, batch_size=2, ctx_batch_size=1)
    plain = application(folder, **options)
    turned, other = (application(folder, k_cache_transposed=True, **options) for _ in range(2))
    token = int(prefilled(turned, 0).argmax())
    state, expected = export_kv(turned, 0, len(PROMPT), token), decoded(turned, 0, token)
    for there in (other, plain):
        import_kv(there, 1, state)
        torch.testing.assert_close(decoded(there, 1, token), expected, rtol=0, atol=1e-5)


def pair(seconds=20.0):
    """Both ends of a line, in one process."""
    store, ends = dist.HashStore(), [None, None]

    def join(rank):
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))
        ends[rank] = TransferLine(Place(rank, 2, "localhost", 0, timeout_seconds=seconds), group)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def sent(state, line):
    thread = threading.Thread(target=send_kv, args=(state, line))
    thread.start()
    return thread


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "fp8"])
def test_a_sequence_travels_whole(tiny_llama, application, quantised):
    _, folder = tiny_llama()
    here, there = (application(folder, tp_degree=2, kv_cache_quant=quantised) for _ in range(2))
    token = int(prefilled(here, 0).argmax())
    state = export_kv(here, 0, len(PROMPT), token)
    ends = pair()
    thread = sent(state, ends[0])
    header = receive_header(ends[1])
    got = receive_rows(there, header, ends[1])
    thread.join(10)
    assert (got.length, got.token, got.nbytes) == (len(PROMPT), token, state.nbytes)
    for rows, expected in zip(got.rows, state.rows, strict=True):
        assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
    import_kv(there, 0, got)
    assert torch.equal(decoded(there, 0, token), decoded(here, 0, token))


def test_a_sequence_that_does_not_fit_is_refused_before_it_comes(tiny_llama, application):
    model = application(tiny_llama()[1])
    rows = torch.zeros(2, len(PROMPT), 8)
    state = SequenceState(len(PROMPT), 1, [rows] * 4)
    ends = pair(1.0)
    fits = Header(len(PROMPT), 1, 4, 0, 2, 8)
    for wrong in (
        fits._replace(length=1 << 40),
        fits._replace(length=0),
        fits._replace(heads=1 << 30),
        fits._replace(count=5),
        fits._replace(dtype=1),
    ):
        with pytest.raises(ValueError, match="expected 4 of .* fewer tokens than max_length 48"):
            receive_rows(model, wrong, ends[1])
    for wrong in (fits._replace(dtype=77), fits._replace(count=1 << 40)):
        with pytest.raises(CollectiveError, match="What arrived is no sequence"):
            receive_rows(model, wrong, ends[1])
    thread = sent(state, ends[0])
    assert receive_header(ends[1]) == fits
    receive_rows(model, fits, ends[1])
    thread.join(10)


def test_a_side_that_does_not_come_is_told_in_a_sentence():
    line, _ = pair(0.2)
    told = "The decode side is gone or mute .*, expected it to take part in a transfer within 0.2 s"
    with pytest.raises(CollectiveError, match=told):
        line.receive(torch.empty(3))
    nobody = Place(1, 2, "127.0.0.1", 9, "kv", timeout_seconds=0.2)
    with pytest.raises(CollectiveError, match="The prefill side cannot be met through 127.0.0.1:9"):
        transfer_line.join(nobody)
    with pytest.raises(CollectiveError, match="has no line to another one"):
        transfer_line.joined()
