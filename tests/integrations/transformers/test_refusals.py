"""Refusals: each is one sentence before the first token, and stands in the manual's list."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache, GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, Pool, patch, unpatch
from pagedkv.integrations.transformers.geometry import CACHE
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
ROOT: Final = Path(__file__).parents[3]
SECTION: Final = " ".join(
    (ROOT / "docs/start/transformers.md").read_text().partition("\n## Refusals\n")[2].partition("\n## ")[0].split()
)
"""The manual's list, in one line."""


@pytest.fixture
def patched(llama: Any, patched: Patched) -> Any:
    yield patched
    assert llama.config._attn_implementation == "sdpa"


def sentence_of(call: Callable[[], Any]) -> str:
    """Return the sentence with which a call is refused."""
    with pytest.raises(InvalidRequest) as raised:
        call()
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert len(sentence) < 300
    return sentence


@torch.no_grad()
def forward(handle: Patched, **inputs: Any) -> Any:
    with PagedCache(handle.model.config, pool=handle.pool) as cache:
        return handle.model(**prompts(8, (0, 2)) | inputs, **{CACHE: cache})


@torch.no_grad()
def second(handle: Patched, **inputs: Any) -> Any:
    """Call the model a second time, with one token for each of two rows if `inputs` do not say otherwise."""
    with PagedCache(handle.model.config, pool=handle.pool) as cache:
        handle.model(**prompts(8, (0, 2)), **{CACHE: cache})
        try:
            return handle.model(**{"input_ids": torch.ones(2, 1, dtype=torch.long)} | inputs, **{CACHE: cache})
        finally:
            assert cache.get_seq_length() == 8


def as_bfloat16(handle: Patched) -> Any:
    handle.model.bfloat16()
    try:
        return handle.model.generate(**prompts(8, (0, 2)), **OPTIONS)
    finally:
        handle.model.float()


FOUR: Final = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
IN_A_CALL: Final[dict[str, tuple[Callable[[Patched], Any], str]]] = {
    "masks of four dimensions": (lambda one: forward(one, attention_mask=FOUR), "custom masks need another cache"),
    "a dict of masks": (
        lambda one: forward(one, attention_mask={"full_attention": FOUR}), "custom masks need another cache",
    ),
    "a mask that shows padding of earlier calls": (
        lambda one: second(one, attention_mask=torch.ones(2, 9)), "were padding in the calls before",
    ),
    "masks of other rows": (
        lambda one: second(one, attention_mask=torch.zeros(3, 9)), "attention_mask has 3 rows and the batch 2",
    ),
    "a batch of no rows": (
        lambda one: forward(one, input_ids=torch.ones(0, 3, dtype=torch.long)), "a batch of no rows",
    ),
    "no mask": (second, "the cache holds padding and the call has no attention_mask"),
    "other rows than the cache has": (
        lambda one: second(one, input_ids=torch.ones(3, 1, dtype=torch.long)), "the batch has 3 rows and the cache 2",
    ),
    "gradients": (forward.__wrapped__, "for inference only"),
    "another dtype or device": (as_bfloat16, "unpatch(model), then patch(model)"),
    "a copy or a pickle": (lambda one: copy.deepcopy(one.model), "cannot be copied or pickled"),
    "`PagedCache(offloading=True)`": (
        lambda one: PagedCache(one.model.config, offloading=True), "pages are not offloaded",
    ),
}  # fmt: skip
"""words of the manual: (a call that is refused, a part of its sentence)."""


@pytest.mark.parametrize("words", IN_A_CALL)
def test_a_call_is_refused_in_a_sentence_and_changes_nothing(words: str, llama: Any, patched: Patched) -> None:
    call, part = IN_A_CALL[words]
    assert part in sentence_of(lambda: call(patched))
    assert words in SECTION or words in ("masks of other rows", "a batch of no rows")
    patched.pool.kv.check()
    assert patched.pool.stats().mapped == 0
    assert llama.generate(**prompts(8, (0, 2)), **OPTIONS).shape == (2, 16)


OFFLOADED: Final = [kind for kind in ALL_CACHE_IMPLEMENTATIONS if "offloaded" in kind]


@pytest.mark.parametrize("kind", OFFLOADED)
def test_offloaded_caches_are_refused_wherever_they_are_asked_for(
    kind: str, llama: Any, patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_call: list[dict[str, Any]] = [
        {"cache_implementation": kind}, {"generation_config": GenerationConfig(cache_implementation=kind)}, {},
    ]  # fmt: skip
    for options in in_a_call:
        if not options:
            monkeypatch.setattr(llama.generation_config, "cache_implementation", kind)
        given = {**prompts(8, (0, 2)), **OPTIONS, **options}
        sentence = sentence_of(partial(llama.generate, **given))
        assert f"cache_implementation is {kind!r}, and pages are not offloaded" in sentence
    assert patched.pool.stats().mapped == 0
    assert '`cache_implementation="offloaded"` and its kin' in SECTION


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("an encoder and a decoder", "t5"), ("cross-attention", "mllama"), ("chunked attention", "llama4_text"),
        ("linear state", "recurrent_gemma"), ("indexed attention", "deepseek_v32"),
        ("K and V that are compressed", "deepseek_v4"),
    ],
)  # fmt: skip
def test_a_config_is_refused_in_a_sentence(words: str, kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("this host has no such model")
    config = AutoConfig.for_model(kind)
    for make in (PagedCache, Pool):
        assert "keeps the cache of transformers: " in sentence_of(lambda make=make: make(config))
    assert words in SECTION


def test_weights_that_are_offloaded_are_refused(llama: Any) -> None:
    scattered = model_of("llama", num_hidden_layers=1)
    scattered.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert "on several devices" in sentence_of(lambda: patch(scattered))
    with torch.device("meta"):
        empty = type(llama)(llama.config)
    assert "weights of the model are offloaded" in sentence_of(lambda: patch(empty))
    assert "weights on several devices, or offloaded by accelerate" in SECTION


WRONG: Final[dict[str, tuple[Callable[[Any, Any], Any], str]]] = {
    "patched twice": (lambda one, _: patch(one), "patched already"),
    "no model": (lambda *_: patch(torch.nn.Linear(2, 2)), "patch got a Linear"),
    "no generate": (lambda one, _: patch(one.model), "LlamaModel has no generate"),
    "no pool": (lambda _, other: patch(other, pool=5), "patch got a int as its pool"),  # type: ignore[arg-type]
    "a pool of another config": (lambda one, other: patch(other, pool=Pool(one.config)), "made for another config"),
    "a pool and its options": (
        lambda _, other: patch(other, pool=Pool(other.config), memory="1GiB"), "give one of them"),
    "a switch": (lambda _, other: patch(other, prefix_cache="no"), "prefix_cache is 'no'"),  # type: ignore[arg-type]
    "unpatch of a number": (lambda *_: unpatch(3), "unpatch of a int that is not patched"),
    "no config": (lambda *_: PagedCache(None), "got a NoneType as the config"),
    "a model as its config": (lambda one, _: PagedCache(one), "give model.config"),
    "an amount": (lambda one, _: PagedCache(one.config, memory="lots"), "'lots' is not an amount of memory"),
    "no pool of a cache": (
        lambda one, _: PagedCache(one.config, pool=5), "PagedCache got a int as its pool"),  # type: ignore[arg-type]
    "a cache with both": (
        lambda one, _: PagedCache(one.config, pool=Pool(one.config), memory="1GiB"), "options of the pool"),
    "a salt": (lambda one, _: PagedCache(one.config, salt="tenant"), "the salt of a PagedCache is a str; give bytes"),
    "an unknown option": (lambda one, _: PagedCache(one.config, size="1GiB"), "['size']; its options are memory"),
}  # fmt: skip
"""a mistake: (the call, with a model that is patched and another one; a part of its sentence)."""


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_refused_in_a_sentence(mistake: str, llama: Any, patched: Patched) -> None:
    call, part = WRONG[mistake]
    other = model_of("llama", num_hidden_layers=3)
    assert part in sentence_of(lambda: call(llama, other))
    assert not other._forward_hooks
    assert not other._forward_pre_hooks


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_a_cache_without_patch_serves_masks_of_four_dimensions(name: str) -> None:
    model, ids = model_of(name, num_hidden_layers=2), prompts(12, (0, 0))["input_ids"]
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[:, :, 6:, 2:4] = False
    step = torch.ones(2, 1, 1, 13, dtype=torch.bool)
    found = []
    for cache in (DynamicCache(config=model.config), PagedCache(model.config, memory="16MiB")):
        first = model(ids, attention_mask=mask, **{CACHE: cache}).logits
        found.append(torch.cat([first, model(ids[:, :1], attention_mask=step, **{CACHE: cache}).logits], 1))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
