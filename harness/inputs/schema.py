"""The forms of files from elsewhere, such as config.json, checked once on reading.

Absurd sizes are refused here. The limits are far beyond every published Llama, and low enough that
shapes alone cost no time or memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import UserError

MOST_JSON_BYTES = 1 << 26

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = TokenId | list[TokenId] | None


class _Form(BaseModel):
    """Numbers have to be numbers; fields without a name here may be anything."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class RopeScaling(_Form):
    """`rope_scaling` of config.json; transformers 4.45 and before call its type `type`."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = Field(
        "default", alias="rope_type"
    )
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "type" in values and "rope_type" not in values:
            return values | {"rope_type": values["type"]}
        return values

    @model_validator(mode="after")
    def _whole(self) -> RopeScaling:
        """Llama 3.1's scaling needs all four; the others a factor."""
        needed = {"linear": 1, "dynamic": 1, "yarn": 1, "llama3": 4}.get(self.rope_type, 0)
        names = ("factor", "low_freq_factor", "high_freq_factor")
        for name in (*names, "original_max_position_embeddings")[:needed]:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs {name}")
        return self


class LlamaConfig(_Form):
    """config.json of a Llama."""

    since: ClassVar[tuple[int, ...]] = (4, 45)  # the first release of transformers that has it

    hidden_size: int = Field(ge=1, le=2**18)
    intermediate_size: int = Field(ge=1, le=2**20)
    num_attention_heads: int = Field(ge=1, le=2**12)
    num_key_value_heads: int = Field(ge=1, le=2**12)
    num_hidden_layers: int = Field(ge=1, le=2**10)
    vocab_size: int = Field(ge=1, le=2**24)
    rms_norm_eps: Positive
    head_dim: int | None = Field(None, ge=1, le=2**12)
    max_position_embeddings: int | None = Field(None, ge=1, lt=2**31)
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_parameters: Any = None  # transformers 5 writes both of them so
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    torch_dtype: str | None = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _heads_fit(self) -> LlamaConfig:
        if self.rope_parameters is not None and "rope_theta" not in self.model_fields_set:
            raise ValueError(
                "rope_parameters is a field of transformers 5; write its rope_theta, and what else "
                "it holds as rope_scaling, in a copy of the folder"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size "
                f"{self.hidden_size}, and there is no head_dim"
            )
        return self


class Qwen3MoeConfig(LlamaConfig):
    """config.json of a Qwen3 with experts in every layer."""

    num_experts: int = Field(ge=1, le=2**10)
    num_experts_per_tok: int = Field(ge=1, le=2**10)
    moe_intermediate_size: int = Field(ge=1, le=2**20)
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = Field(None, max_length=0)
    decoder_sparse_step: Literal[1] = 1
    use_sliding_window: Literal[False] = False

    @model_validator(mode="after")
    def _experts_fit(self) -> Qwen3MoeConfig:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is above num_experts "
                f"{self.num_experts}"
            )
        return self


class WindowedConfig(LlamaConfig):
    """config.json of a Mistral, or of a Qwen, where the window is a matter of its own."""

    sliding_window: int | None = Field(None, ge=1, lt=2**31)
    use_sliding_window: Literal[False] = False


class Gemma2Config(LlamaConfig):
    """config.json of a Gemma 2."""

    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    head_dim: int = Field(ge=1, le=2**12)
    tie_word_embeddings: bool = True
    sliding_window: int = Field(4096, ge=1, lt=2**31)
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


class Gemma3Config(Gemma2Config):
    """config.json of a Gemma 3 without images."""

    sliding_window_pattern: int = Field(6, ge=1)
    rope_local_base_freq: Positive = 10000.0


class GraniteConfig(LlamaConfig):
    """config.json of a Granite."""

    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


class Phi3Config(LlamaConfig):
    """config.json of a Phi-3 or Phi-4-mini."""

    sliding_window: int | None = Field(None, ge=1, lt=2**31)
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    original_max_position_embeddings: int = Field(4096, ge=1, lt=2**31)


class SmolLM3Config(LlamaConfig):
    """config.json of a SmolLM3: layers with a 0 here do not rotate."""

    since: ClassVar[tuple[int, ...]] = (4, 53)
    tie_word_embeddings: bool = True
    no_rope_layers: list[Literal[0, 1]] | None = None
    use_sliding_window: Literal[False] = False


# model_type -> its form
FORMS: dict[str, type[LlamaConfig]] = {
    "llama": LlamaConfig,
    "mistral": WindowedConfig,
    "qwen2": WindowedConfig,
    "qwen3": WindowedConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3Config,
    "granite": GraniteConfig,
    "olmo2": LlamaConfig,
    "phi3": Phi3Config,
    "smollm3": SmolLM3Config,
}
# model_type -> what makes it another model than these
OTHERS = {
    "gemma3": ", a model of text and images (one of text alone is gemma3_text)",
    "gpt2": ", which has LayerNorms with biases, learned positions and no gate in its MLP",
    "mixtral": ", whose experts have no kernels here (those of a qwen3_moe have)",
}


class Generation(_Form):
    """generation_config.json, fields that are numbers."""

    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: TokenIds = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Positive | None = None
    max_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object of a regular file; a UserError says why that fails."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError(f"it has more than {MOST_JSON_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"The model folder {path.parent} has no {path.name}; name {_inside(path)}."
        ) from error
    except RecursionError as error:
        raise UserError(
            f"Cannot read {path}: it is nested too deeply; download it again."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}; correct it or download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold one JSON object; download it again.")
    return content


def _inside(path: Path) -> str:
    """What to name in place of a folder without this file: one in it that has the file."""
    for below in ("*", "*/*"):
        for found in sorted(path.parent.glob(f"{below}/{path.name}")):
            return str(found.parent)
    if (path.parent / "adapter_config.json").is_file():
        return "its model's folder, and this one in --lora-ckpt-path mine:FOLDER"
    return "a folder of a model of Hugging Face, downloaded whole: neither GGUF nor Meta's own form"


def checked(path: Path, form: type[BaseModel], content: dict[str, Any]) -> None:
    """Refuse a file's content that has another form, naming the first field that is wrong."""
    try:
        form.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise UserError(f"{path} {first_problem(error)}; {_mend(error, content)}.") from error


def _mend(error: Exception, content: dict[str, Any]) -> str:
    """What to do about the first field that is wrong."""
    problem: Any = error.errors()[0] if isinstance(error, ValidationError) else {"type": ""}
    given = problem.get("input")
    if problem["type"] == "literal_error":
        other = ", or give this one a kernel with --mode swap"
        other *= not content.get("is_encoder_decoder")
        return f"other models have no kernels here: name one of these{other}"
    if isinstance(given, str) and given.replace(".", "", 1).isdecimal():
        return f"write {given} without quotes"
    return "take the file that came with the weights"


def first_problem(error: Exception) -> str:
    """`must give x as ..., got ...` for the first field that is wrong."""
    if not isinstance(error, ValidationError):
        return "is nested too deeply"
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    says = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"must give {where}"
    if not where or problem["type"] == "value_error":
        return f"is not whole: {says}"
    says = says.removeprefix("Input should be ").replace("greater than", "a number greater than")
    return f"must give {where} as {says}, got {shorten_value(problem['input'])}"


def shorten_value(value: Any) -> str:
    """A value from elsewhere in a few characters."""
    try:
        return repr(value)[:60]
    except (RecursionError, ValueError):  # a number of more digits than Python writes
        return "something that cannot be shown"
