"""Forms of OpenAI's requests, with the fields that this server takes or refuses by name. Field
names and limits: OpenAI's API reference, Completions and Chat. A field that changes the answer is
supported or refused; fields with their neutral value are taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic import model_validator as validator

from neuron_cpu.console.arguments import table
from neuron_cpu.errors import nearest

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
# what a field takes
_EXAMPLES = table(
    """
model: "model": "ID", as GET /v1/models lists it
prompt: "prompt": "Name the capital of Japan."
messages: "messages": [{"role": "user", "content": "Name the capital of Japan."}]
max_tokens: "max_tokens": 16
max_completion_tokens: "max_completion_tokens": 16
temperature: "temperature": 0.7
top_p: "top_p": 0.9
n: "n": 1
stream: "stream": true
stream_options: "stream_options": {"include_usage": true}
stop: "stop": ["."]
seed: "seed": 0
user: "user": "me"
"""
)
# what to write for other servers' names of a field
_MEANT = table(
    """
write max_tokens: max_new_tokens max_length max_output_tokens num_predict n_predict
write prompt, or messages for a chat: inputs input text query question message conversation history
write n: num_return_sequences num_completions num_samples
write stop: stop_sequences stop_strings stop_words
write temperature: temp t
leave it out: top_k min_p repetition_penalty length_penalty do_sample ignore_eos
POST it to /v1/completions: prompt
POST it to /v1/chat/completions: messages
"""
)
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, StringConstraints(min_length=1)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(_Form):
    include_usage: bool = False


class _Request(_Form):
    """The fields of both kinds of requests."""

    model: str = ""  # the server's own
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


def told(error: ValidationError, form: type[BaseModel]) -> tuple[str, str | None]:
    """The first thing that is wrong, in one sentence, and the parameter's name.

    The value is not repeated: it may be anything.
    """
    every = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(every, key=lambda one: one["type"] != "extra_forbidden")
    place = [part for part in first["loc"] if isinstance(part, str)]
    name = place[0] if place and place[0].isidentifier() and len(place[0]) < 64 else None
    said = first["msg"].removeprefix("Value error, ")
    unsupported = said.partition(" ")[0]
    if unsupported in _NEUTRAL:
        return f"{said}.", unsupported
    own = "prompt" if "prompt" in form.model_fields else "messages"
    mend = f"write {_EXAMPLES.get(name or own, _EXAMPLES[own])}"
    if first["type"] == "extra_forbidden" and name and not place[1:]:
        meant = (one for one, words in _MEANT.items() if name in words.split())
        mend = next(meant, "") or nearest(name, form.model_fields, "leave it out")
        said = "this path has no such parameter"
    return (
        f"{name}: {said[0].lower()}{said[1:]}; {mend}." if name else f"{said}; {mend}, in {{}}.",
        name,
    )
