"""The HTTP gateway: OpenAI's answers and Mem0's memories, in front of either engine."""

from __future__ import annotations

from inferscale.serve.app import create_app
from inferscale.serve.keys import ApiKeys
from inferscale.serve.run import listen, serve

__all__ = ["ApiKeys", "create_app", "listen", "serve"]
