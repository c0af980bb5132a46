"""The planner: which of vLLM's own request objects it answers from a plan, over real plan records and KV files."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferscale.compose import PlanFact, build_plan
from inferscale.core import ChunkKey, ChunkKV, FactId, Plan, Recipe, Scope, token_digest
from inferscale.encode.base import ENCODER_VERSION
from inferscale.engine.vllm.compat import check_setup, refusal_of
from inferscale.engine.vllm.plans import FOLDER, PlanBoard, PlanRecord, header_key, record_of
from inferscale.errors import UnsupportedModel
from inferscale.store import DiskStore
from inferscale.store.format import relative_path

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from inferscale.engine.vllm.metadata import Load
    from inferscale.engine.vllm.scheduler import Planner

SCOPE = Scope(user="alice")
RECIPE = Recipe("m" * 64, "float32", "t" * 64, "h" * 64, 0, 0, "exact", ENCODER_VERSION)
HEADER = (1, 2, 3)
FACTS = ((4, 5), (6, 7, 8))
TOKENS = 8
QUESTION = (90, 91, 92)


class Bench:
    """A store of one plan's chunks, its published record, and a planner that looks there."""

    def __init__(self, root: Path) -> None:
        self.store = DiskStore(root, budget_bytes=1 << 30)
        self.board = PlanBoard(root)
        self.plan = self._planned()
        self.prompt = [*self.plan.token_ids, *QUESTION]
        self.record = record_of(self.plan, RECIPE, root)
        self.board.publish(self.plan.id, self.record)
        self.planner = self.planning()
        self._names = count()

    def _planned(self) -> Plan:
        facts = []
        for tokens in FACTS:
            key = ChunkKey(SCOPE.id, FactId(f"f{tokens[0]}"), RECIPE.id, token_digest(tokens))
            facts.append(PlanFact(tokens, key))
        keys = [header_key(RECIPE, HEADER), *(fact.key for fact in facts if fact.key is not None)]
        for key, tokens in zip(keys, (HEADER, *FACTS), strict=True):
            kv = torch.randn(2, len(tokens), 1, 4)
            self.store.put_many([(key, ChunkKV(tokens, kv, kv.clone()))])
        return build_plan(SCOPE, RECIPE.id, HEADER, facts)

    def planning(self, model: str = RECIPE.model, dtype: str = "float32", match_registered: bool = False) -> Planner:
        return Planner(self.store.folder, model, dtype, match_registered)

    def republish(self, record: PlanRecord) -> None:
        self.board.publish(self.plan.id, record)

    def chunk_file(self, index: int) -> Path:
        return self.store.folder / relative_path(self.record.chunks[index].key)

    def request(self, params: Any = ..., salt: Any = ..., **changes: Any) -> Request:
        """A request as vLLM makes it; without changes one that is to be injected."""
        params = {"inferscale": {"plan": self.plan.id}} if params is ... else params
        values: dict[str, Any] = {
            "request_id": f"r{next(self._names)}",
            "prompt_token_ids": list(self.prompt),
            "sampling_params": SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params}),
            "pooling_params": None,
            "cache_salt": self.record.salt if salt is ... else salt,
            **changes,
        }
        return Request(**values)

    def reason(self, request: Request, planner: Planner | None = None) -> str | None:
        """Why the request is prefilled as text, as it is counted; None if it is injected."""
        planner = planner or self.planner
        matched = planner.matched(request, 0)
        planner.allocated(request, (0,), matched)
        loads, taken = planner.take_loads().loads, planner.stats.take()
        assert taken is not None
        refused = [key.removeprefix("refused.") for key in taken.data if key.startswith("refused.")]
        assert taken.data.get("hits", 0) == len(loads) == 1 - len(refused)
        assert (matched == 0) == bool(refused)
        return refused[0] if refused else None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "kv")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """For properties, which try many values on one."""
    return Bench(tmp_path_factory.mktemp("shared") / "kv")


@given(computed=st.integers(0, TOKENS + len(QUESTION)))
def test_what_the_prefix_cache_has_is_not_loaded_and_a_token_is_left(shared: Bench, computed: int) -> None:
    request = shared.request()
    matched = shared.planner.matched(request, computed)
    assert matched == max(0, TOKENS - computed)
    assert computed + matched < len(shared.prompt) or matched == 0


def test_a_plan_that_leaves_no_token_to_compute_is_refused(bench: Bench) -> None:
    assert bench.reason(bench.request(prompt_token_ids=bench.prompt[:TOKENS])) == "prompt_mismatch"
    assert bench.reason(bench.request(prompt_token_ids=bench.prompt[: TOKENS - 1])) == "prompt_mismatch"
    assert bench.reason(bench.request(prompt_token_ids=bench.prompt[: TOKENS + 1])) is None


def test_asking_has_no_side_effects(bench: Bench) -> None:
    request = bench.request()
    folder = bench.store.folder / FOLDER
    before = sorted(path.name for path in folder.iterdir())
    assert {bench.planner.matched(request, 2) for _ in range(10)} == {TOKENS - 2}
    assert bench.planner.take_loads().loads == []
    assert bench.planner.stats.is_empty()
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("computed", [0, 4])
def test_allocated_blocks_become_one_load(bench: Bench, computed: int) -> None:
    request = bench.request()
    external = bench.planner.matched(request, computed)
    bench.planner.allocated(request, (7, 3, 9), external)
    expected = Load(request.request_id, bench.plan.id, (7, 3, 9), computed, TOKENS, bench.record.chunks)
    assert bench.planner.take_loads().loads == [expected]
    assert bench.planner.take_loads().loads == []
    assert bench.planner.stats.data == {"hits": 1, "tokens": TOKENS - computed}


def test_a_plan_that_the_prefix_cache_has_whole_is_a_hit_without_a_load(bench: Bench) -> None:
    request = bench.request()
    assert bench.planner.matched(request, TOKENS) == 0
    bench.planner.allocated(request, (0,), 0)
    assert bench.planner.take_loads().loads == []
    assert bench.planner.stats.data == {"hits": 1}


def test_a_preempted_request_is_loaded_again_and_counted_once(bench: Bench) -> None:
    request = bench.request()
    for blocks in ((1,), (5,)):
        bench.planner.allocated(request, blocks, bench.planner.matched(request, 0))
    assert [load.blocks for load in bench.planner.take_loads().loads] == [(1,), (5,)]
    assert bench.planner.stats.data["hits"] == 1


def test_a_request_without_a_plan_is_left_alone(bench: Bench) -> None:
    request = bench.request(params=None, salt=None)
    assert bench.planner.matched(request, 0) == 0
    bench.planner.allocated(request, (0,), 0)
    assert bench.planner.take_loads().loads == []
    assert bench.planner.stats.is_empty()


def test_a_finished_request_is_forgotten(bench: Bench) -> None:
    request = bench.request()
    assert bench.planner.matched(request, 0) == TOKENS
    bench.planner.finished(request)
    bench.planner.finished(request)
    bench.planner.allocated(request, (0,), TOKENS)
    assert bench.planner.take_loads().loads == []
    bench.board.retire(bench.plan.id)
    assert bench.planner.matched(request, 0) == 0, "the same id is decided anew"


def test_a_retired_plan_is_unknown(bench: Bench) -> None:
    bench.board.retire(bench.plan.id)
    assert bench.reason(bench.request()) == "unknown_plan"


def test_an_expired_plan_is_refused(bench: Bench) -> None:
    bench.republish(replace(bench.record, expires=1.0))
    assert bench.reason(bench.request()) == "expired_plan"
    assert bench.board.noted(bench.plan.id) == "expired_plan"


@pytest.mark.parametrize("text", ["", "{}", "null", "[1]", '{"version": 1e400}'])
def test_a_damaged_record_is_refused(bench: Bench, text: str) -> None:
    (bench.store.folder / FOLDER / bench.plan.id).write_text(text)
    assert bench.reason(bench.request()) == "damaged_plan"


def test_a_record_whose_numbers_are_absurd_is_refused(bench: Bench) -> None:
    path = bench.store.folder / FOLDER / bench.plan.id
    path.write_text(path.read_text().replace('"expires":', f'"expires":1{"0" * 400},"was":'))
    assert bench.reason(bench.request()) == "damaged_plan"


@pytest.mark.parametrize("salt", [None, "", "0" * 32])
def test_a_request_without_its_plans_salt_is_refused(bench: Bench, salt: str | None) -> None:
    assert bench.reason(bench.request(salt=salt)) == "unsalted"


@given(at=st.integers(0, TOKENS - 1), token=st.integers(0, 50000))
def test_one_token_that_is_not_the_plans_refuses_it(shared: Bench, at: int, token: int) -> None:
    prompt = list(shared.prompt)
    prompt[at] = token
    expected = None if prompt == shared.prompt else "prompt_mismatch"
    assert shared.reason(shared.request(prompt_token_ids=prompt)) == expected


def test_a_plan_of_another_recipe_is_refused(bench: Bench) -> None:
    assert bench.reason(bench.request(), bench.planning(model="x" * 64)) == "recipe_mismatch"
    assert bench.reason(bench.request(), bench.planning(dtype="bfloat16")) == "recipe_mismatch"
    bench.republish(replace(bench.record, recipe=replace(RECIPE, encoder_version=ENCODER_VERSION + 1)))
    assert bench.reason(bench.request()) == "recipe_mismatch"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_chunk_is_looked_for_at_every_ask(bench: Bench, index: int) -> None:
    request, path = bench.request(), bench.chunk_file(index)
    content = path.read_bytes()
    assert bench.planner.matched(request, 0) == TOKENS
    path.unlink()
    assert bench.planner.matched(request, 0) == 0
    path.write_bytes(content)
    assert bench.planner.matched(request, 0) == TOKENS
    path.unlink()
    assert bench.reason(request) == "missing_chunk"
    assert bench.board.noted(bench.plan.id) == "missing_chunk"


def test_a_refusal_is_counted_once_however_often_the_request_comes_back(bench: Bench) -> None:
    request = bench.request(salt="another")
    for _ in range(3):
        bench.planner.allocated(request, (0,), bench.planner.matched(request, 0))
    assert bench.planner.stats.data == {"refused.unsalted": 1}


NESTED: Any = "x"
for _ in range(300):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "ours",
    [
        5,
        None,
        [],
        "plan",
        {},
        {"plan": ["x"]},
        {"plan": None},
        {"plan": {}},
        {"plan": "../../etc"},
        {"plan": "../../../../../../etc/passwd"},
        {"plan": "a" * 1_000_000},
        {"plan": "\ud800" * 20},
        {"plan": "\x00" * 20},
        {"plan": 2**64 - 1},
        {"plan": NESTED},
    ],
)
def test_a_plan_of_any_shape_is_refused_as_unknown(bench: Bench, ours: Any) -> None:
    assert bench.reason(bench.request(params={"inferscale": ours})) == "unknown_plan"
    assert [path.name for path in (bench.store.folder / FOLDER).iterdir()] == [bench.plan.id]


@pytest.mark.parametrize("params", [None, [], [1], "inferscale", 5, {}, {"other": {"plan": "x"}}])
def test_params_that_are_not_ours_are_left_alone(bench: Bench, params: Any) -> None:
    request = bench.request(params=params)
    assert bench.planner.matched(request, 0) == 0
    bench.planner.allocated(request, (0,), 0)
    assert bench.planner.stats.is_empty()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["inferscale", "plan"]), inner),
    max_leaves=8,
)


@given(params=JSON | st.fixed_dictionaries({"inferscale": JSON | st.fixed_dictionaries({"plan": JSON})}))
def test_nothing_that_a_client_sends_raises(shared: Bench, params: Any) -> None:
    request = shared.request(params=params, salt=None)
    assert shared.planner.matched(request, 0) == 0
    shared.planner.allocated(request, (0,), 0)
    shared.planner.finished(request)
    assert shared.planner.take_loads().loads == []
    shared.planner.stats.take()


def test_a_salt_names_a_registered_plan_only_where_that_is_allowed(bench: Bench) -> None:
    """For clients that can send no parameters of ours: such a plan is registered under its own salt."""
    bench.board.publish(bench.record.salt, bench.record)
    request = bench.request(params=None)
    assert bench.planner.matched(request, 0) == 0
    assert bench.reason(request, bench.planning(match_registered=True)) is None


@pytest.mark.parametrize("salt", [None, "", "nobody's", "../../../etc/passwd", "a" * 10_000])
def test_a_salt_that_names_no_plan_is_left_alone(bench: Bench, salt: str | None) -> None:
    planner = bench.planning(match_registered=True)
    request = bench.request(params=None, salt=salt)
    assert planner.matched(request, 0) == 0
    planner.allocated(request, (0,), 0)
    assert planner.stats.is_empty()


UNSERVED: dict[str, dict[str, Any]] = {
    "lora": {"lora_request": LoRARequest("style", 1, "/nowhere")},
    "multimodal": {"mm_features": [SimpleNamespace(mm_hash="picture")]},
    "prompt_embeds": {"prompt_token_ids": None, "prompt_embeds": torch.zeros(TOKENS + 1, 4)},
    "prompt_logprobs": {"sampling_params": SamplingParams(prompt_logprobs=1)},
    "pooling": {"sampling_params": None, "pooling_params": PoolingParams(skip_reading_prefix_cache=True)},
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_a_kind_of_request_that_cannot_be_injected_is_refused_by_name(bench: Bench, reason: str) -> None:
    request = bench.request(**UNSERVED[reason])
    request.kv_transfer_params = {"inferscale": {"plan": bench.plan.id}}
    assert refusal_of(request) == reason
    assert bench.reason(request) == reason
    assert bench.board.noted(bench.plan.id) == reason


def test_embeddings_beside_tokens_are_refused_too(bench: Bench) -> None:
    embeds = torch.zeros(len(bench.prompt), 4)
    mixed = bench.request(prompt_embeds=embeds, prompt_is_token_ids=[True] * len(bench.prompt))
    assert refusal_of(mixed) == "prompt_embeds"


def test_an_ordinary_request_is_not_refused(bench: Bench) -> None:
    assert refusal_of(bench.request()) is None


def setup(**changes: Any) -> Any:
    """What `check_setup` looks at in an engine's config; that it looks at what is there, every engine's start shows."""
    model = {
        "model": "some/model",
        "is_encoder_decoder": False,
        "runner_type": "generate",
        "use_mla": False,
        "is_hybrid": False,
        "is_attention_free": False,
        "dtype": torch.bfloat16,
    }
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 4,
    }
    draft = changes.pop("draft", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in model.items()}),
        parallel_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in parallel.items()}),
        speculative_config=None if draft is None else SimpleNamespace(use_eagle=lambda: draft == "eagle"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_usual_set_up_is_served(dtype: torch.dtype, draft: str | None) -> None:
    check_setup(setup(dtype=dtype, draft=draft))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_encoder_decoder": True}, "decoder"),
        ({"runner_type": "pooling"}, "generates text"),
        ({"use_mla": True}, "latent attention"),
        ({"is_hybrid": True}, "state-space"),
        ({"is_attention_free": True}, "state-space"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        ({"draft": "eagle"}, "draft"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_a_set_up_that_cannot_be_served_says_why_in_a_sentence(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        check_setup(setup(**changes))
    text = str(error.value)
    assert "some/model" in text
    assert why in text
    assert text.endswith(".")
    assert "\n" not in text
    assert text.count(". ") == 0
