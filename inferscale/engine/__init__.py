"""KV → MODEL."""

from inferscale.engine.base import Engine, Generation, GenerationStream, Request
from inferscale.engine.prompt import Message, PromptFormat

__all__ = ["Engine", "Generation", "GenerationStream", "Message", "PromptFormat", "Request"]
