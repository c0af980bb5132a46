"""FACTS → ONE KV: lay out a plan, fetch and verify its chunks, rotate them into place."""

from inferscale.compose.plan import PlanFact, build_plan
from inferscale.compose.rotate import place, place_naive
from inferscale.compose.verify import check_prompt, fetch

__all__ = ["PlanFact", "build_plan", "check_prompt", "fetch", "place", "place_naive"]
