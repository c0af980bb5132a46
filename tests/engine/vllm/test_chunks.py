"""How a worker reads chunks: verified, within its budget, and no longer than they exist."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inferscale.core import ChunkKey, ChunkKV, FactId, PlanChunk, RecipeId, Scope, token_digest
from inferscale.engine.vllm.chunks import ChunkReader, LayerKV, Shape
from inferscale.errors import PlanRejected
from inferscale.store import DiskStore
from inferscale.store.format import relative_path

LAYERS, HEADS, DIM = 3, 4, 8
SCOPE = Scope(user="alice").id


class Bench:
    """A store and a reader over it."""

    def __init__(self, root: Path, budget: int = 1 << 20, heads: slice = slice(0, HEADS)) -> None:
        self.store = DiskStore(root, budget_bytes=1 << 30)
        shape = Shape(LAYERS, HEADS, DIM, torch.float32, heads, torch.device("cpu"))
        self.reader = ChunkReader(root, shape, device_bytes=budget, host_bytes=0)
        self.kv: dict[ChunkKey, ChunkKV] = {}

    def put(self, tokens: tuple[int, ...]) -> PlanChunk:
        key = ChunkKey(SCOPE, FactId(f"f{len(self.kv)}"), RecipeId("r" * 64), token_digest(tokens))
        shape = (LAYERS, len(tokens), HEADS, DIM)
        self.kv[key] = ChunkKV(tokens, torch.randn(shape), torch.randn(shape))
        self.store.put_many([(key, self.kv[key])])
        return PlanChunk(key, 0, len(tokens))

    def path(self, chunk: PlanChunk) -> Path:
        return self.store.folder / relative_path(chunk.key)

    @property
    def kept(self) -> int:
        """Chunks on the device."""
        return len(self.reader._device._kept)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "kv")
    yield made
    made.reader.close()


def same(read: LayerKV, kv: ChunkKV, heads: slice = slice(0, HEADS)) -> bool:
    keys, values = torch.stack(read.keys), torch.stack(read.values)
    return torch.equal(keys, kv.keys[:, :, heads]) and torch.equal(values, kv.values[:, :, heads])


@pytest.mark.parametrize("heads", [slice(0, 4), slice(0, 2), slice(2, 4), slice(3, 4)])
def test_a_worker_reads_its_own_heads_of_every_chunk_in_order(tmp_path: Path, heads: slice) -> None:
    bench = Bench(tmp_path / "kv", heads=heads)
    chunks = [bench.put(tuple(range(1, n + 1))) for n in (5, 1, 17)]
    for wanted in (chunks, chunks[::-1], [chunks[0]] * 3):
        read = bench.reader.read(wanted)
        assert all(same(kv, bench.kv[chunk.key], heads) for kv, chunk in zip(read, wanted, strict=True))
    bench.reader.close()


def test_the_hot_chunks_stay_within_the_budget_and_the_coldest_leave(tmp_path: Path) -> None:
    chunk_bytes = 2 * LAYERS * 4 * HEADS * DIM * 4
    bench = Bench(tmp_path / "kv", budget=2 * chunk_bytes)
    a, b, c = (bench.put((n, 2, 3, 4)) for n in range(3))
    for chunk in (a, b, a, c):
        assert same(bench.reader.read([chunk])[0], bench.kv[chunk.key])
    assert set(bench.reader._device._kept) == {a.key, c.key}
    assert bench.reader._device._bytes == 2 * chunk_bytes
    bench.reader.close()


def test_a_reader_without_a_budget_keeps_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "kv", budget=0)
    chunk = bench.put((1, 2, 3))
    assert same(bench.reader.read([chunk])[0], bench.kv[chunk.key])
    assert bench.kept == 0
    bench.reader.close()


def test_a_deleted_chunk_is_never_read_again_and_leaves_memory_by_itself(bench: Bench) -> None:
    gone, stays = bench.put((1, 2, 3)), bench.put((4, 5, 6))
    bench.reader.read([gone, stays])
    bench.store.delete(SCOPE, gone.key.fact)
    with pytest.raises(PlanRejected) as error:
        bench.reader.read([stays, gone])
    assert error.value.reason == "missing_chunk"
    until = time.monotonic() + 10
    while bench.kept > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert set(bench.reader._device._kept) == {stays.key}


def test_a_chunk_that_was_made_again_is_read_again(bench: Bench) -> None:
    chunk = bench.put((1, 2, 3))
    bench.reader.read([chunk])
    old = bench.kv[chunk.key]
    made_again = ChunkKV(old.token_ids, old.keys + 1, old.values + 1)
    bench.store.put_many([(chunk.key, made_again)])
    assert same(bench.reader.read([chunk])[0], made_again)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
def test_a_damaged_file_is_never_injected(bench: Bench, damage: str, hot: bool) -> None:
    chunk, other = bench.put(tuple(range(40))), bench.put(tuple(range(1, 41)))
    if hot:
        bench.reader.read([chunk])
    path = bench.path(chunk)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-7] ^= 1
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "empty":
        content.clear()
    else:
        content = bytearray(bench.path(other).read_bytes())
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(PlanRejected):
        bench.reader.read([chunk])
    assert same(bench.reader.read([other])[0], bench.kv[other.key])


def test_a_file_cut_short_while_it_is_hot_hurts_nobody(bench: Bench) -> None:
    """What was read lies in memory of the worker's own: a mapped file that shrinks would kill it."""
    chunk = bench.put(tuple(range(2000)))
    (read,) = bench.reader.read([chunk])
    with bench.path(chunk).open("r+b") as file:
        file.truncate(10)
    assert same(read, bench.kv[chunk.key])


@pytest.mark.parametrize("length", [2, 4])
def test_a_chunk_of_another_length_than_planned_is_refused(bench: Bench, length: int) -> None:
    chunk = bench.put((1, 2, 3))
    with pytest.raises(PlanRejected) as error:
        bench.reader.read([PlanChunk(chunk.key, 0, length)])
    assert error.value.reason == "shape_mismatch"


@pytest.mark.parametrize("shape", [(LAYERS + 1, HEADS, DIM), (LAYERS, HEADS - 1, DIM), (LAYERS, HEADS, DIM * 2)])
def test_kv_of_another_model_is_refused(bench: Bench, shape: tuple[int, int, int]) -> None:
    layers, heads, dim = shape
    key = ChunkKey(SCOPE, FactId("other"), RecipeId("r" * 64), token_digest((1, 2)))
    kv = torch.zeros(layers, 2, heads, dim)
    bench.store.put_many([(key, ChunkKV((1, 2), kv, kv))])
    with pytest.raises(PlanRejected) as error:
        bench.reader.read([PlanChunk(key, 0, 2)])
    assert error.value.reason == "shape_mismatch"
