"""What the gateway accepts: OpenAI's and Mem0's request bodies. What is not known is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from inferscale.config import Sampling

CHAT_TOKENS = 512
COMPLETION_TOKENS = 16
"""OpenAI's own default for completions."""

Owner = Annotated[str, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=0)]

HARMLESS = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier"}
"""Fields of OpenAI's that change nothing here."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields of OpenAI's that are accepted with the values that ask for nothing."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class MemoryOptions(_Body):
    """How an answer uses memories."""

    top_k: Count | None = None
    mode: Literal["inject", "text", "off"] = "inject"
    hot: Count | None = None
    add: bool = False
    agent_id: Owner | None = None
    run_id: Owner | None = None


class StreamOptions(_Body):
    """OpenAI's."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Ask(_Body):
    """What chat and completion requests share."""

    model: str
    user: Owner | None = None
    memory: MemoryOptions = Field(default_factory=MemoryOptions)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, given in value.items():
            if name in NEUTRAL and given is not None and given not in NEUTRAL[name]:
                raise ValueError(f"{name} is not supported here; leave it out.")
            if name not in NEUTRAL and name not in HARMLESS:
                kept[name] = given
        return kept

    @property
    def owners(self) -> dict[str, str]:
        """user_id, agent_id and run_id, as far as they are given."""
        given = {"user_id": self.user, "agent_id": self.memory.agent_id, "run_id": self.memory.run_id}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `Memory.stream`. Without an owner there is nothing to remember: mode "off"."""
        mode = self.memory.mode if self.owners else "off"
        return {"mode": mode, "top_k": self.memory.top_k, "hot": self.memory.hot, **self.owners}

    @property
    def wants_usage(self) -> bool:
        """True if a stream shall end with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, default_tokens: int) -> Sampling:
        """How to decode; OpenAI's defaults."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_tokens=self.max_tokens or default_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            seed=self.seed,
            stop=tuple(text for text in stop if text),
        )


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None

    @property
    def shown(self) -> dict[str, str]:
        """Role and text as `Memory` takes them."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(_Ask):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self


class CompletionBody(_Ask):
    """POST /v1/completions; one prompt, as text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class Owners(_Body):
    """Whose memories; in a query string."""

    user_id: Owner | None = None
    agent_id: Owner | None = None
    run_id: Owner | None = None

    @property
    def given(self) -> dict[str, str | None]:
        """As keywords."""
        return {"user_id": self.user_id, "agent_id": self.agent_id, "run_id": self.run_id}


class ListQuery(Owners):
    """GET /memories."""

    model_config = ConfigDict(strict=False)  # a query string's values are all text

    top_k: Count | None = None


class AddBody(Owners):
    """POST /memories."""

    messages: str | dict[str, Any] | list[dict[str, Any]]
    metadata: dict[str, Any] | None = None
    infer: bool = True
    timestamp: str | None = None


class SearchBody(Owners):
    """POST /search."""

    query: str
    filters: dict[str, Any] | None = None
    top_k: Count | None = None
    threshold: float | None = None


class UpdateBody(_Body):
    """PUT /memories/{id}; `data` is Mem0's older name for `text`."""

    text: str | None = None
    data: str | None = None
    metadata: dict[str, Any] | None = None
