"""One chunk as one safetensors file: names, header, checksum.

The file is plain safetensors (https://github.com/huggingface/safetensors#format), so any tool opens
it. It is written and read here rather than through the library for three things the library's API
does not give: the checksum covers the header too, one descriptor serves both the check and the use,
and the header has a fixed size, so a file's token count follows from its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from urllib.parse import quote, unquote

import torch
import xxhash

from inferscale.core import ChunkKey, ChunkKV, FactId, RecipeId, ScopeId, token_digest
from inferscale.errors import InvalidInput

FORMAT = "inferscale.kv.1"
SUFFIX = ".safetensors"
HEADER_BYTES = 1024  # length field and JSON together; a multiple of 64, so tensors are aligned
MAX_NAME = 120  # characters of one quoted part of a key; keeps names under 255 and the header under 1024
TOKEN_ID_BYTES = 8

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{32})"')
_NO_CHECKSUM = "0" * 32


class DamagedChunk(Exception):
    """A file is not the chunk its name promises; never leaves this package."""


def safe_name(part: str) -> str:
    """`part` as a file name that cannot leave its folder: percent-quoted, reversible with `unquote`."""
    try:
        name = quote(part, safe="").replace(".", "%2E").replace("~", "%7E")
    except UnicodeEncodeError:
        raise InvalidInput("An id is not valid Unicode; pass text without lone surrogates.") from None
    if not 0 < len(name) <= MAX_NAME:
        raise InvalidInput(f"An id must have 1 to {MAX_NAME} characters once quoted, got {len(name)}.")
    return name


def relative_path(key: ChunkKey) -> str:
    """<recipe>/<scope[:2]>/<scope>/<fact>.<tokens>.safetensors"""
    return f"{scope_path(safe_name(key.recipe), key.scope)}/{safe_name(key.fact)}.{safe_name(key.tokens)}{SUFFIX}"


def scope_path(recipe: str, scope: ScopeId) -> str:
    """The folder of one scope below a recipe's folder; two hex digits spread the scopes over 256 folders."""
    name = safe_name(scope)
    return f"{recipe}/{name[:2]}/{name}"


def parse_key(recipe: str, scope: str, file: str) -> ChunkKey | None:
    """The key that a path's parts name, or None for a file of another kind."""
    parts = file.removesuffix(SUFFIX).split(".")
    if not file.endswith(SUFFIX) or len(parts) != 2:
        return None
    return ChunkKey(ScopeId(unquote(scope)), FactId(unquote(parts[0])), RecipeId(unquote(recipe)), unquote(parts[1]))


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape [layers, n, kv_heads, head_dim] of keys and of values, and their dtype's safetensors name."""

    shape: tuple[int, int, int, int]
    dtype: str

    @property
    def token_bytes(self) -> int:
        """File bytes of one token: keys, values and its id."""
        layers, _, kv_heads, head_dim = self.shape
        return 2 * layers * kv_heads * head_dim * _DTYPES[self.dtype].itemsize + TOKEN_ID_BYTES

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return HEADER_BYTES + self.shape[1] * self.token_bytes


def header(key: ChunkKey, geometry: Geometry, checksum: str = _NO_CHECKSUM) -> bytes:
    """The first HEADER_BYTES of the file: a function of key, geometry and checksum alone."""
    tokens = geometry.shape[1]
    ids = TOKEN_ID_BYTES * tokens
    half = (geometry.file_bytes - HEADER_BYTES - ids) // 2
    tensor = {"dtype": geometry.dtype, "shape": list(geometry.shape)}
    value = {
        "__metadata__": {
            "format": FORMAT,
            "checksum": checksum,
            "recipe": safe_name(key.recipe),
            "scope": safe_name(key.scope),
            "fact": safe_name(key.fact),
            "tokens": safe_name(key.tokens),
        },
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ids]},
        "keys": {**tensor, "data_offsets": [ids, ids + half]},
        "values": {**tensor, "data_offsets": [ids + half, ids + 2 * half]},
    }
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    size = HEADER_BYTES - 8
    assert len(text) <= size
    return size.to_bytes(8, "little") + text.ljust(size)


def pack(key: ChunkKey, kv: ChunkKV) -> tuple[Sequence[memoryview], int]:
    """The file of one chunk as buffers to write in order (tensors are not copied), and its length in bytes."""
    layers, tokens, kv_heads, head_dim = kv.keys.shape
    geometry = Geometry((layers, tokens, kv_heads, head_dim), _DTYPE_NAMES[kv.keys.dtype])
    data = [_bytes_of(torch.tensor(kv.token_ids, dtype=torch.int64)), _bytes_of(kv.keys), _bytes_of(kv.values)]
    state = xxhash.xxh3_128(header(key, geometry))
    for part in data:
        state.update(part)
    return [memoryview(header(key, geometry, state.hexdigest())), *data], geometry.file_bytes


def unpack(key: ChunkKey, buffer: mmap | bytearray) -> ChunkKV:
    """The chunk in `buffer`, sharing its memory, after every byte was checked; raises DamagedChunk."""
    head = bytes(buffer[:HEADER_BYTES])
    _verify_checksum(head, buffer)
    geometry = read_geometry(head)
    # The header is a function of the key and the geometry: one comparison checks recipe, owner, layout.
    checksum = _CHECKSUM.findall(head)[0].decode()
    if head != header(key, geometry, checksum) or len(buffer) != geometry.file_bytes:
        raise DamagedChunk("it belongs to another key")
    shape, tokens = geometry.shape, geometry.shape[1]
    dtype, count = _DTYPES[geometry.dtype], shape[0] * shape[1] * shape[2] * shape[3]
    start = HEADER_BYTES + TOKEN_ID_BYTES * tokens
    ids = torch.frombuffer(buffer, dtype=torch.int64, count=tokens, offset=HEADER_BYTES)
    keys = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
    values = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + count * dtype.itemsize)
    token_ids = tuple(ids.tolist())
    if token_digest(token_ids) != key.tokens:
        raise DamagedChunk("its token ids are not those its key names")
    return ChunkKV(token_ids, keys.view(shape), values.view(shape))


def read_geometry(head: bytes) -> Geometry:
    """Shape and dtype from the first HEADER_BYTES of a file; raises DamagedChunk."""
    try:
        entry = json.loads(head[8:])["keys"]
        layers, tokens, kv_heads, head_dim = (int(size) for size in entry["shape"])
        geometry = Geometry((layers, tokens, kv_heads, head_dim), str(entry["dtype"]))
    except (ValueError, KeyError, TypeError):
        raise DamagedChunk("its header cannot be read") from None
    if min(geometry.shape) < 1 or geometry.dtype not in _DTYPES:
        raise DamagedChunk("its header cannot be read")
    return geometry


def read_checksum(head: bytes) -> str:
    """32 hex digits that name the file's contents, from its first HEADER_BYTES; raises DamagedChunk."""
    return _find_checksum(head).group(1).decode()


def _find_checksum(head: bytes) -> re.Match[bytes]:
    match = _CHECKSUM.search(head)
    if len(head) < HEADER_BYTES or match is None:
        raise DamagedChunk("its header cannot be read")
    return match


def _verify_checksum(head: bytes, buffer: mmap | bytearray) -> None:
    match = _find_checksum(head)
    state = xxhash.xxh3_128(head[: match.start(1)] + _NO_CHECKSUM.encode() + head[match.end(1) :])
    with memoryview(buffer) as view, view[HEADER_BYTES:] as data:
        state.update(data)
    if state.hexdigest() != match.group(1).decode():
        raise DamagedChunk("its checksum does not match")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
