"""The doors under arbitrary input: each is taken or refused in one sentence, nothing else.

`make fuzz` draws 10 000 inputs of each, and what it finds becomes a case; the handful of `make
test` is the same in every run (conftest.py). No input may take longer than MOST_SECONDS or more
memory than MOST_BYTES; both end it where it is.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import struct
import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import streaming
from harness.errors import UserError
from harness.figures import divergence, estimated_speed, evaluation, graphs, reference
from harness.inputs import command_line, models, options, prompts, submission
from harness.processes import worker, workers
from harness.processes.worker import Answer
from harness.session import building, generation, opening
from neuron_cpu.commands import check, kernels
from neuron_cpu.errors import StandInError
from neuron_cpu.judge import cases
from neuron_cpu.sandbox import limits
from neuron_cpu.sandbox.pipes import Pipe as Reading
from tests.tiny_model import TINY_CONFIG, write_tiny_model

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
MOST_SECONDS, MOST_BYTES = 10, 4 << 30
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,  # `bounded` has one that ends what hangs
    database=None,
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


def bounded():
    """End the body with an error where it takes too long or too much memory."""
    return limits.bounded(MOST_SECONDS, MOST_BYTES)


def taken_or_refused(door):
    """Nothing but a refusal of one sentence, or argparse's exit with status 2."""
    try:
        with bounded():
            door()
    except (UserError, StandInError) as error:
        assert not isinstance(error.__cause__, (TimeoutError, MemoryError)), str(error)
        assert str(error).strip()
    except SystemExit as error:
        assert error.code in (0, 2)


def replaced(document, path, value):
    """A copy of a JSON document with `value` in one place, found by going down `path`."""
    whole = place = {"": copy.deepcopy(document)}
    key: Any = ""
    for step in path:
        below = place[key]
        if not isinstance(below, (dict, list)) or not below:
            break
        place = below
        key = list(below)[step % len(below)] if isinstance(below, dict) else step % len(below)
    place[key] = value
    return whole[""]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("fuzz") / "model")


FLAGS = [
    option for action in command_line.build_parser()._actions for option in action.option_strings
]
WORDS = st.sampled_from(
    ["nan", "inf", "-1", "0", "1", "64", "1e400", "true", "~x", "{None: 1}", ""]
)


@fuzzed
@given(
    st.sampled_from(list(options.MODES)),
    st.lists(st.sampled_from(FLAGS) | WORDS | st.text(max_size=8), max_size=8),
)
def test_command_lines(mode, arguments):
    kept = [word for word in arguments if word not in ("-h", "--help")]
    taken_or_refused(lambda: command_line.parse(["--mode", mode, *kept]))


@fuzzed
@given(st.text(max_size=20) | st.sampled_from(["", ".", "a..b", "~x/y.py", "/", ".py", "~", "\0"]))
def test_names_of_submissions(name):
    taken_or_refused(lambda: submission.find(name))


@fuzzed
@given(st.dictionaries(st.sampled_from([*TINY_CONFIG, "head_dim", "rope_scaling"]), VALUES))
def test_configurations(model, changes):
    (model / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    taken_or_refused(lambda: models.check_folder(model))


@fuzzed
@given(VALUES)
def test_generation_settings(model, value):
    names = ("temperature", "top_k", "eos_token_id", "max_length")
    content = value if isinstance(value, dict) else dict.fromkeys(names, value)
    (model / "config.json").write_text(json.dumps(TINY_CONFIG))
    (model / "generation_config.json").write_text(json.dumps(content))
    taken_or_refused(lambda: models.check_folder(model))
    (model / "generation_config.json").unlink()


@fuzzed
@given(VALUES | st.dictionaries(st.text(max_size=6), VALUES), st.binary(max_size=40))
def test_safetensors(tmp_path, header, rest):
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    taken_or_refused(lambda: models.entries_of(path))
    path.write_bytes(rest)
    taken_or_refused(lambda: models.entries_of(path))


@fuzzed
@given(st.binary(max_size=200), st.text(max_size=60))
def test_prompts(tmp_path, content, value):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    taken_or_refused(lambda: prompts.read_prompt_file(path))
    taken_or_refused(lambda: prompts.split_prompt_value(value))


@fuzzed
@given(VALUES | st.fixed_dictionaries({"graphs": VALUES}), st.text(max_size=60))
def test_records(tmp_path, content, text):
    (tmp_path / graphs.RECORD).write_text(json.dumps(content))
    taken_or_refused(lambda: graphs.read(tmp_path))
    (tmp_path / "data.txt").write_bytes(text.encode(errors="replace"))
    taken_or_refused(lambda: reference.read_rows(tmp_path / "data.txt"))
    with contextlib.suppress(ValueError):
        evaluation.from_dict(content)


PATHS = st.lists(st.integers(0, 400), min_size=1, max_size=5)


@fuzzed
@given(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), PATHS, VALUES)
def test_tokenizers(model, name, path, value):
    (model / "config.json").write_text(json.dumps(TINY_CONFIG))
    original = (model / name).read_text()
    (model / name).write_text(json.dumps(replaced(json.loads(original), path, value)))

    def door():
        tokenizer = opening.read_tokenizer(model, "right")
        (ids,) = prompts.encode(tokenizer, ["some words"], raw=False)
        text = streaming.RowText(tokenizer)
        _ = [text.add(token) for token in ids[:4]]

    try:
        taken_or_refused(door)
    finally:
        (model / name).write_text(original)


WORDS_OF_TEMPLATES = st.sampled_from(
    ["{{", "}}", "{%", "%}", "messages", "[0]", "['content']", ".__class__", "for m in ", " if "]
    + ["endfor", "endif", "raise_exception('x')", "set a = ", "|", "tojson", "(", ")", "+", "*"]
)


@fuzzed
@given(st.lists(WORDS_OF_TEMPLATES | st.text(max_size=4), max_size=12))
def test_chat_templates(tokenizer, words):
    tokenizer.chat_template = "".join(words)
    taken_or_refused(lambda: prompts.encode(tokenizer, ["some words"], raw=False))


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


@fuzzed
@given(st.lists(st.binary(max_size=60), max_size=4), VALUES)
def test_messages_of_a_submission(parts, body):
    head = {"request": 1, "kind": "event", "body": body, "shapes": body}
    for sent in (parts, [json.dumps(head).encode(), *parts]):
        near, far = Pipe()
        for part in sent:
            far.send_bytes(part)
        far.close()
        alive, end = os.pipe()  # a process that goes on
        with contextlib.suppress(worker.WireError, EOFError), bounded():
            worker.receive(Reading(near, alive), time.monotonic() + 5)
        near.close()
        os.close(alive)
        os.close(end)


@fuzzed
@given(VALUES)
def test_answers_of_a_submission(body):
    """What its process may send for each request, arrays aside."""
    session = SimpleNamespace(vocabulary=320)
    loaded: Any = SimpleNamespace(
        call=lambda *_, **__: Answer(body), session=session, role=None, draft=None
    )
    taken_or_refused(lambda: divergence.measure(loaded, [1, 2, 3]))
    taken_or_refused(lambda: building._checked_buckets(body))
    taken_or_refused(lambda: generation.check_step(loaded.session, body, 1))
    taken_or_refused(lambda: generation.generate_tokens(loaded, [[1, 2, 3]], 2))
    taken_or_refused(lambda: generation.greedy_scores(loaded, [[1, 2, 3]], 2))
    estimates = estimated_speed.SpeedEstimates(loaded)
    estimates._counting = loaded
    taken_or_refused(lambda: estimates._estimate("context_encoding_model", 128))
    for read in (workers._check_progress, workers._text):
        with contextlib.suppress(worker.WireError):
            read(body)


SIZES = st.sampled_from(["128x512:bf16", "0x1:f32", "9x:f32", "2:nan", "x=1", "1e-5", "a=[", "'"])


@fuzzed
@given(st.text(max_size=20) | SIZES, st.text(max_size=8))
def test_arguments_of_one_kernel(value, grid):
    taken_or_refused(lambda: cases.parse_case([value]).resolved({}).meta())
    taken_or_refused(lambda: kernels.parse_grid(grid))


@fuzzed
@given(st.text(max_size=80) | st.binary(max_size=60))
def test_kernel_files(tmp_path, content):
    path = tmp_path / "kernels.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="replace"))
    taken_or_refused(lambda: check._constructs(path, ""))
