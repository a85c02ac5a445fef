"""Files that come from elsewhere: one sentence names what is wrong with them, whatever it is."""

import json
import os
import struct

import pytest

from harness.errors import UserError
from harness.inputs import models, prompts, schema
from tests.tiny_model import write_tiny_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model")


def edit(folder, name, changes):
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": -1.0}, "must give rope_theta as a number greater than 0, got -1.0"),
        ({"rope_theta": float("nan")}, "must give rope_theta as a finite number"),
        ({"head_dim": "64"}, "must give head_dim as a valid integer, got '64'"),
        ({"num_hidden_layers": 10**8}, "must give num_hidden_layers as less than or equal to 1024"),
        ({"vocab_size": 10**12}, "must give vocab_size as less than"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"rope_scaling": {"rope_type": "bogus"}}, "must give rope_scaling.rope_type as"),
        ({"rope_scaling": {"type": "llama3"}}, "rope_type 'llama3' needs factor"),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}},
            "needs high_freq_factor",
        ),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "rope_scaling.factor as a valid number"),
        ({"rope_scaling": []}, "must give rope_scaling as"),
        ({"tie_word_embeddings": "yes"}, "must give tie_word_embeddings as a valid boolean"),
        ({"eos_token_id": "</s>"}, "must give eos_token_id"),
        ({"hidden_act": "gelu"}, "must give hidden_act as 'silu', got 'gelu'"),
    ],
)
def test_config(folder, changes, told):
    models.check_folder(folder)
    edit(folder, "config.json", changes)
    with pytest.raises(UserError) as caught:
        models.check_folder(folder)
    assert told in str(caught.value) and str(folder / "config.json") in str(caught.value)


def test_angles_as_transformers_5_writes_them_are_refused(folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["rope_parameters"] = {"rope_type": "default", "rope_theta": content.pop("rope_theta")}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="a field of transformers 5; write its rope_theta"):
        models.check_folder(folder)


def test_the_families_whose_head_is_tied_where_nothing_says_so():
    """As transformers' classes of configurations have it."""
    tied = {
        kind
        for kind, form in schema.FORMS.items()
        if form.model_fields["tie_word_embeddings"].default
    }
    assert tied == {"gemma2", "gemma3_text", "smollm3"}


@pytest.mark.parametrize(
    "changes",
    [{"temperature": "hot"}, {"top_k": 2.5}, {"eos_token_id": ["x"]}, {"do_sample": "perhaps"}],
)
def test_generation_settings(folder, changes):
    edit(folder, "generation_config.json", changes)
    with pytest.raises(UserError, match=f"generation_config.json must give {next(iter(changes))}"):
        models.check_folder(folder)


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "", "[]", '{"model_type": "llama"'],
    ids=["deep list", "empty", "list", "cut short"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_text_that_is_no_object(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=name):
        models.check_folder(folder)


ENTRY = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    "header",
    [
        [], "text", 5, {"x": []}, {"x": "y"}, {"x": {}}, {"x": ENTRY | {"shape": "1"}},
        {"x": ENTRY | {"shape": [-1]}}, {"x": {k: v for k, v in ENTRY.items() if k != "shape"}},
        {"x": {k: v for k, v in ENTRY.items() if k != "data_offsets"}},
        {"x": ENTRY | {"data_offsets": [0]}}, {"x": ENTRY | {"data_offsets": [0, 10**30]}},
    ],
)  # fmt: skip
def test_safetensors_headers(folder, header):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"00")
    with pytest.raises(UserError, match="model.safetensors"):
        models.check_folder(folder)


def test_a_deeply_nested_safetensors_header(folder):
    text = b'{"a":' * 50_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(UserError, match="model.safetensors"):
        models.check_folder(folder)


def test_a_pipe_is_not_waited_for(folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="regular file"):
        prompts.read_prompt_file(pipe)
    with pytest.raises(UserError, match="not a regular file"):
        schema.read_json(pipe)


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}",
     "{{ raise_exception('no') }}", "{% for i in range(10**9) %}x{% endfor %}",
     "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
     "{{ 'many' * 10**11 }}"],
)  # fmt: skip
def test_chat_templates_that_cannot_be_applied(template, folder, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 1)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template .*--raw"):
        prompts.encode(tokenizer, ["hello"], raw=False)
    assert prompts.encode(tokenizer, ["hello"], raw=True)


@pytest.mark.parametrize(
    ("name", "told"), [("other", "is a file, expected .* or OWNER/NAME"), (None, "not exist")]
)
def test_what_is_no_folder_is_told_apart(name, told, tmp_path):
    path = tmp_path / (name or "nothing")
    if name is not None:
        path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=told):
        models.check_folder(path)
