"""One matrix product over a segment, and the exact best of it.

A scan gives every row an approximate score, and all of them a bound that the true scores cannot leave.
`best` turns that into the exact answer: the k rows that look best are scored in float64, and a row whose
approximate score lies more than the bound below the least of those is none of the best k; the few rows
left are scored in float64 too. Scores and ties are therefore the same for every scan and device, and
wherever in memory a row lies.

On a CPU a query is bound by memory traffic: 10,000 facts of dim 384 are 15.4 MB in float32, more than a
core reads in half a millisecond. There the int8 codes (3.8 MB) are scanned, with exact integer arithmetic;
elsewhere the float32 rows are.
"""

from __future__ import annotations

import numpy as np
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


def scan_codes(codes: Tensor, scales: Tensor, lost: Tensor, query: Tensor) -> tuple[Tensor, float]:
    """Scores [1, n] of `query` [1, d] and their bound, from int8 codes [n, d]; see `quantise`.

    With x = x' + e and q = q' + f, x·q - x'·q' = e·q + x'·f, at most |e|·|q| + |x'|·|f| (Cauchy-Schwarz),
    where |q| = 1 and |x'| ≤ 1 + |e|. x'·q' itself is an integer product, exact but for the scales.
    """
    vector = query.numpy()  # codes lie on the CPU only, where numpy's calls cost less than torch's
    query_scale = float(np.abs(vector).max()) / 127
    query_codes = np.rint(vector / (query_scale or 1.0))
    query_lost = float(np.linalg.norm(vector - query_codes * query_scale))
    products = torch._int_mm(codes, torch.from_numpy(query_codes.astype(np.int8)).t())
    scores = products[:, 0] * (scales * query_scale)
    most = float(lost.max())
    return scores[None], most + (1 + most) * query_lost + 1e-5  # 1e-5: float32 rounding of all of the above


def scan_rows(rows: Tensor, queries: Tensor) -> tuple[Tensor, float]:
    """Scores [m, n] of `queries` [m, d] and their bound, from float32 rows [n, d].

    A sum of d products, in any order, is off by at most d·2^-24; twice that covers lengths of 1 + 2^-24.
    A GPU may be set to TF32, which rounds each factor by 2^-11.
    """
    return queries @ rows.t(), rows.shape[1] * 2.0**-23 + (2.0**-9 if rows.is_cuda else 0.0)


def best(rows: Tensor, queries: Tensor, scores: Tensor, bound: float, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (query, row, exact score) that may be among the best `k` of each query, in no order.

    `rows` [n, d] and `queries` [m, d] are unit vectors or zero, `scores` [m, n] within ± `bound`; 1 ≤ k. A score
    of -inf leaves a row out. Every row that belongs to the best k is there, ties of the k-th included.
    """
    m, k = len(queries), min(k, scores.shape[1])
    wide = queries.double()
    first = scores.topk(k, dim=1, sorted=False).indices
    owners = torch.arange(m, device=rows.device).repeat_interleave(k) if m > 1 else None
    reached = _rescore(rows, wide, owners, first.flatten()).view(m, k).amin(dim=1, keepdim=True)
    hopeful = scores >= (reached - bound).float().clamp_min(torch.finfo(scores.dtype).min)
    which, slots = hopeful.nonzero(as_tuple=True)
    exact = _rescore(rows, wide, which if m > 1 else None, slots).float()
    if m == 1 and len(exact) > 4 * k:  # so many are sorted out by tensors faster than by the caller
        kept = exact >= exact.topk(k, sorted=False).values.min()
        which, slots, exact = which[kept], slots[kept], exact[kept]
    return which, slots, exact


def _rescore(rows: Tensor, wide: Tensor, which: Tensor | None, slots: Tensor) -> Tensor:
    """Products [p] of the pairs (query `which`, row `slots`) in float64; None is the only query for all.

    Each is summed by itself, so that equal rows get equal scores wherever they lie.
    """
    parts = [
        (rows[slots[i:j]].double() * (wide if which is None else wide[which[i:j]])).sum(dim=1)
        for i, j in ((i, i + RESCORE_ROWS) for i in range(0, len(slots), RESCORE_ROWS))
    ]
    return torch.cat(parts) if parts else wide.new_zeros(0)
