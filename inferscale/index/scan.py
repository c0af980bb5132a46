"""One matrix product over a segment, and the exact best of it.

A scan gives every row an approximate score and a bound that its true score cannot leave. `best` turns that
into the exact answer: at least k rows reach the k-th highest LOWER bound, so a row whose UPPER bound is
below it is none of the best k; the few rows left are scored again in float64. The result is therefore the
same for every scan, and ties come out the same wherever in memory a row lies.

On a CPU a query is bound by memory traffic: 10,000 facts of dim 384 are 15.4 MB in float32. There the
int8 codes (3.8 MB) are scanned with exact integer arithmetic; elsewhere the float32 rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESCORE_ROWS = 4096
"""Candidates scored at once in float64, so that many near-ties cost time but not memory."""


def use_codes(device: torch.device) -> bool:
    """True where the int8 product is vectorised (oneDNN on x86); elsewhere it would be the slower scan."""
    vectorised = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return device.type == "cpu" and vectorised and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def quantise(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows [n, d] float32 → codes [n, d] int8, scales [n] float32 and the length [n] of what rounding lost."""
    scales = rows.abs().amax(dim=1) / 127
    codes = (rows / scales.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]).round().to(torch.int8)
    lost = torch.linalg.vector_norm(rows.double() - codes.double() * scales.double()[:, None], dim=1)
    return codes, scales, lost.float()


def scan_codes(codes: Tensor, scales: Tensor, lost: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [1, n] of `query` [1, d] (length ≤ 1) and their bounds [1, n], from int8 codes [n, d].

    With x = x' + e and q = q' + f, x·q - x'·q' = e·q + x'·f, at most |e|·|q| + |x'|·|f| (Cauchy-Schwarz),
    where |x'| ≤ 1 + |e|. x'·q' itself is an integer product, exact but for the scales.
    """
    query_codes, query_scale, query_lost = quantise(query)
    products = torch._int_mm(codes, query_codes.t())
    scores = products[:, 0] * (scales * query_scale)
    bounds = lost * (1 + query_lost) + (query_lost + 1e-5)  # 1e-5: float32 rounding of all of the above
    return scores[None], bounds[None]


def scan_rows(rows: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [m, n] of `queries` [m, d] and a bound [1, 1] for all of them, from float32 rows [n, d].

    A float32 sum of d products, in any order, is off by at most d·2^-24 of |x|·|q|, which is 1. A GPU
    may be set to TF32, which rounds each factor by 2^-11.
    """
    bound = queries.shape[1] * 2.0**-23 + (2.0**-9 if rows.is_cuda else 0.0)
    return queries @ rows.t(), rows.new_full((1, 1), bound)


def best(rows: Tensor, queries: Tensor, scores: Tensor, bounds: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (query, row, exact score) that may be among the best `k` of each query, in no order.

    `rows` [n, d], `queries` [m, d], `scores` [m, n] within ± `bounds` (broadcast to [m, n]); 1 ≤ k. A score of
    -inf leaves a row out. Every row that belongs to the best k is there, ties of the k-th included.
    """
    k = min(k, scores.shape[1])
    threshold = (scores - bounds).topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    hopeful = (scores + bounds >= threshold) & (scores > -torch.inf)
    which, slots = hopeful.nonzero(as_tuple=True)
    wide = queries.double()
    exact = [
        # one query is broadcast; of several, each pair needs its own
        (rows[slots[i:j]].double() * (wide if len(wide) == 1 else wide[which[i:j]])).sum(dim=1)
        for i, j in ((i, i + RESCORE_ROWS) for i in range(0, len(slots), RESCORE_ROWS))
    ]
    found = torch.cat(exact).float() if exact else scores.new_zeros(0)
    if len(wide) == 1 and len(found) > k:
        kept = found >= found.topk(k, sorted=False).values.min()
        which, slots, found = which[kept], slots[kept], found[kept]
    return which, slots, found
