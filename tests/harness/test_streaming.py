"""Streaming of rows: nothing is taken back, nothing is lost, rows do not mix."""

from __future__ import annotations

import random

from harness.streaming import Stream

STOP = 0


class ByteTokenizer:
    """Token n is byte n - 1; 0 ends a text."""

    def decode(self, tokens, **_):
        return bytes(token - 1 for token in tokens if token != STOP).decode("utf-8", "replace")


def tokens_of(text):
    return [byte + 1 for byte in text.encode()] + [STOP]


def play(texts, steps):
    written: list[str] = []
    stream = Stream(ByteTokenizer(), [STOP], [f"{i}: " for i in range(len(texts))], written.append)
    rows = [tokens_of(text) for text in texts]
    for step in range(steps):
        stream.step([row[step] if step < len(row) else 77 for row in rows])
    stream.finish()
    return written, stream


def test_rows_appear_one_after_the_other_without_mixing():
    rng = random.Random(3)
    texts = ["".join(rng.choices("aé你🙂 \n", k=rng.randrange(0, 30))) for _ in range(5)]
    written, stream = play(texts, steps=200)
    assert "".join(written) == "".join(f"{i}: {text}\n" for i, text in enumerate(texts))
    assert stream.token_counts == [len(tokens_of(text)) for text in texts]


def test_the_first_row_streams_in_pieces_and_characters_stay_whole():
    written, _ = play(["é你"], steps=6)
    assert written[0] == "0: "
    assert [piece for piece in written[1:] if piece] == ["é", "你", "\n"]


def test_a_row_cut_inside_a_character_shows_that_it_was_cut():
    written, _ = play(["a你"], steps=2)
    assert "".join(written) == "0: a\ufffd\n"


def test_steps_that_are_read_at_once_take_what_their_process_says():
    stream = Stream(ByteTokenizer(), [STOP], [""], lambda _: None)
    for seconds in (0.5, 0.25, 0.25):
        stream.step([66], seconds)
    assert stream.step_seconds[0] >= 0.5 and min(stream.step_seconds[1:]) >= 0.249
    assert stream.tokens_per_second is not None and stream.tokens_per_second <= 4.001
