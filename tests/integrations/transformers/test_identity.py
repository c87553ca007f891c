"""Identity: a prompt finds a page only if every layer has stored K and V of its tokens, and would compute the same now.

The inputs besides tokens are the user's salt, adapters, autocast, weights, hooks and forwards. In tiers pages outlive
pool and process, and are found under the name of their weights.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, patch
from pagedkv.integrations.transformers.geometry import CACHE
from pagedkv.integrations.transformers.identity import identity_of
from tests.integrations.transformers.families import OPTIONS, model_of, prompts

PROMPT = prompts(40, (0,))["input_ids"]
SALTS = (b"", b"tenant 1", b"tenant 1\n", b"\x00" * 8, b"autocast torch.bfloat16")


@pytest.fixture
def llama() -> Any:
    return model_of("llama", num_hidden_layers=2)


def tokens(model: Any, **options: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(PROMPT, **OPTIONS, **options).tolist()
    return found


def known(handle: Patched, salt: bytes = b"") -> int:
    with PagedCache(handle.model.config, pool=handle.pool, salt=salt) as cache:
        return cache.find(PROMPT)


def fill(handle: Patched, salt: bytes = b"") -> None:
    with torch.no_grad(), PagedCache(handle.model.config, pool=handle.pool, salt=salt) as cache:
        handle.model(PROMPT, **{CACHE: cache})


def test_a_prompt_finds_pages_of_its_own_salt_alone(patched: Patched) -> None:
    for number, salt in enumerate(SALTS):
        assert [known(patched, one) for one in SALTS] == [32] * number + [0] * (len(SALTS) - number)
        fill(patched, salt)


@pytest.mark.parametrize("salt", SALTS[:2])
def test_a_salt_is_added_to_autocast(salt: bytes, patched: Patched) -> None:
    fill(patched, salt)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert known(patched, salt) == 0
            fill(patched, salt)
            assert known(patched, salt) == 32
            with torch.autocast("cpu", enabled=False):
                assert known(patched, salt) == 32
    torch.set_autocast_enabled("cuda", True)  # of another device
    try:
        assert known(patched, salt) == 32
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_no_salt_names_what_another_salt_and_the_model_name_together(llama: Any) -> None:
    named: dict[tuple[bytes, Any], bytes] = {}
    for _ in range(3):  # the names of one round are the crafted salts of the next
        for salt in {*SALTS, *named.values()}:
            for dtype in (None, torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    named[salt, dtype] = identity_of(llama, salt)
    assert len(set(named.values())) == len(named) > 100
    assert identity_of(llama, b"") == identity_of(None, b"") == b""


def on_an_instance(model: Any, factor: float) -> None:
    layer = model.model.layers[1].mlp
    layer.forward = lambda hidden: type(layer).forward(layer, hidden) * factor


def a_hook(model: Any, factor: float) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:]))


def in_place(model: Any, factor: float) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(factor)


def through_data(model: Any, factor: float) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(factor)


def by_an_optimizer(model: Any, factor: float) -> None:
    """A fused kernel counts no version of the tensor up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * abs(factor), fused=True)
    model(PROMPT, labels=PROMPT, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


CHANGES = [on_an_instance, a_hook, in_place, through_data, by_an_optimizer]


@pytest.mark.parametrize("change", CHANGES)
def test_pages_of_a_model_that_changed_are_not_found(
    change: Callable[[Any, float], None], llama: Any, patched: Patched
) -> None:
    tokens(llama)
    assert known(patched) == 32
    for factor in (0.5, -1.0):  # replaced again and again: a new function may have the address of an old one
        vars(llama.model.layers[1].mlp).pop("forward", None)
        gc.collect()
        change(llama, factor)
        assert known(patched) == 0
        found = tokens(llama)
        assert known(patched) == 32
        patched.pool.forget()
        assert tokens(llama) == found
        assert llama.generate(PROMPT, **OPTIONS, use_cache=False).tolist() == found


def test_a_turn_with_a_hook_leaves_no_pages(llama: Any) -> None:
    """The change is taken back before the cache is closed, so the model is as it was when the cache began."""
    more = torch.cat([llama.generate(PROMPT, **OPTIONS), PROMPT], 1)
    expected = llama.generate(more, **OPTIONS)
    patch(llama, memory="16MiB")
    talk = llama.generate(PROMPT, **OPTIONS, return_dict_in_generate=True)
    assert talk[CACHE].get_seq_length() == 51  # all but the last token
    a_hook(llama, -1.0)
    assert not llama.generate(more, **OPTIONS, **{CACHE: talk[CACHE]}).equal(expected)
    llama.model.layers[0]._forward_pre_hooks.clear()
    assert llama.generate(more, **OPTIONS).equal(expected)
    talk[CACHE].close()
    assert llama.generate(more, **OPTIONS).equal(expected)


def test_a_pool_keeps_no_forward_of_a_model_alive(llama: Any, patched: Patched) -> None:
    on_an_instance(llama, 0.5)
    tokens(llama)
    forward = weakref.ref(llama.model.layers[1].mlp.forward)
    del llama.model.layers[1].mlp.forward
    gc.collect()
    assert forward() is None


def test_a_model_in_training_mode_shares_no_pages_and_can_be_patched() -> None:
    model = model_of("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    handle = patch(model, memory="16MiB")
    assert all(part.training for part in model.modules())
    tokens(model)
    assert known(handle) == 0
    found = tokens(model.eval())
    handle.unpatch()
    assert tokens(model) == found


LONG = prompts(70, (0,))["input_ids"]


def answer(model: Any, **options: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(LONG, **OPTIONS | options).tolist()
    return found


def in_pages(handle: Patched) -> int:
    return handle.pool.kv.lookup(LONG[0].tolist())


@contextmanager
def layers(model: Any, number: int) -> Iterator[None]:
    """Let calls use the first `number` layers, as the host's early exit does."""
    whole, model.config.num_hidden_layers = model.config.num_hidden_layers, number
    try:
        yield
    finally:
        model.config.num_hidden_layers = whole


@pytest.mark.parametrize(
    ("name", "number"),
    [("llama", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gemma2", 3), ("deepseek_v3", 2)))],
)
def test_pages_of_a_call_with_fewer_layers_are_not_found(name: str, number: int) -> None:
    model = model_of(name)
    expected = answer(model)
    with layers(model, number):
        fewer = answer(model)
    handle = patch(model, memory="16MiB")
    for beams in (1, 2):
        with layers(model, number):
            assert answer(model) == fewer
            answer(model, num_beams=beams)
        assert in_pages(handle) == 0
    assert answer(model) == expected
    assert in_pages(handle) == 64
    with layers(model, number):
        assert answer(model) == fewer  # its layers have stored the pages that all layers stored
    handle.pool.kv.check()


class Sometimes(torch.nn.Module):
    """A decoder layer that does what `how` says, without a trace for the identity of the model."""

    def __init__(self, layer: torch.nn.Module, how: SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        if self.how.does == "skip":
            return hidden
        made: torch.Tensor = self.layer(hidden, **given)
        if self.how.does == "raise":
            raise RuntimeError("in the middle")
        return self.layer(hidden, **given) if self.how.does == "twice" else made


@pytest.fixture
def sometimes() -> Callable[[int], tuple[Any, SimpleNamespace]]:
    def make(number: int) -> tuple[Any, SimpleNamespace]:
        model, how = model_of("llama"), SimpleNamespace(does="")
        model.model.layers[number] = Sometimes(model.model.layers[number], how)
        return model.eval(), how

    return make


@pytest.mark.parametrize(("number", "does"), [(0, "skip"), (3, "skip"), (3, "raise"), (1, "twice")])
def test_a_call_that_skips_a_layer_or_ends_in_it_leaves_no_pages(number: int, does: str, sometimes: Any) -> None:
    model, how = sometimes(number)
    expected, handle = answer(model), patch(model, memory="16MiB")
    how.does = does
    for beams in (1, 2):
        if does == "skip":
            assert answer(model, num_beams=beams) != expected
        else:
            with pytest.raises((RuntimeError, InvalidRequest), match="in the middle|layer 1 stores K and V twice"):
                answer(model, num_beams=beams)
        assert in_pages(handle) == 0
    how.does = ""
    assert answer(model) == expected
    handle.pool.kv.check()


def on_disk(model: Any, folder: Path, weights: str = "a") -> Patched:
    return patch(model, memory="16MiB", tiers=[f"disk:16MiB:{folder}"], weights=weights)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_patched_model_finds_its_pages_after_a_restart(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    want = tokens(model)
    handle = on_disk(model, tmp_path)
    assert tokens(model) == want
    handle.unpatch()
    again = on_disk(model_of(family), tmp_path)
    assert known(again) == 32
    loaded = sum(each.loaded for each in again.pool.kv.tiers.stats().values())
    assert loaded == 2 * len(again.pool.kv.specs)
    assert tokens(again.model) == want
    again.unpatch()


def test_pages_come_back_from_host_memory_after_eviction() -> None:
    handle = patch(model_of("llama"), memory="16MiB", tiers=["host:16MiB"])
    want = tokens(handle.model)
    assert handle.pool.kv.tiers.flush(20)
    handle.pool.kv.evict(handle.pool.kv.num_frames)
    assert known(handle) == 32
    assert tokens(handle.model) == want
    assert handle.pool.kv.tiers.num_holds == 0
    handle.unpatch()


def test_pages_of_other_weights_are_not_found_on_disk(tmp_path: Path) -> None:
    model = model_of("llama")
    handle = on_disk(model, tmp_path)
    tokens(model)
    handle.unpatch()
    other = on_disk(model, tmp_path / "other", weights="b")
    assert known(other) == 0
    other.unpatch()
    changed = on_disk(model, tmp_path)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)  # after patch, before the first call
    assert known(changed) == 0
    changed.unpatch()


def test_tiers_that_no_prompt_can_use_are_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    with pytest.raises(InvalidRequest, match="give weights="):
        on_disk(model, tmp_path, weights="")
    with pytest.raises(InvalidRequest, match="share none"):
        patch(model, tiers=["host:1MiB"], prefix_cache=False)
    with pytest.raises(InvalidRequest, match="a pool and options of a pool"):
        patch(model, pool=patch(model_of("llama")).pool, tiers=["host:1MiB"])
