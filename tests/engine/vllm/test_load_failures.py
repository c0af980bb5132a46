"""KV that is damaged or lost after its plan was published: the request is prefilled as text and says why."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from prometheus_client import REGISTRY

from inferscale.core import ChunkKey, ChunkKV, Plan, Scope
from inferscale.engine import Request
from inferscale.engine.vllm.plans import FOLDER, header_key
from inferscale.store.format import relative_path
from tests.engine.vllm.kit import CONFIG, Desk
from tests.engine.vllm.test_ahead import TOKENS, WRONG, Ahead

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    from vllm.v1.request import RequestStatus

LINES = [
    "- Rex is a collie who sleeps on the porch of the old farmhouse near the river.\n",
    "- Tom lives in Lisbon and works as a baker in a small shop behind the station.\n",
    "- Ana plays the cello every Sunday evening in a church that was built in 1701.\n",
    "- Mia was born in 1990 and keeps eleven bees' nests on the roof of her house.\n",
]
Act = Callable[[Plan], None]
Hook = Callable[[Act], None]


@pytest.fixture
def once_published(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Hook:
    """Does something after a plan was published and before vLLM hears of the request."""
    publish = desk.engine.publish

    def hook(act: Act) -> None:
        def published(request: Request, plan: Plan) -> str:
            salt = publish(request, plan)
            act(plan)
            return salt

        monkeypatch.setattr(desk.engine, "publish", published)

    return hook


def file_of(desk: Desk, key: ChunkKey) -> Path:
    return desk.engine.root / relative_path(key)


def planned(desk: Desk, user: str) -> Plan:
    """A plan over several blocks, of a user of its own: nothing of it is in any cache."""
    scope = Scope(user=user)
    return desk.plan(desk.remember(LINES, scope), scope)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_in_head(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [flip, flip_in_head, cut, empty, Path.unlink, make_unreadable]


def failures() -> float:
    values = [
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:inferscale_failures_total"
    ]
    return sum(values)


@pytest.mark.parametrize(("damage", "index"), [*((damage, 0) for damage in DAMAGES), (flip, -1)])
def test_a_chunk_damaged_before_its_load_is_answered_as_text(
    desk: Desk, once_published: Hook, damage: Callable[[Path], None], index: int
) -> None:
    plan = planned(desk, f"{damage.__name__}{index}")
    text = desk.ask(plan, inject=False)
    once_published(lambda plan: damage(file_of(desk, plan.chunks[index].key)))
    answer = desk.ask(plan)
    assert (answer.fallback, answer.injected_tokens) == ("missing_chunk", 0)
    assert answer.token_ids == text.token_ids


def test_a_chunk_replaced_by_one_of_another_shape_is_answered_as_text(desk: Desk, once_published: Hook) -> None:
    plan = planned(desk, "shape")

    def replace(plan: Plan) -> None:
        chunk = plan.chunks[1]
        kv = torch.zeros(1, chunk.length, 3, 64)
        ids = plan.token_ids[chunk.start : chunk.start + chunk.length]
        desk.store.put_many([(chunk.key, ChunkKV(ids, kv, kv))])

    once_published(replace)
    answer = desk.ask(plan)
    assert (answer.fallback, answer.injected_tokens) == ("shape_mismatch", 0)
    assert answer.token_ids == desk.ask(plan, inject=False).token_ids


def test_a_failed_load_is_counted_and_the_engine_serves_on(desk: Desk, once_published: Hook) -> None:
    plan = planned(desk, "counted")
    path = file_of(desk, plan.chunks[0].key)
    content, before = path.read_bytes(), failures()
    once_published(lambda plan: flip(path))
    assert desk.ask(plan).fallback == "missing_chunk"
    until = time.monotonic() + 5
    while failures() == before and time.monotonic() < until:
        desk.raw(desk.request(desk.plan([], Scope(user="next")), max_tokens=1, inject=False))
        time.sleep(0.1)
    assert failures() == before + 1
    once_published(lambda plan: None)
    assert desk.ask(plan).fallback == "missing_chunk", "the damaged file was removed"
    path.write_bytes(content)
    healed = desk.ask(plan)
    assert (healed.fallback, healed.injected_tokens) == (None, len(plan.token_ids))


def test_blocks_of_a_failed_load_are_never_found_again(desk: Desk, once_published: Hook) -> None:
    """They were computed as text, and the same plan, once its chunk is back, is not to be answered from them."""
    plan, untouched = planned(desk, "returns"), planned(desk, "returns, untouched")
    path = file_of(desk, plan.chunks[0].key)
    content = path.read_bytes()
    once_published(lambda plan: flip(path))
    failed = desk.ask(plan)
    assert failed.fallback == "missing_chunk"
    path.write_bytes(content)
    once_published(lambda plan: None)
    injected = desk.ask(untouched)
    assert injected.token_ids != failed.token_ids, "the two cannot be told apart"
    for _ in range(2):
        assert desk.ask(plan).token_ids == injected.token_ids


def test_a_damaged_header_costs_one_prefill_and_is_made_again(desk: Desk, once_published: Hook) -> None:
    header = desk.engine.prompt.fact_ids("Notes of another kind:\n")
    key = header_key(desk.engine.recipe(CONFIG), header)
    plan = desk.plan([], Scope(user="header"), header=header)
    once_published(lambda plan: flip(file_of(desk, key)))
    text = desk.ask(plan, inject=False)
    damaged = desk.ask(plan)
    assert damaged.fallback == "missing_chunk"
    once_published(lambda plan: None)
    healed = desk.ask(plan)
    assert (healed.fallback, healed.injected_tokens) == (None, len(header))
    assert damaged.token_ids == healed.token_ids == text.token_ids


@pytest.mark.parametrize("published", [False, True])
def test_memories_moved_away_are_answered_as_text_and_return_with_their_folder(
    desk: Desk, once_published: Hook, published: bool
) -> None:
    plan = planned(desk, f"moved{published}")
    text = desk.ask(plan, inject=False)
    root, elsewhere = desk.engine.root, desk.engine.root.with_name("elsewhere")
    try:
        if published:
            once_published(lambda plan: root.rename(elsewhere) and None)
        else:
            root.rename(elsewhere)
        answer = desk.ask(plan)
    finally:
        elsewhere.rename(root)
        once_published(lambda plan: None)
    assert answer.fallback is not None
    assert answer.injected_tokens == 0
    assert answer.token_ids == text.token_ids
    back = desk.ask(plan)
    assert (back.fallback, back.injected_tokens) == (None, len(plan.token_ids))


def test_neighbours_in_a_batch_do_not_notice(desk: Desk, once_published: Hook) -> None:
    plans = [planned(desk, f"neighbour{n}") for n in range(4)]
    alone = desk.ask(planned(desk, "neighbour, alone"))
    text = desk.ask(plans[0], inject=False)
    together = Barrier(len(plans))

    def act(plan: Plan) -> None:
        if plans.index(plan) % 2:
            flip(file_of(desk, plan.chunks[1].key))
        together.wait(30)

    once_published(act)
    with ThreadPoolExecutor(len(plans)) as pool:
        answers = list(pool.map(desk.ask, plans))
    assert [answer.fallback for answer in answers] == [None, "missing_chunk"] * 2
    assert [answer.token_ids for answer in answers] == [alone.token_ids, text.token_ids] * 2
    assert alone.token_ids != text.token_ids, "the two cannot be told apart"


@pytest.mark.parametrize("index", [0, -1])
def test_requests_that_share_a_failed_loads_blocks_are_answered_as_text(
    desk: Desk, once_published: Hook, index: int
) -> None:
    """vLLM finds blocks in its prefix cache from the moment they are allotted, before they are written."""
    scope = Scope(user=f"shared{index}")
    facts = desk.remember(LINES, scope)
    plans = [desk.plan(facts, scope) for _ in range(4)]
    text = desk.ask(plans[0], inject=False)
    together = Barrier(len(plans), action=lambda: flip(file_of(desk, plans[0].chunks[index].key)))
    once_published(lambda plan: together.wait(30) and None)
    with ThreadPoolExecutor(len(plans)) as pool:
        answers = list(pool.map(desk.ask, plans))
    assert [answer.token_ids for answer in answers] == [text.token_ids] * len(plans)
    assert [answer.injected_tokens for answer in answers] == [0] * len(plans)
    assert {answer.fallback for answer in answers} - {"load_failed"} == {"missing_chunk"}


def test_blocks_of_a_failed_load_are_not_found_when_its_client_left_before_it_failed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Nothing was written into them: they hold what somebody else left there."""
    ahead = Ahead(tiny_model, tmp_path)
    ahead.add("a")
    step = ahead.scheduler.schedule()
    ahead.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert ahead.result(step, WRONG, failed=True) == {}
    ahead.add("again")
    (load,) = ahead.scheduler.schedule().kv_connector_metadata.loads  # type: ignore[union-attr]
    assert (load.request, load.start, load.end) == ("again", 0, TOKENS)


def test_no_record_outlives_its_request(desk: Desk, once_published: Hook) -> None:
    plan = planned(desk, "record")
    once_published(lambda plan: flip(file_of(desk, plan.chunks[0].key)))
    desk.ask(plan)
    assert not [path.name for path in (desk.engine.root / FOLDER).iterdir() if path.name.startswith(plan.id)]
