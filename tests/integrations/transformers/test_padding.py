"""Padding: a patched model gives the tokens of the host, with whatever call and on whatever side padding comes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, patch
from pagedkv.integrations.transformers.geometry import CACHE
from pagedkv.integrations.transformers.padding import computes_padding, sees_nothing, spread, windows_agree
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
WINDOW = 5
SIDES = ("left", "right", "middle", "holes", "all")
QUICK = (("llama", "holes"), ("mistral", "right"))


def shown(side: str, width: int, rows: int, seed: int) -> torch.Tensor:
    """Return a mask of `width` columns with padding on a side of its first row, and in the holes of all rows."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, width, dtype=torch.long)
    size = int(torch.randint(1, max(2, width - 1), (), generator=generator))
    place = {"left": slice(size), "right": slice(-size, None), "middle": slice(width // 3, width // 3 + size)}
    mask[0, place.get(side, slice(None))] = 0
    return torch.randint(0, 2, mask.shape, generator=generator) if side == "holes" else mask


def turns(model: Any, cache: Any, masks: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Return the tokens of a conversation, a turn for each mask."""
    torch.manual_seed(3)
    rows = len(masks[0])
    ids, mask, found = torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, 0, dtype=torch.long), []
    given = {} if cache is None else {CACHE: cache}
    for new in masks:
        ids, mask = torch.cat([ids, torch.randint(1, 99, new.shape) * new], 1), torch.cat([mask, new], 1)
        before, ids = ids.shape[1], model.generate(ids, attention_mask=mask, **OPTIONS, **options, **given)
        mask = torch.cat([mask, mask.new_ones(rows, ids.shape[1] - before)], 1)
        found.append(ids)
    return found


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "side"),
    [
        pytest.param(name, side, marks=[] if (name, side) in QUICK else [pytest.mark.slow])
        for name in ("llama", "mistral", "gemma3_text", "falcon", "gpt2")
        for side in SIDES
    ],
)
def test_padding_gives_the_hosts_tokens_whatever_call_it_comes_with(name: str, side: str) -> None:
    changes: dict[str, Any] = {"sliding_window": WINDOW} if name in ("mistral", "gemma3_text") else {}
    model = model_of(name, **changes | ({} if name == "gemma3_text" else {"num_hidden_layers": 2}))
    cases = [
        ([shown(side, width, rows, seed) for seed, width in enumerate(widths)], chunk)
        for rows, widths in ((1, (9,)), (2, (9,)), (2, (6, 7)), (2, (8, 1, 6)))
        for chunk in (None, 3)
    ]
    expected = [turns(model, DynamicCache(config=model.config), masks, prefill_chunk_size=n) for masks, n in cases]
    handle = patch(model, memory="16MiB")
    for (masks, chunk), right in zip(cases, expected, strict=True):
        with PagedCache(model.config, pool=handle.pool) as cache:
            assert equal(turns(model, cache, masks, prefill_chunk_size=chunk), right), (masks, chunk)
        if len(masks) == 1:
            assert equal(turns(model, None, masks, prefill_chunk_size=chunk), right), (masks, chunk)
    handle.pool.kv.check()
    assert handle.pool.stats().mapped == 0


@torch.no_grad()
def test_a_cache_with_padding_is_cropped_copied_and_reordered_as_the_hosts(llama: Any) -> None:
    masks = torch.cat([shown("right", 8, 2, 1), shown("left", 8, 2, 2)], 1)
    ids = torch.randint(1, 99, (2, 20), generator=torch.Generator().manual_seed(0))

    def logits(cache: Any) -> torch.Tensor:
        for columns in (8, 16):
            llama(ids[:, columns - 8 : columns], attention_mask=masks[:, :columns], **{CACHE: cache})
        cache = copy.deepcopy(cache)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        mask = torch.cat([masks[[1, 0], :13], torch.ones(2, 4, dtype=torch.long)], 1)
        made: torch.Tensor = llama(ids[:, 16:], attention_mask=mask, **{CACHE: cache}).logits
        return made

    expected = logits(DynamicCache(config=llama.config))
    handle = patch(llama, memory="16MiB")
    with PagedCache(llama.config, pool=handle.pool) as cache:
        torch.testing.assert_close(logits(cache), expected, atol=2e-3, rtol=2e-3)
    handle.unpatch()


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_masks_that_hide_tokens_of_calls_before_or_lack_columns_are_read_as_by_the_host(name: str) -> None:
    model = model_of(name, num_hidden_layers=2, **{"sliding_window": WINDOW} if name == "mistral" else {})
    ids = torch.randint(1, 99, (2, 40), generator=torch.Generator().manual_seed(0))
    hiding = torch.ones(2, 9, dtype=torch.long)
    hiding[0, :3], hiding[1, 4:8] = 0, 0
    masks = {"hides": hiding, "short": torch.ones(2, 7), "long": torch.ones(2, 12)}
    masks |= {"one row": torch.ones(1, 9)} if name == "llama" else {}

    def logits(cache: Any, mask: torch.Tensor) -> torch.Tensor:
        model(ids[:, :8], **{CACHE: cache})
        made = [model(ids[:, 8:9], attention_mask=mask, **{CACHE: cache}).logits]
        made.append(model(ids[:, 9:12], **{CACHE: cache}).logits)  # without a mask: all are shown again
        return torch.cat(made, 1)

    expected = {way: logits(DynamicCache(config=model.config), mask) for way, mask in masks.items()}
    handle = patch(model, memory="16MiB")
    for way, mask in masks.items():
        with PagedCache(model.config, pool=handle.pool) as cache:
            torch.testing.assert_close(logits(cache, mask), expected[way], atol=2e-3, rtol=2e-3, msg=way)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("at", ["model.layers.1", "lm_head"])
@torch.no_grad()
def test_a_padded_step_after_an_interrupted_one_is_the_hosts(at: str, side: str, llama: Any, patched: Patched) -> None:
    """The interrupted step attends to pages or gathers, and has stored K and V of all layers if the head stops it."""
    ids, rest = prompts(16, (0, 0))["input_ids"], torch.ones(2, 8, dtype=torch.long)
    mask = torch.cat([rest, shown(side, 8, 2, 1)], 1)

    error: type[BaseException] = (
        KeyboardInterrupt if side == "left" else RuntimeError
    )  # torch calls no hook, or it does

    def interrupt(*_: Any) -> None:
        raise error

    expected = llama(ids, attention_mask=mask, use_cache=False).logits[:, 8:]
    for first in (rest, shown("right", 8, 2, 3)):
        with PagedCache(llama.config, pool=patched.pool) as other, PagedCache(llama.config, pool=patched.pool) as cache:
            llama(ids[:, :8], **{CACHE: cache})
            stopped = llama.get_submodule(at).register_forward_hook(interrupt)
            for made in (other, cache):
                with pytest.raises(error):
                    llama(ids[:, 8:], attention_mask=torch.cat([rest, first], 1)[:, -8 if made is other else 0 :],
                          **{CACHE: made})  # fmt: skip
            stopped.remove()
            assert llama(ids, attention_mask=mask, use_cache=False).logits[:, 8:].equal(expected)
            found = llama(ids[:, 8:], attention_mask=mask, **{CACHE: cache}).logits
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("name", "side", "place"),
    [("llama", "left", "the call"), ("llama", "right", "a generation config"), ("gemma2", "middle", "the model")],
)  # sdpa and eager
def test_a_mask_that_no_one_gives_is_guessed_as_by_the_host(name: str, side: str, place: str) -> None:
    model = model_of(name, num_hidden_layers=2, **{"sliding_window": WINDOW} if name == "gemma2" else {})
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 99, (2, 40), generator=generator) * shown(side, 40, 2, 4)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (ids, {"pad_token_id": 0}), (ids.int(), {"pad_token_id": 7}), (ids, {"pad_token_id": None}),
        (torch.where(ids == 0, 7, ids), {"pad_token_id": 7}), (ids, {"pad_token_id": 0, "eos_token_id": [3, 0]}),
    ]  # fmt: skip

    def answers() -> Iterator[torch.Tensor]:
        for given, kind in calls:
            before = {key: getattr(model.generation_config, key) for key in kind}
            options = kind if place == "the call" else {}
            if place == "a generation config":
                options = {"generation_config": GenerationConfig(**kind)}
            elif place == "the model":
                model.generation_config.update(**kind)
            yield from (model.generate(given, **OPTIONS, **options) for _ in range(2))
            model.generation_config.update(**before)

    expected = list(answers())
    handle = patch(model, memory="16MiB")
    assert equal(list(answers()), expected)
    assert handle.pool.stats().mapped == 0


def test_padding_on_any_side_is_not_stored(llama: Any, patched: Patched) -> None:
    ids = prompts(100, (0,))["input_ids"]
    for side in ("left", "right", "middle"):
        mask = torch.ones_like(ids)
        mask[0, {"left": slice(90), "right": slice(10, None), "middle": slice(5, 95)}[side]] = 0
        with torch.no_grad(), PagedCache(llama.config, pool=patched.pool) as cache:
            llama(ids, attention_mask=mask, **{CACHE: cache})
            assert (cache.get_seq_length(), patched.pool.stats().mapped) == (100, 1)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompts_find_pages_of_padded_tokens_only_if_they_would_compute_the_same(name: str) -> None:
    model = model_of(name, num_hidden_layers=2, **{"sliding_window": WINDOW} if name == "mistral" else {})
    inputs, mask = prompts(40, (0,)), torch.ones(1, 40, dtype=torch.long)
    mask[0, 3:6] = 0  # a window of 5 columns shows tokens behind it less than a window of 5 tokens
    packed = inputs["input_ids"][mask == 1][None]
    expected = model.generate(packed, **OPTIONS)
    handle = patch(model, memory="16MiB")
    model.generate(inputs["input_ids"], attention_mask=mask, **OPTIONS)
    with PagedCache(model.config, pool=handle.pool) as cache:
        assert cache.find(packed) == (32 if name == "llama" else 0)
    assert model.generate(packed, **OPTIONS).equal(expected)


@pytest.mark.parametrize("side", ["right", "all"])
def test_a_last_column_that_sees_no_token_is_the_hosts_or_refused(side: str) -> None:
    """Eager attention gives such a column the mean of all V, those of hidden padding too."""
    model = model_of("mistral", num_hidden_layers=2, sliding_window=WINDOW)
    model.set_attn_implementation("eager")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 4 if side == "right" else 0 :] = 0
    expected = turns(model, None, [mask])
    handle = patch(model, memory="16MiB")
    assert equal(turns(model, None, [mask]), expected)
    with (
        PagedCache(model.config, pool=handle.pool) as cache,
        pytest.raises(InvalidRequest, match=r"attention_mask shows no token .* \(padding_side='left'\)"),
    ):
        turns(model, cache, [mask])


@pytest.mark.parametrize("side", ["right", "all"])
def test_sinks_take_the_weight_of_a_last_column_that_sees_no_token(side: str) -> None:
    model = model_of("gpt_oss", num_hidden_layers=2, sliding_window=WINDOW)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 4 if side == "right" else 0 :] = 0
    expected = turns(model, DynamicCache(config=model.config), [mask, mask])
    handle = patch(model, memory="16MiB")
    with PagedCache(model.config, pool=handle.pool) as cache:
        assert equal(turns(model, cache, [mask, mask]), expected)
    assert equal(turns(model, None, [mask]), expected[:1])


def test_the_rules_of_padding_are_what_they_say_of_each_token() -> None:
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        columns, size, rows = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(3))
        width = int(torch.randint(1, columns + 1, (), generator=generator))
        mask = torch.rand(rows, columns, generator=generator) < 0.6
        new = [(row.tolist(), column) for row in mask for column in range(columns - width, columns)]
        agrees = all(
            sum(row[max(0, at - size + 1) : at + 1]) == min(size, sum(row[: at + 1])) for row, at in new if row[at]
        )
        assert windows_agree(mask, width, (None, size)) == agrees
        assert windows_agree(mask, width, (None,))
        assert computes_padding(mask, width) == any(not row[at] and any(row[:at]) for row, at in new)
        assert sees_nothing(mask, (size, None)) == any(not any(row[-size:]) for row in mask.tolist())
        counts = mask.sum(1)
        packed = torch.rand(rows, 2, int(counts.max()), 3, generator=generator)
        whole = spread(packed, mask)
        for row in range(rows):
            assert whole[row, :, mask[row]].equal(packed[row, :, : counts[row]])
            assert not whole[row, :, ~mask[row]].any()
