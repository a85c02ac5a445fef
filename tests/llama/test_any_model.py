"""Models, batches and lengths beyond those of test_shapes.py: within SBUF and PSUM, or refused."""

from __future__ import annotations

import pytest

import llama
from tests.llama.test_shapes import Layer, Model, check_traced


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


@pytest.mark.parametrize("rows", [64, 128])
def test_rows_of_the_head_that_have_no_room_at_once_trace(rows: int) -> None:
    """1002 tiles of 128 logits a row: 128 rows would take 250 KiB."""
    check_traced(*Layer("Llama-3.2-1B", 1, "meta").head(rows))


def test_sequences_whose_cached_keys_have_no_room_at_once_trace() -> None:
    """Keys of each of eight would stay, in 24 KiB."""
    model = Model(640, 32, 4, 128, 2560, 32000)
    name, args, macs = Layer(model, 1, "meta").chunk(8, 128, 1000)
    assert getattr(llama, name).trace(*args).macs >= macs


@pytest.mark.parametrize("itemsize", [2, 4])
def test_pieces_of_a_weight_are_as_long_whatever_its_type(itemsize: int) -> None:
    for _, tiles in llama.weight_pieces(64, 16, 256, itemsize=itemsize):
        assert tiles * 16 * 128 * itemsize <= llama.PIECE_BYTES
