"""Splitting and reading of prompts."""

import pytest

from harness.errors import UserError
from harness.inputs.prompts import (
    check_lengths,
    encode,
    parse_prompt_text,
    read_prompt_file,
    split_prompt_value,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("one prompt", ["one prompt"]),
        ("a,b", ["a", "b"]),
        ("a, b", ["a", "b"]),
        ('"a, b",c', ["a, b", "c"]),
        ('"say ""hi"", now"', ['say "hi", now']),
        ("line one\nline two", ["line one\nline two"]),
        ('"x\n\ny",z', ["x\n\ny", "z"]),
        ("costs $50 \\ `now`", ["costs $50 \\ `now`"]),
        ('he said "hi"', ['he said "hi"']),
        ("a,,b", ["a", "", "b"]),
        ("", [""]),
    ],
)
def test_prompt_values_split_as_csv(value, expected):
    assert split_prompt_value(value) == expected


def test_bad_quoting_is_refused_with_the_mend():
    with pytest.raises(UserError, match="--prompt-file"):
        split_prompt_value('"Hello" she said')


def test_prompt_text_is_verbatim_and_separated_by_blank_lines():
    text = '\n\nfirst "quoted" \\"x\\"\nstill first\n\n  \n\tsecond $1\r\n\r\nthird\n'
    assert parse_prompt_text(text) == [
        'first "quoted" \\"x\\"\nstill first',
        "\tsecond $1",
        "third",
    ]


@pytest.mark.parametrize("content", [b"", b" \n\n\t\n", b"\xff\xfe broken"])
def test_unusable_prompt_files_are_refused(tmp_path, content):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="prompt file"):
        read_prompt_file(path)


def test_missing_prompt_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_prompt_file(tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    ("length", "seq_len", "context", "accepted"),
    [
        (3, 4, 4, True),
        (63, 64, 64, True),
        (64, 64, 64, False),
        (33, 64, 32, False),
        (32, 64, 32, True),
    ],
)
def test_prompt_lengths(length, seq_len, context, accepted):
    ids = [[7] * length]
    if accepted:
        check_lengths(["p"], ids, seq_len, context)
    else:
        with pytest.raises(UserError, match=f"{length} token"):
            check_lengths(["p"], ids, seq_len, context)


def test_an_endless_line_is_no_prompt(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(UserError, match="'xxx.*' has 13000000 characters, expected at most"):
        encode(tokenizer, ["x" * 13_000_000], raw=True)
