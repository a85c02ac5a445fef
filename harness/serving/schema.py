"""Forms of OpenAI's requests, with the fields that this server takes or refuses by name. Field
names and limits: OpenAI's API reference, Completions and Chat. A field that changes the answer is
supported or refused; fields with their neutral value are taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic import model_validator as validator

MOST_CHOICES = 8  # of one prompt
MOST_PROMPTS = 32  # of one request
MOST_MESSAGES = 1024
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
}
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, StringConstraints(min_length=1)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Form):
    include_usage: bool = False


class _Request(_Form):
    """The fields of both kinds of requests."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    user: str | None = None  # says who asks; nothing depends on it

    @validator(mode="before")
    @classmethod
    def _neutral(cls, data: Any) -> Any:
        """Drop fields that change nothing; refuse by name fields that this server does not
        support."""
        if not isinstance(data, dict):
            return data
        for name, harmless in _NEUTRAL.items():
            value = data.get(name)
            if value is not None and not any(value == known for known in harmless):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return {key: value for key, value in data.items() if key not in _NEUTRAL}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: (
        _Text
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[_Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[list[_Token], Field(min_length=1)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    max_tokens: int | None = Field(16, ge=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class Part(_Form):
    type: Literal["text"]
    text: str


class Message(_Form):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    def as_template_takes_it(self) -> dict[str, str]:
        """Role and text; "developer" is the newer name of "system"."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


def told(error: ValidationError) -> tuple[str, str | None]:
    """The first thing that is wrong, in one sentence, and the parameter's name.

    The value is not repeated: it may be anything.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = [part for part in first["loc"] if isinstance(part, str)]
    name = place[0] if place and place[0].isidentifier() and len(place[0]) < 64 else None
    said = first["msg"].removeprefix("Value error, ")
    unsupported = said.partition(" ")[0]
    if unsupported in _NEUTRAL:
        return f"{said}.", unsupported
    if first["type"] == "extra_forbidden":
        said = "this server has no such parameter; leave it out"
    said = said[0].lower() + said[1:] if name else said
    return (f"{name}: {said}." if name else f"{said}."), name
