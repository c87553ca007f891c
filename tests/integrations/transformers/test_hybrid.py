"""Hybrid models generate the tokens of plain transformers, and compute little of a prompt that was seen before."""

from __future__ import annotations

import copy
import gc
from functools import cache
from typing import Any, Final

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedkv.errors import InvalidRequest, OutOfFrames
from pagedkv.integrations.transformers import PagedCache, Patched, Pool, patch, unpatch
from pagedkv.integrations.transformers.geometry import CACHE, HOST, Geometry
from pagedkv.integrations.transformers.trial import resumes
from tests.integrations.transformers.families import model_of
from tests.integrations.transformers.hybrids import BASE, HYBRIDS, WHOLE

pytestmark = pytest.mark.skipif(HOST < (5, 24), reason="states of an older host have another interface")

REFUSED: Final[dict[str, dict[str, Any]]] = {
    "minimax": BASE | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "recurrent_gemma": BASE | {"num_hidden_layers": 3, "head_dim": 16, "lru_width": 64},
    "rwkv": {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "attention_hidden_size": 64},
    "xlstm": {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 4, "num_blocks": 3},
}  # fmt: skip
"""The types with caches of their own."""

NEW: Final = 20
OPTIONS: Final[dict[str, Any]] = {"max_new_tokens": NEW, "do_sample": False}
WAYS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "greedy": ("equal", {}),
    "the same prompts again": ("equal", {}),
    "padded": ("padded", {}),
    "the same padded prompts again": ("padded", {}),
    "beams": ("padded", {"num_beams": 3}),
    "beams that are returned": ("equal", {"num_beams": 2, "num_return_sequences": 2}),
    "samples": ("padded", {"do_sample": True, "num_return_sequences": 3}),
    "a sample": ("one", {"do_sample": True}),
    "samples of beams": ("equal", {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}),
    "chunks": ("padded", {"prefill_chunk_size": 7}),
}
"""way: (name of a batch, options of generate())."""


@cache
def hybrid_of(name: str, seed: int = 0) -> Any:
    """Return a model of a type, in float32. Its weights are three times the usual, so that logits are far apart."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **(HYBRIDS | WHOLE | REFUSED)[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def types(*quick: str) -> Any:
    """Return a test's parameters: the types of `quick`, and all others in `make test-all`."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in HYBRIDS]
    )


def batch_of(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return ids and mask of prompts with padding before them. Their first 40 tokens are equal."""
    ids = torch.randint(3, 300, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        stem = ids[0, :40].clone()[:length]
        mask[row, -length:] = 1
        ids[row, : ids.shape[1] - length] = 0
        ids[row, ids.shape[1] - length :][: len(stem)] = stem
    return {"input_ids": ids, "attention_mask": mask}


BATCHES: Final = {"equal": batch_of(70, 70, 70), "padded": batch_of(90, 41, 64, 1, seed=2), "one": batch_of(77, seed=3)}


def generated(model: Any, way: str) -> list[list[int]]:
    which, options = WAYS[way]
    torch.manual_seed(3)
    tokens: list[list[int]] = model.generate(**BATCHES[which], **OPTIONS | options).tolist()
    return tokens


def require_empty(handle: Patched) -> None:
    gc.collect()  # the host drops the cache of an assistant
    handle.pool.sweep()
    handle.pool.kv.check()
    stats = handle.pool.stats()
    assert stats.states is not None
    assert (stats.mapped, stats.states.mapped) == (0, 0)


@types("qwen3_5_text", "nemotron_h")
def test_a_hybrid_model_generates_the_tokens_of_plain_transformers(name: str) -> None:
    model = hybrid_of(name)
    ways = [way for way in WAYS if way != "chunks" or name != "mamba2"]  # the host computes no chunks of it
    expected = {way: generated(model, way) for way in ways}
    handle = patch(model, memory="64MiB")
    try:
        assert handle.resumes
        assert handle.attends_to_pages == (name not in ("kimi_linear", "bailing_hybrid"))
        for way in ways:
            assert generated(model, way) == expected[way], way
            require_empty(handle)
    finally:
        handle.unpatch()
    assert generated(model, "greedy") == expected["greedy"]


def drafted(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Generate without the token of padding, which the host hides from an assistant."""
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), suppress_tokens=[0], **OPTIONS | {"max_new_tokens": 30}, **options
    )
    return tokens


@types("nemotron_h")
def test_drafts_give_the_tokens_of_greedy_where_transformers_refuses_them(name: str) -> None:
    model, ids = hybrid_of(name), batch_of(60)["input_ids"]
    ids = torch.cat([ids, ids[:, 10:37]], 1)
    llama, equal = model_of("llama", num_hidden_layers=1, vocab_size=300), copy.deepcopy(model)
    ways: dict[str, dict[str, Any]] = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4}, "another model": {"assistant_model": llama},
        "an equal model": {"assistant_model": equal},
    }  # fmt: skip
    expected = drafted(model, ids)
    longer = torch.cat([expected, ids[:, -20:]], 1)  # it has its own answer to look up
    expected_longer = drafted(model, longer)
    handles = [patch(one, memory="64MiB") for one in (model, equal)]
    try:
        for way, options in ways.items():
            for _ in range(2):
                assert drafted(model, ids, **options).equal(expected), way
                assert drafted(model, longer, **options).equal(expected_longer), way
            for handle in handles:
                require_empty(handle)
    finally:
        for handle in handles:
            handle.unpatch()
    if name not in ("lfm2", "lfm3"):  # the host takes columns of convolutions back
        with pytest.raises(ValueError, match=r"stateful|cropped"):
            drafted(model, ids, prompt_lookup_num_tokens=4)


def test_drafts_need_no_prefix_cache() -> None:
    model, ids = hybrid_of("qwen3_5_text"), torch.cat([batch_of(60)["input_ids"]] * 2, 1)
    expected = drafted(model, ids)
    handle = patch(model, memory="64MiB", prefix_cache=False)
    try:
        assert drafted(model, ids, prompt_lookup_num_tokens=4).equal(expected)
        assert computed(handle, ids) == computed(handle, ids) == 120
        require_empty(handle)
    finally:
        handle.unpatch()


def computed(handle: Patched, ids: torch.Tensor) -> int:
    """Return how many tokens were computed to answer a prompt with one token."""
    before = handle.pool.stats().states
    handle.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    after = handle.pool.stats().states
    assert before is not None
    assert after is not None
    return after.tokens_computed - before.tokens_computed


@pytest.mark.parametrize(
    "length", [64, 100, 1000, pytest.param(4096, marks=pytest.mark.slow), pytest.param(32768, marks=pytest.mark.slow)]
)
def test_little_is_computed_of_a_prompt_that_was_seen_once(length: int) -> None:
    handle = patch(hybrid_of("qwen3_5_text"), memory="256MiB")
    try:
        for number, distance in enumerate(d for d in (1, 7, 30, 200, 3000) if d < length):
            ids = torch.randint(3, 300, (4, length), generator=torch.Generator().manual_seed(number))
            ids[1:, :-distance] = ids[0, :-distance]
            ids[1:, -distance] = (ids[0, -distance] + torch.tensor([1, 2, 3])) % 300
            assert computed(handle, ids[:1]) == length
            assert computed(handle, ids[:1]) <= 32
            assert computed(handle, ids[1:2]) <= 4 * distance + 32
            assert computed(handle, ids[2:3]) <= 16 + distance
            assert computed(handle, ids[3:]) <= 16 + distance
    finally:
        handle.unpatch()


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, paged: PagedCache | None = None) -> torch.Tensor:
    """Return the logits of tokens behind those of a cache, or of tokens without one."""
    start = 0 if paged is None else paged.get_seq_length()
    given: dict[str, Any] = {"use_cache": False} if paged is None else {CACHE: paged}
    if name_of(model) != "mamba2":
        given["position_ids"] = torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
    logits: torch.Tensor = model(ids, **given).logits
    return logits


def name_of(model: Any) -> str:
    return str(model.config.model_type)


def require_equal(found: torch.Tensor, whole: torch.Tensor) -> None:
    """Require the last logits of sequences computed at once."""
    expected = whole[:, -found.shape[1] :]
    assert float((found - expected).abs().max() / (expected.max() - expected.min())) < 1e-4


@types("qwen3_5_text", "nemotron_h")
def test_a_paged_cache_is_cropped_forked_and_reordered(name: str) -> None:
    model = hybrid_of(name)
    ids = torch.randint(3, 300, (2, 120), generator=torch.Generator().manual_seed(4))
    handle = patch(model, memory="64MiB")
    try:
        with PagedCache(model.config, pool=handle.pool) as paged:
            require_equal(forward(model, ids[:, :70], paged), forward(model, ids[:, :70]))
            require_equal(forward(model, ids[:, 70:80], paged), forward(model, ids[:, :80]))
            paged.crop(-7)  # tokens of the last pass: its old state is still there
            assert paged.get_seq_length() == 73
            if name == "qwen3_5_text":
                with pytest.raises(InvalidRequest, match="call the model before you read them"):
                    assert paged.layers[3].keys is None
            other = torch.cat([ids[:, :73], ids[:, 90:95]], 1)
            require_equal(forward(model, other[:, 73:], paged), forward(model, other))
            fork = copy.deepcopy(paged)
            paged.crop(-30)  # tokens of passes before: they are computed again
            require_equal(forward(model, ids[:, 48:60], paged), forward(model, ids[:, :60]))
            fork.reorder_cache(torch.tensor([1, 1]))
            beams = torch.cat([other[[1, 1]], ids[:, 95:96]], 1)
            require_equal(forward(model, beams[:, -1:], fork), forward(model, beams))
            fork.close()
        require_empty(handle)
    finally:
        handle.unpatch()


def test_a_conversation_goes_on_with_its_cache() -> None:
    model = hybrid_of("qwen3_5_text")
    ids = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(6))
    first = model.generate(ids[:, :50], attention_mask=torch.ones(1, 50), **OPTIONS)
    second = torch.cat([first, ids[:, 50:]], 1)
    expected = model.generate(second, attention_mask=torch.ones_like(second), **OPTIONS)
    handle = patch(model, memory="64MiB")
    try:
        with PagedCache(model.config, pool=handle.pool) as paged:
            given: dict[str, Any] = OPTIONS | {CACHE: paged}
            assert model.generate(ids[:, :50], attention_mask=torch.ones(1, 50), **given).equal(first)
            assert model.generate(second, attention_mask=torch.ones_like(second), **given).equal(expected)
        require_empty(handle)
    finally:
        handle.unpatch()


@pytest.mark.parametrize("at", [0, 3])
def test_an_interrupted_pass_leaves_the_states_before_it(at: int) -> None:
    model = hybrid_of("qwen3_5_text")
    ids = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(8))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = patch(model, memory="64MiB")
    try:
        with PagedCache(model.config, pool=handle.pool) as paged:
            forward(model, ids[:, :40], paged)
            hook = model.model.layers[at].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                forward(model, ids[:, 40:60], paged)
            with pytest.raises(KeyboardInterrupt):
                model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
            hook.remove()
            require_equal(forward(model, ids[:, 40:], paged), forward(model, ids))
        require_empty(handle)
    finally:
        handle.unpatch()


def test_padding_behind_tokens_is_computed_as_by_the_host() -> None:
    model, inputs = hybrid_of("qwen3_5_text"), batch_of(50, 50)
    inputs["attention_mask"][1, 30:34] = 0
    inputs["attention_mask"][0, 44:] = 0
    expected = model.generate(**inputs, **OPTIONS)
    handle = patch(model, memory="64MiB")
    try:
        for _ in range(2):
            assert model.generate(**inputs, **OPTIONS).equal(expected)
        require_empty(handle)
    finally:
        handle.unpatch()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "mamba" else [pytest.mark.slow]) for name in WHOLE]
)
def test_a_model_that_cannot_resume_is_served_without_reuse_and_says_so(name: str) -> None:
    model = hybrid_of(name)
    assert not resumes(model, model.config)
    ways = [way for way in WAYS if way != "chunks"]
    expected = {way: generated(model, way) for way in ways}
    with pytest.warns(UserWarning, match=f"a model of type '{name}' is served without reuse of prompts: in transf"):
        handle = patch(model, memory="64MiB")
    try:
        for way in ways:
            assert generated(model, way) == expected[way], way
            require_empty(handle)
        ids = BATCHES["one"]["input_ids"]
        assert computed(handle, ids) == computed(handle, ids) == 77
        with pytest.raises(ValueError, match="stateful"):
            drafted(model, ids, prompt_lookup_num_tokens=4)
    finally:
        handle.unpatch()


def test_random_weights_in_bfloat16_do_not_hide_that_a_model_cannot_resume() -> None:
    for name in ("jamba", "qwen3_5_text"):
        model = copy.deepcopy(hybrid_of(name)).bfloat16()
        assert resumes(model, model.config) == (name != "jamba")


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_a_cache_of_its_own_is_refused_in_a_sentence(name: str) -> None:
    model = hybrid_of(name)
    with pytest.raises(InvalidRequest, match=f"a model of type '{name}' keeps the cache of transformers: "):
        patch(model)
    assert "generate" not in vars(model)


def test_what_states_do_not_serve_is_refused_in_a_sentence() -> None:
    model, ids = hybrid_of("qwen3_5_text"), BATCHES["equal"]["input_ids"]
    with (
        PagedCache(model.config, pool=Pool.for_model(model, memory="16MiB")) as paged, torch.no_grad(),
        pytest.raises(InvalidRequest, match=r"a model with recurrent states needs patch\(model\)"),
    ):  # fmt: skip
        model(ids, **{CACHE: paged})
    with pytest.raises(InvalidRequest, match="state_memory=2 holds 2 states"):
        patch(model, memory="16MiB", state_memory=2)
    handle = patch(model, memory="16MiB", state_memory=5)
    try:
        with pytest.raises(OutOfFrames, match="takes 3 state frames") as raised:
            model.generate(ids, **OPTIONS)
        assert "patch(model, state_memory=...)" in raised.value.__notes__[0]
        require_empty(handle)
        handle.model.generate(ids[:2], **OPTIONS)
        embeds = model.get_input_embeddings()(ids[:1])
        with PagedCache(model.config, pool=handle.pool) as paged, torch.no_grad():
            model(inputs_embeds=embeds, **{CACHE: paged})
            paged.crop(-5)
            with pytest.raises(InvalidRequest, match="their ids are not known"):
                model(ids[:1, :1], **{CACHE: paged})
    finally:
        handle.unpatch()


def test_a_host_that_is_too_old_serves_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.integrations.transformers.geometry._WITH_STATE", ())
    with pytest.raises(InvalidRequest, match="pages serve full and sliding attention, and it has LinearAttentionLayer"):
        Geometry.of(hybrid_of("qwen3_5_text").config)


def test_unpatch_lets_the_host_refuse_drafts_again() -> None:
    model = hybrid_of("qwen3_5_text")
    patch(model, memory="16MiB")
    assert not model._is_stateful
    unpatch(model)
    assert model._is_stateful
