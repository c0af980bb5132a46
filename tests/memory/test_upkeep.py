"""KV is made in the background, follows every edit, and never outlives what it was made from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferscale import EncodeConfig, Memory, MemoryConfig, Sampling
from inferscale.core import Scope
from inferscale.encode import EncodeJob
from inferscale.encode.base import Encoded, Encoder, TokenIds
from inferscale.engine import Message
from inferscale.engine.transformers import TransformersEngine
from inferscale.errors import StoreFull, StoreMismatch

FACTS = ["Rex is a collie.", "Rex likes swimming.", "Rex is three.", "Tom owns Rex.", "Tom bakes.", "Ana plays cello."]
SHORT = Sampling(max_tokens=4)


def fill(memory: Memory, facts: Sequence[str] = FACTS, user: str = "alice") -> list[str]:
    return [memory.add(fact, user_id=user, infer=False)["results"][0]["id"] for fact in facts]


def chunk_files(memory: Memory) -> list[Path]:
    return sorted((memory.path / "kv").rglob("*.safetensors"))


def test_after_flush_every_memory_is_injected(memory: Memory) -> None:
    fill(memory)
    progress = memory.flush(60)
    assert (progress.waiting, progress.failed) == (0, {})
    reply = memory.chat("What does Rex like?", user_id="alice", sampling=SHORT)
    assert (reply.fallback, reply.text_memories, len(reply.memories)) == (None, 0, 6)
    assert reply.injected_tokens == reply.prompt_tokens - len(
        memory.engine.prompt.layout([Message("user", "What does Rex like?")])[1]
    )


def test_memories_without_kv_are_answered_from_as_text_and_get_kv_afterwards(memory: Memory) -> None:
    fill(memory)
    memory.flush(60)
    for file in chunk_files(memory):
        file.unlink()
    memory._store.chunks.clear()
    reply = memory.chat("What does Rex like?", user_id="alice", sampling=SHORT)
    assert (reply.fallback, reply.text_memories) == (None, 6)
    assert reply.prompt_tokens > reply.injected_tokens > 0  # the header is always there
    memory.flush(60)
    assert memory.chat("What does Rex like?", user_id="alice", sampling=SHORT).text_memories == 0


def test_modes_use_the_very_same_prompt(memory: Memory) -> None:
    fill(memory)
    memory.flush(60)
    replies = {
        m: memory.chat("Who owns Rex?", user_id="alice", mode=m, sampling=SHORT) for m in ("inject", "text", "off")
    }
    assert replies["inject"].prompt_tokens == replies["text"].prompt_tokens > replies["off"].prompt_tokens
    assert replies["text"].injected_tokens == replies["off"].injected_tokens == 0
    assert [m["memory"] for m in replies["inject"].memories] == [m["memory"] for m in replies["text"].memories]
    assert replies["off"].memories == []
    hot = memory.chat("Who owns Rex?", user_id="alice", hot=2, sampling=SHORT)
    assert hot.text_memories == 2
    assert hot.prompt_tokens == replies["inject"].prompt_tokens


def test_companions_are_the_nearest_facts_of_the_same_scope_only(open_memory: Any) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=2)))
    fill(memory, ["Rex is Bob's collie."], user="bob")
    ids = memory.add_facts([(None, fact) for fact in FACTS], Scope(user="alice"))
    memory.flush(60)
    sources = memory._store.catalog.sources(ids)
    assert all(len(found) == 2 and found <= set(ids) - {fact} for fact, found in sources.items())
    assert len(sources) == len(ids)


def test_companions_stand_closest_first_and_as_they_are_served(open_memory: Any) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=3)))
    seen: list[EncodeJob] = []

    class Watch(DeletesMeanwhile):
        def encode(self, jobs: Sequence[EncodeJob], turns: Sequence[TokenIds] = ()) -> Iterator[Encoded]:
            seen.extend(jobs)
            return self.encoder.encode(jobs, turns)

    memory._upkeep._encoder = Watch(memory._upkeep._encoder)
    ids = memory.add_facts([(None, fact) for fact in FACTS], Scope(user="alice"))
    memory.flush(60)
    text = dict(zip(ids, FACTS, strict=True))
    nearest = memory._index.similar(Scope(user="alice").id, ids, 3)
    lines = {memory.engine.prompt.fact_ids(f"- {fact}\n"): fact for fact in FACTS}
    for job, row in zip(seen, nearest, strict=True):
        assert [lines[companion] for companion in job.companions] == [text[other] for other, _ in row]


def test_new_facts_that_change_a_facts_companions_get_it_encoded_again(open_memory: Any) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=2)))
    (rex,) = fill(memory, FACTS[:1])
    memory.flush(60)
    assert memory._store.catalog.sources([rex]) == {}
    fill(memory, FACTS[1:])
    memory.flush(60)
    assert len(memory._store.catalog.sources([rex])[rex]) == 2


def test_deleting_a_fact_drops_and_remakes_the_kv_that_was_computed_from_it(open_memory: Any) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=5)))
    ids = fill(memory)
    memory.flush(60)
    before = {file.name: file.read_bytes() for file in chunk_files(memory)}
    memory.delete(ids[0])
    memory.flush(60)
    after = {file.name: file.read_bytes() for file in chunk_files(memory)}
    assert len(after) == len(before) - 1
    assert all(before[name] != after[name] for name in after), "every other fact had it as a companion"
    assert not any(ids[0] in found for found in memory._store.catalog.sources(ids).values())


def test_updating_a_fact_remakes_its_kv_and_that_of_facts_computed_from_it(open_memory: Any) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=5)))
    ids = fill(memory)
    memory.flush(60)
    before = {file.read_bytes() for file in chunk_files(memory)}
    memory.update(ids[0], "Rex is a poodle.")
    memory.flush(60)
    after = {file.read_bytes() for file in chunk_files(memory)}
    assert len(after) == len(before)
    assert not before & after


class DeletesMeanwhile(Encoder):
    """The real encoder, with a hook between a fact's encoding and its publication."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.before_publish: Any = None

    def encode(self, jobs: Sequence[EncodeJob], turns: Sequence[TokenIds] = ()) -> Iterator[Encoded]:
        for step in self.encoder.encode(jobs, turns):
            if self.before_publish is not None:
                hook, self.before_publish = self.before_publish, None
                hook()
            yield step


@pytest.mark.parametrize("change", ["delete", "update"])
def test_kv_whose_source_changes_while_it_is_made_is_never_published(open_memory: Any, change: str) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=5)))
    hooked = DeletesMeanwhile(memory._upkeep._encoder)
    memory._upkeep._encoder = hooked
    scope = Scope(user="alice")
    done: list[str] = []

    def meanwhile() -> None:
        victim = memory.get_all(user_id="alice")["results"][-1]["id"]
        done.append(victim)
        memory.delete(victim) if change == "delete" else memory.update(victim, "Something else entirely.")

    hooked.before_publish = meanwhile
    ids = memory.add_facts([(None, fact) for fact in FACTS], scope)
    progress = memory.flush(60)
    assert progress.waiting == 0
    living = {item["id"]: item["memory"] for item in memory.get_all(user_id="alice")["results"]}
    sources = memory._store.catalog.sources(ids)
    assert set(sources) == set(living)
    assert all(found <= set(living) for found in sources.values())
    assert len(chunk_files(memory)) == len(living) == len(FACTS) - (change == "delete")


def test_forgetting_leaves_no_byte_of_text_or_kv(memory: Memory) -> None:
    secret = "Zanzibarquux is the passphrase."
    ids = fill(memory, [*FACTS, secret])
    memory.flush(60)
    chunk = next(f for f in chunk_files(memory) if f.name.startswith(ids[-1]) or ids[-1] in f.name)
    numbers = chunk.read_bytes()[-256:]
    memory.delete(ids[-1])
    memory.flush(60)
    memory.close()
    for file in memory.path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert b"Zanzibarquux" not in data, file
            assert numbers not in data, file


def test_a_flipped_byte_is_found_answered_around_and_repaired(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    fill(memory)
    memory.flush(60)
    memory._store.chunks._fast.clear()
    victim = chunk_files(memory)[2]
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(data)
    reply = memory.chat("What does Rex like?", user_id="alice", sampling=SHORT)
    expected = memory.chat("What does Rex like?", user_id="alice", mode="text", sampling=SHORT)
    assert (reply.fallback, reply.injected_tokens) == ("missing_chunk", 0)
    assert reply.text == expected.text
    assert any(record.name == "inferscale.store" for record in caplog.records)
    memory.flush(60)
    assert memory.chat("What does Rex like?", user_id="alice", sampling=SHORT).fallback is None


def test_a_store_of_another_recipe_is_refused_with_the_command_and_adopted_on_request(open_memory: Any) -> None:
    first = open_memory()
    fill(first)
    first.flush(60)
    first.close()
    other = MemoryConfig(encode=EncodeConfig(companions=1))
    with pytest.raises(StoreMismatch, match=r"inferscale encode --reencode --store"):
        open_memory(config=other)
    again = open_memory(config=other, reencode=True)
    again.flush(60)
    reply = again.chat("Who owns Rex?", user_id="alice", sampling=SHORT)
    assert (reply.text_memories, len(reply.memories)) == (0, 6)


def test_two_open_memories_see_each_others_changes(open_memory: Any) -> None:
    one, two = open_memory(), open_memory()
    ids = fill(one)
    assert len(two.search("Rex", user_id="alice", top_k=10)["results"]) == 6
    two.update(ids[0], "Rex became a physicist.")
    assert one.search("science", user_id="alice", top_k=1)["results"][0]["id"] == ids[0]
    one.delete(ids[1])
    assert ids[1] not in {item["id"] for item in two.search("swimming", user_id="alice", top_k=10)["results"]}
    two.reset()
    assert one.search("Rex", user_id="alice")["results"] == []


def test_forty_concurrent_adds_lose_nothing(memory: Memory) -> None:
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            memory.add(f"Fact {number} of many.", user_id=f"user{number % 3}", infer=False)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = [item for u in range(3) for item in memory.get_all(user_id=f"user{u}")["results"]]
    assert len(found) == 40


WRITER = """
import sys
from inferscale import Memory
from inferscale.decoder.transformers import load_tokenizer
from inferscale.engine.transformers import TransformersEngine
from inferscale.index.embed import SentenceTransformerEmbedder
from tests.tiny import tiny_decoder
model, encoder, store, name, count = sys.argv[1:]
tokenizer = load_tokenizer(model)
decoder = tiny_decoder("llama", "llama3", vocab_size=len(tokenizer), max_position_embeddings=512)
engine = TransformersEngine(decoder, tokenizer)
with Memory(engine, store, embedder=SentenceTransformerEmbedder(encoder, name="all-minilm-l6-v2")) as memory:
    for number in range(int(count)):
        (result,) = memory.add(f"{name} says {number}.", user_id="alice", infer=False)["results"]
        print(result["id"], flush=True)
    memory.flush()
"""


def writer(model: Path, encoder: Path, store: Path, name: str, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(model), str(encoder), str(store), name, str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
    )


def test_two_processes_write_at_once_and_lose_nothing(
    open_memory: Any, tmp_path: Path, model_path: Path, encoder_path: Path
) -> None:
    store = tmp_path / "store"
    processes = [writer(model_path, encoder_path, store, name, 20) for name in ("one", "two")]
    acknowledged = {line for process in processes for line in process.communicate(timeout=120)[0].split()}
    assert [process.returncode for process in processes] == [0, 0]
    memory = open_memory(store)
    assert {item["id"] for item in memory.get_all(user_id="alice")["results"]} == acknowledged
    assert len(acknowledged) == 40
    assert memory.flush(60).waiting == 0
    assert len(chunk_files(memory)) == 40


def test_a_killed_process_loses_no_acknowledged_memory_and_encoding_resumes(
    open_memory: Any, tmp_path: Path, model_path: Path, encoder_path: Path
) -> None:
    store = tmp_path / "store"
    with writer(model_path, encoder_path, store, "victim", 500) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(15)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().split()[:-1]  # the last line may be cut
    memory = open_memory(store)
    found = {item["id"] for item in memory.get_all(user_id="alice")["results"]}
    assert set(acknowledged) <= found
    assert memory.flush(60).waiting == 0
    assert len(chunk_files(memory)) == len(found)
    reply = memory.chat("What does the victim say?", user_id="alice", top_k=10, sampling=SHORT)
    assert (reply.fallback, reply.text_memories) == (None, 0)


def add_until_it_fails(memory: Memory, kept: list[str]) -> None:
    for number in range(4000):
        (result,) = memory.add(f"Fact {number} " + "x" * 300, user_id="a", infer=False)["results"]
        kept.append(result["id"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_clear_error_and_nothing_acknowledged_is_lost(
    tmp_path: Path, tiny_engine: TransformersEngine, embedder: Any
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        kept: list[str] = []
        with Memory(tiny_engine, disk / "store", embedder=embedder) as memory:
            with pytest.raises(StoreFull) as caught:
                add_until_it_fails(memory, kept)
            assert "\n" not in str(caught.value)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        with Memory(tiny_engine, disk / "store", embedder=embedder) as memory:
            assert [item["id"] for item in memory.get_all(user_id="a")["results"]] == kept
            memory.add("There is room again.", user_id="a", infer=False)
            assert memory.flush(120).waiting == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_two_memories_share_an_engine(open_memory: Any, tmp_path: Path) -> None:
    one, two = open_memory(tmp_path / "one"), open_memory(tmp_path / "two")
    for memory in (one, two):
        fill(memory)
        memory.flush(60)
    for memory in (one, two):
        reply = memory.chat("Who owns Rex?", user_id="alice", sampling=SHORT)
        assert (reply.fallback, reply.text_memories) == (None, 0)


def test_one_fact_that_cannot_be_encoded_leaves_the_others_alone(open_memory: Any) -> None:
    class Refuses(DeletesMeanwhile):
        def encode(self, jobs: Sequence[EncodeJob], turns: Sequence[TokenIds] = ()) -> Iterator[Encoded]:
            if any(job.fact == bad for job in jobs):
                raise RuntimeError("no such kernel")
            return self.encoder.encode(jobs, turns)

    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=0)))
    bad = memory.engine.prompt.fact_ids("- Rex is three.\n")
    memory._upkeep._encoder = Refuses(memory._upkeep._encoder)
    ids = memory.add_facts([(None, fact) for fact in FACTS], Scope(user="alice"))
    progress = memory.flush(60)
    assert list(progress.failed) == [ids[FACTS.index("Rex is three.")]]
    assert "no such kernel" in next(iter(progress.failed.values()))
    assert (progress.encoded, len(chunk_files(memory))) == (5, 5)
    memory.delete(ids[FACTS.index("Rex is three.")])
    assert memory.flush(60).failed == {}


def test_sources_of_a_chunk_that_failed_to_be_replaced_still_count(
    open_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory(config=MemoryConfig(encode=EncodeConfig(companions=1, refresh_below=1.0)))
    scope = Scope(user="alice")
    a, b = memory.add_facts([(None, "Rex is a collie."), (None, "The weather is fine.")], scope)
    memory.flush(60)
    assert memory._store.catalog.sources([a]) == {a: {b}}

    def full(items: object) -> None:
        raise StoreFull("The disk is full.")

    monkeypatch.setattr(memory._store.chunks, "put_many", full)
    memory.add_facts([(None, "Rex is a young collie.")], scope)  # nearer to a than b is
    memory.flush(60)
    monkeypatch.undo()
    memory.delete(b)
    assert not any(a in file.name for file in chunk_files(memory)), "a's chunk was computed from b"
    memory.flush(60)
    assert b not in memory._store.catalog.sources([a])[a]


def test_another_process_drops_kv_from_memory_when_what_it_was_made_from_is_forgotten(open_memory: Any) -> None:
    config = MemoryConfig(encode=EncodeConfig(companions=5))
    one, two = open_memory(config=config), open_memory(config=config)
    ids = fill(one)
    one.flush(60)
    two.chat("Who owns Rex?", user_id="alice", sampling=SHORT)
    assert len(list(two._store.chunks._fast.keys())) == 6
    one.delete(ids[0])
    one.flush(60)
    two.search("Rex", user_id="alice")
    assert list(two._store.chunks._fast.keys()) == []


def test_a_store_adopted_by_another_embedder_is_refused_by_whoever_has_it_open(
    open_memory: Any, embedder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(type(embedder)):  # type: ignore[misc]
        fingerprint = "another"

    other = Other(embedder.path)
    one = open_memory()
    fill(one)
    two = open_memory(embedder=other, reencode=True)
    for call in (lambda: one.search("Rex", user_id="alice"), lambda: one.add("New.", user_id="alice", infer=False)):
        with pytest.raises(StoreMismatch, match="Another process adopted this store"):
            call()
    assert len(two.search("Rex", user_id="alice")["results"]) == 6


def test_with_streamed_windows_a_forgotten_turn_takes_everything_that_saw_it_along(open_memory: Any) -> None:
    config = MemoryConfig(encode=EncodeConfig(companions=0, window=1, mode="streaming"))
    memory = open_memory(config=config)
    messages = [{"role": "user", "content": f"Sentence number {n} here."} for n in range(6)]
    ids = [result["id"] for result in memory.add(messages, user_id="alice")["results"]]
    memory.flush(60)
    before = {file.name: file.read_bytes() for file in chunk_files(memory)}
    memory.delete(ids[0])
    memory.flush(60)
    after = {file.name: file.read_bytes() for file in chunk_files(memory)}
    assert len(after) == 5
    assert all(before[name] != after[name] for name in after), "each had seen turn 0, if only through other turns"


def test_history_is_json(memory: Memory) -> None:
    (rex, *_) = fill(memory)
    assert json.loads(json.dumps(memory.history(rex)))[0]["new_memory"] == FACTS[0]
