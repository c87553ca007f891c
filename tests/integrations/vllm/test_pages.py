"""Pages of vLLM: its tensors are read and written as they are, with metadata that stands in for that of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm import pages as of_vllm
from pagedkv.integrations.vllm.pages import FP8, PagedMetadata, Pages
from tests.integrations.plain import attention

BLOCKS, HEADS, KV_HEADS, SIZE, D = 12, 4, 2, 8, 16
LENGTHS, QUERIES = (19, 3, 40), (1, 3, 5)
LAYOUTS = {
    "LBHNC": lambda: torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * D),
    "LBNHC": lambda: torch.zeros(BLOCKS, SIZE, KV_HEADS, 2 * D).transpose(1, 2),
    "BLHNC": lambda: torch.zeros(BLOCKS, 3, KV_HEADS, SIZE, 2 * D)[:, 1],
    "BLNHC": lambda: torch.zeros(BLOCKS, 3, SIZE, KV_HEADS, 2 * D)[:, 1].transpose(1, 2),
}


def common(
    causal: bool | torch.Tensor = True, lengths: Sequence[int] = LENGTHS, queries: Sequence[int] = QUERIES
) -> Any:
    """Return what CommonAttentionMetadata has: tables of sequences, whose unused entries name no block."""
    table, slots, block = torch.full((len(lengths), 6), 10**6, dtype=torch.int32), [], 1
    for row, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        pages = -(-length // SIZE)
        table[row, :pages] = torch.arange(block, block + pages)
        block += pages
        slots += [int(table[row, at // SIZE]) * SIZE + at % SIZE for at in range(length - new, length)]
    return SimpleNamespace(
        block_table_tensor=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        causal=causal,
    )


def expected(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    causal: Any,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Return attention in plain torch. keys, values: of each sequence, [length, KV_HEADS, D]."""
    sides = (-1, -1) if window is None else (window - 1, window - 1)
    rows, at = [], 0
    for number, queries in enumerate(QUERIES):
        is_causal = bool(causal[number]) if isinstance(causal, torch.Tensor) else causal
        mine = q[at : at + queries]
        rows.append(
            attention(mine, keys[number], values[number], scale=0.3, causal=is_causal, window=sides, softcap=softcap)[0]
        )
        at += queries
    return torch.cat(rows).float()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("causal", "window", "softcap"),
    [(True, None, 0.0), (True, 7, 5.0), (False, None, 0.0), (False, 7, 0.0), ("each", 7, 0.0), ("each", None, 0.0)],
)
def test_tokens_that_were_written_are_attended_to(layout: str, causal: Any, window: int | None, softcap: float) -> None:
    torch.manual_seed(0)
    causal = torch.tensor([True, False, False]) if causal == "each" else causal
    cache, metadata = LAYOUTS[layout](), PagedMetadata.of(common(causal))
    cache.fill_(torch.nan)
    keys, values = ([torch.randn(length, KV_HEADS, D) for length in LENGTHS] for _ in range(2))
    pages = Pages(
        head_size=D, scale=0.3, kv_cache_dtype="auto", window=window, softcap=softcap, sinks=None, alibi_slopes=None
    )
    scales = (1.0, 1.0)
    for row, length in enumerate(LENGTHS):  # the past, all but the new tokens
        past = length - QUERIES[row]
        table = metadata.batch.block_table[row]
        slots = torch.tensor([int(table[at // SIZE]) * SIZE + at % SIZE for at in range(past)], dtype=torch.int64)
        pages.write(keys[row][:past], values[row][:past], cache, slots, scales)
    new = [torch.cat([x[row][-queries:] for row, queries in enumerate(QUERIES)]) for x in (keys, values)]
    padding = [torch.cat([x, torch.full((3, KV_HEADS, D), torch.nan)]) for x in new]  # vLLM pads a batch
    pages.write(*padding, cache, metadata.batch.slots, scales)
    q, out = torch.randn(9, HEADS, D), torch.full((9, HEADS, D), torch.nan)
    pages.attend(q, cache, metadata.batch, metadata.causal, out, scales)
    torch.testing.assert_close(out, expected(q, keys, values, causal, window, softcap), atol=2e-5, rtol=2e-5)


def test_a_slot_below_zero_is_skipped_and_other_memory_is_bound_anew() -> None:
    pages = Pages(
        head_size=D, scale=1.0, kv_cache_dtype="auto", window=None, softcap=0.0, sinks=None, alibi_slopes=None
    )
    k = torch.ones(2, KV_HEADS, D)
    for _ in range(2):
        cache = LAYOUTS["LBHNC"]()
        pages.write(k, k, cache, torch.tensor([-1, 9]), (1.0, 1.0))
        assert float(cache.sum()) == 2 * KV_HEADS * D
        assert float(cache[1].sum()) == 2 * KV_HEADS * D


def test_sinks_that_change_are_read_anew() -> None:
    cache, sinks = LAYOUTS["LBHNC"]().bfloat16(), torch.zeros(HEADS, dtype=torch.bfloat16)
    pages = Pages(
        head_size=D, scale=1.0, kv_cache_dtype="auto", window=None, softcap=0.0, sinks=sinks, alibi_slopes=None
    )
    metadata = PagedMetadata.of(common())
    q, outs = torch.ones(9, HEADS, D, dtype=torch.bfloat16), []
    cache.fill_(1.0)
    for _ in range(2):
        outs.append(torch.empty_like(q))
        pages.attend(q, cache, metadata.batch, True, outs[-1], (1.0, 1.0))
        sinks += 40.0
    assert float(outs[0].float().mean()) > 0.9
    assert float(outs[1].float().mean()) < 0.1


@pytest.mark.parametrize("name", FP8)
def test_eight_bits_have_the_scales_of_vllm(name: str) -> None:
    cache = torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * D, dtype=torch.uint8)
    pages = Pages(head_size=D, scale=1.0, kv_cache_dtype=name, window=None, softcap=0.0, sinks=None, alibi_slopes=None)
    value = torch.full((1, KV_HEADS, D), 3.0)
    for scale in (1.0, 0.5):
        pages.write(value, value, cache, torch.tensor([SIZE]), (scale, scale))
        layer = of_vllm._layer_of(cache, D, name, (scale, scale))
        assert layer.k[1, 0].float().unique().tolist() == [3.0 / scale]
        out = torch.zeros(1, HEADS, D)
        metadata = PagedMetadata.of(common(True, [1], [1]))
        pages.attend(torch.randn(1, HEADS, D), cache, metadata.batch, True, out, (scale, scale))
        assert out.unique().tolist() == [3.0]


def test_caches_that_cannot_be_served_are_refused_in_words() -> None:
    cache = torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * D)
    with pytest.raises(InvalidRequest, match="no blocks in one piece"):
        of_vllm._layer_of(torch.zeros(KV_HEADS, BLOCKS, SIZE, 2 * D).transpose(0, 1), D, "auto")
    with pytest.raises(InvalidRequest, match="no blocks in one piece"):
        of_vllm._layer_of(cache, D + 1, "auto")
    for name in ("nvfp4", "k8v4", "k5v4"):
        with pytest.raises(InvalidRequest, match=f"{name} are not served"):
            of_vllm._layer_of(cache, D, name)
    with pytest.raises(InvalidRequest, match="auto in bytes are not served"):  # not codes of ours
        of_vllm._layer_of(cache.to(torch.uint8), D, "auto")
