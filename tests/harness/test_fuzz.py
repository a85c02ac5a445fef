"""The doors under arbitrary input: each is taken or refused in one sentence, nothing else.

`make fuzz` tries 10 000 inputs of each; here it is a handful, so that the doors stay covered.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.figures import evaluation, graphs, reference
from harness.inputs import command_line, models, prompts
from tests.tiny_model import TINY_CONFIG, write_tiny_model

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=10_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["llama", "llama3", "", "nan", "0", "\x00", "\ud800", "[/red]"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def taken_or_refused(door: Callable[[], Any]) -> None:
    """Nothing but a UserError of one sentence, or argparse's exit with status 2."""
    try:
        door()
    except UserError as error:
        assert str(error).strip()
    except SystemExit as error:
        assert error.code in (0, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("fuzz") / "model")


FLAGS = [
    option for action in command_line.build_parser()._actions for option in action.option_strings
]
WORDS = st.sampled_from(
    ["nan", "inf", "-1", "0", "1", "64", "1e400", "true", "~x", "{None: 1}", ""]
)


@fuzzed
@given(
    st.sampled_from(list(command_line.MODES)),
    st.lists(st.sampled_from(FLAGS) | WORDS | st.text(max_size=8), max_size=8),
)
def test_command_lines(mode: str, arguments: list[str]) -> None:
    kept = [word for word in arguments if word not in ("-h", "--help")]
    taken_or_refused(lambda: command_line.parse(["--mode", mode, *kept]))


@fuzzed
@given(st.dictionaries(st.sampled_from([*TINY_CONFIG, "head_dim", "rope_scaling"]), VALUES))
def test_configurations(model: Path, changes: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    taken_or_refused(lambda: models.check_folder(model))


@fuzzed
@given(VALUES)
def test_generation_settings(model: Path, value: Any) -> None:
    names = ("temperature", "top_k", "eos_token_id", "max_length")
    content = value if isinstance(value, dict) else dict.fromkeys(names, value)
    (model / "config.json").write_text(json.dumps(TINY_CONFIG))
    (model / "generation_config.json").write_text(json.dumps(content))
    taken_or_refused(lambda: models.check_folder(model))
    (model / "generation_config.json").unlink()


@fuzzed
@given(VALUES | st.dictionaries(st.text(max_size=6), VALUES), st.binary(max_size=40))
def test_safetensors(tmp_path: Path, header: Any, rest: bytes) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    taken_or_refused(lambda: models._safetensors_shapes(path))
    path.write_bytes(rest)
    taken_or_refused(lambda: models._safetensors_shapes(path))


@fuzzed
@given(st.binary(max_size=200), st.text(max_size=60))
def test_prompts(tmp_path: Path, content: bytes, value: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    taken_or_refused(lambda: prompts.read_prompt_file(path))
    taken_or_refused(lambda: prompts.split_prompt_value(value))


@fuzzed
@given(VALUES | st.fixed_dictionaries({"graphs": VALUES}), st.text(max_size=60))
def test_records(tmp_path: Path, content: Any, text: str) -> None:
    (tmp_path / graphs.RECORD).write_text(json.dumps(content))
    taken_or_refused(lambda: graphs.read(tmp_path))
    (tmp_path / "data.txt").write_bytes(text.encode(errors="replace"))
    taken_or_refused(lambda: reference.read_rows(tmp_path / "data.txt"))
    with contextlib.suppress(ValueError):
        evaluation.from_dict(content)
