"""What the gateway counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferscale.answer import Reply
from inferscale.serve.gate import Gate

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """One gateway's metrics, in a registry of their own."""

    def __init__(self, answers: Gate, memories: Gate, healthy: Callable[[], bool]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "inferscale_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self._first_token = Histogram(
            "inferscale_first_token_seconds",
            "From the slot to the first token, by mode.",
            ["mode"],
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "inferscale_tokens", "Tokens by kind: prompt, injected (a part of prompt), completion.", ["kind"],
            registry=registry,
        )  # fmt: skip
        self._fallbacks = Counter(
            "inferscale_fallbacks",
            "Answers whose plan was prefilled, by reason.",
            ["reason"],
            registry=registry,
        )
        self.remembered = Counter(
            "inferscale_remembered", "Turns remembered after an answer, by outcome.", ["outcome"], registry=registry
        )
        for name, gate in (("answers", answers), ("memories", memories)):
            self._gauge(f"inferscale_{name}_busy", f"Requests to {name} in work.", partial(getattr, gate, "busy"))
            self._gauge(f"inferscale_{name}_waiting", f"Requests to {name} waiting.", partial(getattr, gate, "waiting"))
        self._gauge("inferscale_up", "1 if requests can be answered.", lambda: float(healthy()))

    def answered(self, reply: Reply) -> None:
        """Count a finished answer."""
        self._first_token.labels(reply.mode).observe(reply.timings["first_token"])
        self._tokens.labels("prompt").inc(reply.prompt_tokens)
        self._tokens.labels("injected").inc(reply.injected_tokens)
        self._tokens.labels("completion").inc(reply.completion_tokens)
        if reply.fallback is not None:
            self._fallbacks.labels(reply.fallback).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(name, meaning, registry=self.registry).set_function(value)


class CountRequests:
    """ASGI middleware: counts every answer by its route (never by its path: those hold ids) and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
