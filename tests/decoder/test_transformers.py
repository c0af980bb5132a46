"""The layerwise decoder against the transformers forward pass, for every family and RoPE kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferscale.decoder.base import Mask
from inferscale.decoder.forward import KVBuffer, extend
from inferscale.decoder.rope import apply_rotation
from inferscale.decoder.transformers import TransformersDecoder, check_supported
from inferscale.encode.header import encode_header
from inferscale.errors import UnsupportedModel
from tests.tiny import CASES, random_ids, tiny_config, tiny_decoder

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def reference(decoder: TransformersDecoder, ids: torch.Tensor, first: int = 0) -> dict[str, Any]:
    """transformers' own forward at positions first, first + 1, …, with pre-RoPE keys taken by hooks."""
    keys: list[torch.Tensor] = []
    hooks = []
    for layer in decoder.model.model.layers:
        module = getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)
        hooks.append(module.register_forward_hook(lambda _m, _i, out: keys.append(out.detach().clone())))
    try:
        with torch.no_grad():
            out = decoder.model(
                ids[None],
                position_ids=torch.arange(first, first + len(ids))[None],
                output_hidden_states=True,
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    spec = decoder.spec
    return {
        "keys": torch.stack([k.reshape(len(ids), spec.kv_heads, spec.head_dim) for k in keys]),
        "hidden": [h[0] for h in out.hidden_states],
        "logits": out.logits[0].float(),
    }


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.parametrize("n", [1, 2, 37])
def test_hidden_states_keys_and_logits_equal_the_transformers_forward(family: str, kind: str, n: int) -> None:
    decoder = tiny_decoder(family, kind)
    ids = random_ids(n)
    expected = reference(decoder, ids)
    positions = torch.arange(n)
    mask = decoder.mask(positions, positions)
    hidden = decoder.embed(ids)
    for layer in range(decoder.spec.layers):
        torch.testing.assert_close(hidden, expected["hidden"][layer], **TOLERANCE)
        q, k, v = decoder.project(layer, hidden)
        torch.testing.assert_close(k, expected["keys"][layer], **TOLERANCE)
        out = decoder.attend(layer, decoder.rotate(q, positions), decoder.rotate(k, positions), v, mask)
        hidden = decoder.finish(layer, hidden, out)
    torch.testing.assert_close(decoder.logits(hidden), expected["logits"], **TOLERANCE)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_chunk_relocated_gives_the_scores_of_a_prefill_at_that_position(family: str, kind: str) -> None:
    """The papers' theorem: pre-RoPE keys do not depend on the position, rotated scores only on the distance."""
    decoder = tiny_decoder(family, kind)
    ids, query = random_ids(23), torch.randn(5, decoder.spec.heads, decoder.spec.head_dim)
    stored = encode_header(decoder, ids.tolist())
    there = reference(decoder, ids, first=101)
    groups = decoder.spec.heads // decoder.spec.kv_heads
    q = decoder.rotate(query, torch.arange(130, 135))
    for layer in range(decoder.spec.layers):
        at = torch.arange(101, 124)
        relocated = decoder.rotate(stored.keys[layer], at).repeat_interleave(groups, dim=1)
        prefilled = decoder.rotate(there["keys"][layer], at).repeat_interleave(groups, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", q, relocated) * decoder.spec.head_dim**-0.5
        expected = torch.einsum("nhd,mhd->hnm", q, prefilled) * decoder.spec.head_dim**-0.5
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.parametrize("cut", [1, 16, 40])
def test_prefill_in_pieces_equals_one_prefill(family: str, kind: str, cut: int) -> None:
    decoder = tiny_decoder(family, kind)
    ids = random_ids(41)
    whole, pieces = KVBuffer.for_decoder(decoder, 41), KVBuffer.for_decoder(decoder, 64)
    expected = extend(decoder, ids, whole)
    extend(decoder, ids[:cut], pieces)
    hidden = extend(decoder, ids[cut:], pieces)
    torch.testing.assert_close(hidden, expected[cut:], **TOLERANCE)
    torch.testing.assert_close(pieces.keys[:, :41], whole.keys, **TOLERANCE)
    torch.testing.assert_close(decoder.logits(hidden), reference(decoder, ids)["logits"][cut:], **TOLERANCE)


def test_bfloat16_follows_the_transformers_forward() -> None:
    decoder = tiny_decoder("llama", "llama3")
    low = TransformersDecoder(decoder.model.bfloat16(), "tiny", "tiny-bf16")
    ids = random_ids(30)
    ours = low.logits(extend(low, ids, KVBuffer.for_decoder(low, 30)))
    torch.testing.assert_close(ours, reference(low, ids)["logits"], rtol=5e-2, atol=5e-2)


def test_rotation_is_the_slow_obvious_one() -> None:
    x, angle = torch.randn(4, 2, 8), torch.rand(4, 4) * 6
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    turned = apply_rotation(x, cos, sin)
    for n in range(4):
        for head in range(2):
            for i in range(4):
                pair = torch.complex(x[n, head, i], x[n, head, i + 4]) * torch.exp(1j * angle[n, i])
                torch.testing.assert_close(turned[n, head, i], pair.real)
                torch.testing.assert_close(turned[n, head, i + 4], pair.imag)


def test_rotation_tables_grow_with_the_position() -> None:
    decoder = tiny_decoder()
    far = torch.tensor([5000, 3])
    cos, _ = decoder.rotation(far)
    expected, _ = decoder.model.model.rotary_emb(torch.empty(0), far[None])
    torch.testing.assert_close(cos, expected[0])


def test_masks_are_by_position_not_by_index() -> None:
    q_pos, k_pos = torch.tensor([7, 2]), torch.tensor([9, 2, 0, 7, 3])
    mask = Mask.by_position(q_pos, k_pos, torch.float32)
    assert mask.bias is not None
    assert (mask.bias == 0).tolist() == [[False, True, True, True, True], [False, True, True, False, False]]
    assert Mask.by_position(torch.tensor([9]), k_pos, torch.float32) == Mask()
    shuffled = torch.tensor([2, 1, 0])
    assert not Mask.by_position(shuffled, shuffled, torch.float32).causal


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (lambda: tiny_config("mistral", sliding_window=64), "Sliding-window"),
        (
            lambda: tiny_config(
                "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1, layer_types=None
            ),
            "sliding_attention",
        ),
        (
            lambda: tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "dynamic",
        ),
        (
            lambda: tiny_config(
                "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "Partial rotary",
        ),
        (lambda: __import__("transformers").GPTNeoXConfig(), "gpt_neox"),
        (lambda: __import__("transformers").MambaConfig(), "mamba"),
        (lambda: __import__("transformers").BloomConfig(), "bloom"),
        (lambda: __import__("transformers").DeepseekV3Config(), "deepseek_v3"),
    ],
)
def test_what_is_not_computed_exactly_is_refused_by_name(config: Any, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word) as caught:
        check_supported(config())
    assert "Supported: Llama, Mistral, Qwen2/Qwen2.5, Qwen3" in str(caught.value)
