"""kill -9: everything acknowledged is there afterwards, nothing half-written is visible."""

from __future__ import annotations

import random
import time
from pathlib import Path

from inferscale.config import StoreConfig
from inferscale.core import FactId
from inferscale.store import open_store
from tests.store.helpers import ALICE, all_bytes, item, raw, same, start

WRITER = """
import sys; from pathlib import Path
from inferscale.config import StoreConfig
from inferscale.core import Fact, FactId
from inferscale.store import open_store
from tests.store.helpers import ALICE, VECTOR, item
store = open_store(Path(sys.argv[1]), StoreConfig())
number = int(sys.argv[2])
while True:
    facts = [Fact(FactId(f"f{number + i}"), f"text {number + i}", ALICE) for i in range(3)]
    store.catalog.add_facts([(fact, VECTOR) for fact in facts])
    store.chunks.put_many([item(fact.id, n=40, seed=number + i) for i, fact in enumerate(facts)])
    number += 3
    print(number, flush=True)
"""


def test_acknowledged_writes_survive_kill_9_and_nothing_is_half_written(tmp_path: Path) -> None:
    rng, acknowledged = random.Random(1), 0
    for _ in range(3):
        writer = start(WRITER, str(tmp_path), str(acknowledged))
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 12)):
            acknowledged = int(writer.stdout.readline())
        time.sleep(rng.random() * 0.02)
        writer.kill()
        rest = writer.communicate()[0].split()
        acknowledged = max([acknowledged, *(int(line) for line in rest)])

        damaged: list[object] = []
        store = open_store(tmp_path, StoreConfig(), damaged.append)
        texts = {fact.id: fact.text for fact in store.catalog.list(ALICE)}
        expected = {f"f{number}": f"text {number}" for number in range(acknowledged)}
        assert expected.items() <= texts.items()
        assert len(texts) in (acknowledged, acknowledged + 3)
        found = store.chunks.get_many([item(f"f{number}", n=40)[0] for number in range(acknowledged)])
        assert all(same(kv, item("", n=40, seed=number)[1]) for number, kv in enumerate(found))
        every = list(store.chunks.keys())
        assert all(kv is not None for kv in store.chunks.get_many(every))
        assert damaged == []
        # What the killed process had begun is swept, wherever it was.
        assert [path.suffix for path in (tmp_path / "kv" / ".tmp").rglob("*") if path.is_file()] == [".lock"]
        for unacknowledged in range(acknowledged, acknowledged + 3):
            store.catalog.delete([FactId(f"f{unacknowledged}")])
            store.chunks.delete(ALICE.id, FactId(f"f{unacknowledged}"))
            assert raw(item("", n=40, seed=unacknowledged)[1].keys) not in all_bytes(tmp_path)
        store.close()
