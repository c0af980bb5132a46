"""Who is asking: API keys, each bound to one tenant."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path

from inferscale.core import Scope
from inferscale.errors import ConfigError, InvalidScope
from inferscale.serve.errors import ApiError

MIN_KEY_CHARS = 16
OPEN_TENANT = "default"


class ApiKeys:
    """The keys that are accepted. With none of them everybody is the tenant "default"."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """`tenants`: the tenant of each key. ConfigError for a short key or a malformed tenant."""
        for key, tenant in tenants.items():
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"An API key has {MIN_KEY_CHARS} or more printable ASCII characters and no space.")
            try:
                Scope(tenant=tenant, user="x")
            except InvalidScope as error:
                raise ConfigError(f"An API key's tenant cannot be used: {error}") from None
        # Digests: all of one length, so that comparing them tells nothing of a key, its length included.
        self._tenants = [(_digest(key), tenant) for key, tenant in tenants.items()]

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Keys from a JSON object {"<key>": "<tenant>"}. Raises ConfigError."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"The keys in {path} cannot be read ({error}).") from None
        if not isinstance(value, dict) or not value or not all(isinstance(tenant, str) for tenant in value.values()):
            raise ConfigError(f'{path} must hold a JSON object with a tenant for each key: {{"<key>": "acme"}}.')
        return cls(value)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of an Authorization header; ApiError 401 if its key is not known."""
        if not self._tenants:
            return OPEN_TENANT
        kind, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip()) if kind.lower() == "bearer" else _digest("")
        found = None
        for digest, tenant in self._tenants:  # all of them, whichever fits
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise ApiError(
                401, "The API key is missing or not known; send Authorization: Bearer <key>.", code="invalid_api_key"
            )
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
