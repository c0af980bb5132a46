"""What the benchmarks of the whole path share: the demo conversation, remembered and encoded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from tqdm import tqdm

from inferscale import Engine, Memory, Scope
from inferscale.facts.locomo import LocomoConversation, load_locomo

SCOPE = Scope(user="bench")


def conversation(path: Path | None = None) -> LocomoConversation:
    """The first conversation of a file in LoCoMo's shape; without one the packaged demo conversation."""
    return load_locomo(path or Path(str(files("inferscale") / "data" / "demo_conversation.json")))[0]


def remembered(engine: Engine, store: Path, talk: LocomoConversation, wanted: int, users: Sequence[str] = ()) -> Memory:
    """An open memory of the conversation's first `wanted` facts, all of them with KV.

    With `users` each of them has the facts as memories of their own, which say their name.
    """
    memory = Memory(engine, store)
    turns = {turn.id: turn for turn in talk.turns}
    facts = [(turns.get(fact.turn_id) if fact.turn_id else None, fact.text) for fact in talk.facts[:wanted]]
    for user in users:
        memory.add_facts([(turn, f"{user}: {text}") for turn, text in facts], Scope(user=user))
    if not users:
        memory.add_facts(facts, SCOPE)
    with tqdm(total=len(facts) * max(1, len(users)), desc="encoding", unit="fact", leave=False) as bar:
        progress = memory.flush(on_progress=lambda done: bar.update(done.encoded - bar.n))
    if progress.failed:
        raise SystemExit(f"{len(progress.failed)} facts could not be encoded: {next(iter(progress.failed.values()))}")
    return memory
