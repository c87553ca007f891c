"""Trust: models that change behind the pages, threads in a full pool, odd masks, copies, interrupts, bad input."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pagedkv.errors import InvalidRequest, OutOfFrames
from pagedkv.integrations.transformers import NAME, PagedCache, Pool, patch, unpatch
from pagedkv.integrations.transformers.identity import identity_of
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def model() -> Any:
    return model_of("llama", num_hidden_layers=2)


@pytest.fixture
def llama(model: Any) -> Any:
    return model


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool((found == expected).all())


# -- a model that changes ----------------------------------------------------------------------------------------------


def step_with(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], None]:
    def train(model: Any) -> None:
        one = optimizer(model.parameters())
        model(**prompts(8, (0,)), labels=torch.ones(1, 8, dtype=torch.long), use_cache=False).loss.backward()
        one.step()
        one.zero_grad(set_to_none=True)

    return train


def replace_at_the_same_address(model: Any) -> None:
    projection = model.model.layers[0].self_attn.k_proj
    address, shape = projection.weight.data_ptr(), projection.weight.shape
    del projection.weight
    projection.weight = torch.nn.Parameter(torch.randn(shape))
    assert projection.weight._version == 0
    del address  # the allocator usually gives it again


def through_data(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.neg_()


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, output: output + 1)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(step_with(lambda p: torch.optim.SGD(p, lr=0.5)), id="sgd"),
        pytest.param(step_with(lambda p: torch.optim.AdamW(p, lr=0.5, fused=True)), id="fused adamw"),
        replace_at_the_same_address,
        through_data,
        hook,
    ],
)
def test_pages_of_a_model_that_changed_are_not_found(model: Any, patched: Any, change: Callable[[Any], None]) -> None:
    inputs = prompts(40, (0,))
    model.generate(**inputs, **OPTIONS)
    change(model)
    with torch.no_grad(), PagedCache(model.config, pool=patched.pool) as cache:
        assert cache.find(**inputs) == 0
    found = model.generate(**inputs, **OPTIONS)
    patched.pool.forget()
    assert same(found, model.generate(**inputs, **OPTIONS))


def test_a_model_that_did_not_change_finds_its_pages(model: Any, patched: Any) -> None:
    inputs = prompts(40, (0,))
    model.generate(**inputs, **OPTIONS)
    with PagedCache(model.config, pool=patched.pool) as cache:
        assert cache.find(**inputs) == 32


def test_a_model_in_training_mode_shares_no_pages_and_can_be_patched() -> None:
    model = model_of("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    handle = patch(model, memory="16MiB")
    assert all(part.training for part in model.modules())
    inputs = prompts(40, (0,))
    model.generate(**inputs, **OPTIONS)
    with PagedCache(model.config, pool=handle.pool) as cache:
        assert cache.find(**inputs) == 0
    model.eval()
    found = model.generate(**inputs, **OPTIONS)
    handle.unpatch()
    assert same(found, model.generate(**inputs, **OPTIONS))


def test_autocast_is_part_of_what_a_prompt_finds(model: Any, patched: Any) -> None:
    inputs = prompts(40, (0,))
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**inputs, **OPTIONS)
    with PagedCache(model.config, pool=patched.pool) as cache:
        assert cache.find(**inputs) == 0


def test_an_adapter_that_is_switched_in_a_conversation_leaves_no_pages(
    model: Any, patched: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", SimpleNamespace())
    layer = model.model.layers[0].self_attn.k_proj
    layer.base_layer, layer.active_adapters, layer.scaling = torch.nn.Identity().eval(), ["a"], {"a": 1.0}
    first = identity_of(model, b"")
    layer.scaling["a"] = 2.0
    assert identity_of(model, b"") != first
    inputs = prompts(40, (0,))
    talk = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
    layer.active_adapters = ["b"]
    more = torch.cat([talk.sequences, inputs["input_ids"]], 1)
    model.generate(more, **OPTIONS, past_key_values=talk.past_key_values)
    talk.past_key_values.close()
    layer.active_adapters = ["a"]
    with PagedCache(model.config, pool=patched.pool) as cache:
        assert cache.find(more) == 48  # of the 51 tokens that were stored with adapter a


def test_layers_that_peft_hooks_for_the_rows_of_a_call_share_no_pages(
    model: Any, patched: Any, monkeypatch: Any
) -> None:
    """PEFT gives each row of a call its adapter in this way, and equal tokens of two rows then have other K and V."""
    monkeypatch.setitem(__import__("sys").modules, "peft", SimpleNamespace())

    def hook(_: Any, inputs: Any, rows: list[float]) -> Any:
        return (inputs[0] * torch.tensor(rows).repeat(len(inputs[0]) // 2)[:, None, None],)

    hook.__module__ = "peft.tuners.lora.model"
    inputs = {name: value.repeat(2, 1) for name, value in prompts(40, (0,)).items()}
    handle = model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(functools.partial(hook, rows=[1.0, -3.0]))
    found = model.generate(**inputs, **OPTIONS)
    with PagedCache(model.config, pool=patched.pool) as cache:
        assert cache.find(**inputs) == 0
    patched.unpatch()
    assert same(found, model.generate(**inputs, **OPTIONS))
    handle.remove()
    assert not same(found[:1], found[1:])


def test_a_prompt_whose_inputs_another_makes_is_computed_whole(model: Any, patched: Any, monkeypatch: Any) -> None:
    """PEFT puts the tokens of prompt tuning before a prompt in this way."""
    inputs, own = prompts(40, (0,)), model.prepare_inputs_for_generation
    model.generate(**inputs, **OPTIONS)
    columns = []

    @functools.wraps(own)
    def prepare(*args: Any, **options: Any) -> Any:
        made = own(*args, **options)
        columns.append(made["input_ids"].shape[1])
        return made

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepare)
    model.generate(**inputs, **OPTIONS)
    assert columns[0] == 40
    columns.clear()
    monkeypatch.setattr(model, "prepare_inputs_for_generation", own)
    counted = model.model.register_forward_pre_hook(
        lambda _, __, given: columns.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(**inputs, **OPTIONS)
    model.generate(**inputs, **OPTIONS)
    assert columns[12] == 8
    counted.remove()


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_model_of_another_dtype_is_told_to_patch_again(name: str) -> None:
    model = model_of(name, num_hidden_layers=1)
    patch(model, memory="1MiB")
    with pytest.raises(InvalidRequest, match=r"is torch.bfloat16 on cpu, and was torch.float32"):
        model.bfloat16().generate(**prompts(8, (0,)), **OPTIONS)
    unpatch(model)
    patch(model, memory="1MiB").unpatch()


def test_a_pool_made_in_inference_mode_serves_outside_of_it(model: Any) -> None:
    inputs = prompts(20, (0,))
    expected = model.generate(**inputs, **OPTIONS)
    with torch.inference_mode():
        handle = patch(model, memory="1MiB")
        assert same(model.generate(**inputs, **OPTIONS), expected)
    assert same(model.generate(**inputs, **OPTIONS), expected)
    handle.unpatch()


# -- options of the model's own generation config ----------------------------------------------------------------------


def test_prompt_lookup_by_the_models_own_options_is_the_hosts(model: Any) -> None:
    model.generation_config.prompt_lookup_num_tokens = 5
    inputs = prompts(40, (0,))
    expected = model.generate(**inputs, **OPTIONS)
    handle = patch(model, memory="16MiB")
    for _ in range(2):
        assert same(model.generate(**inputs, **OPTIONS), expected)
    handle.unpatch()


def test_hidden_states_are_those_of_the_whole_prompt(model: Any, patched: Any) -> None:
    for _ in range(2):
        result = model.generate(**prompts(40, (0,)), **OPTIONS, output_hidden_states=True, return_dict_in_generate=True)
        assert result.hidden_states[0][0].shape[1] == 40


# -- masks -------------------------------------------------------------------------------------------------------------

LEFT = prompts(40, (0, 9))["attention_mask"]
RIGHT, MIDDLE, NONE = (torch.ones_like(LEFT) for _ in range(3))
RIGHT[1, 31:], MIDDLE[1, 10:14], NONE[1] = 0, 0, 0
MASKS = {
    "left": LEFT, "left bool": LEFT.bool(), "left float": LEFT.float(), "left uint8": LEFT.byte(), "right": RIGHT,
    "right bool": RIGHT.bool(), "middle": MIDDLE, "middle bool": MIDDLE.bool(), "no token": NONE,
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "mistral"])
def test_masks_of_every_kind_give_the_tokens_of_the_host(name: str) -> None:
    model, ids = model_of(name), prompts(40, (0, 9))["input_ids"]
    handle = None
    for options in (OPTIONS, OPTIONS | {"num_beams": 2}):
        expected = {kind: model.generate(ids, attention_mask=mask, **options) for kind, mask in MASKS.items()}
        handle = patch(model, memory="16MiB")
        for kind, mask in MASKS.items():
            for _ in range(2):
                assert same(model.generate(ids, attention_mask=mask, **options), expected[kind]), kind
        handle.unpatch()


def test_a_mask_that_shows_columns_of_padding_is_refused(model: Any, patched: Any) -> None:
    inputs = prompts(8, (0, 2))
    other = torch.cat([inputs["attention_mask"].flip(1), torch.ones(2, 1, dtype=torch.long)], 1)
    one = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad(), PagedCache(model.config, pool=patched.pool) as cache:
        model(**inputs, past_key_values=cache)
        rows = torch.ones(3, 9, dtype=torch.long)
        for mask, why in ((other, "were padding in"), (rows, "has 3 rows and the batch 2"), (None, "has no attention")):
            with pytest.raises(InvalidRequest, match=why):
                model(input_ids=one, attention_mask=mask, past_key_values=cache)
        mask = torch.cat([inputs["attention_mask"], one], 1)
        again = model(input_ids=one, attention_mask=mask, past_key_values=cache).logits
        cache.crop(-1)
        assert torch.equal(model(input_ids=one, attention_mask=mask, past_key_values=cache).logits, again)


def test_a_cache_of_one_row_takes_no_batch_of_two(model: Any, patched: Any) -> None:
    with torch.no_grad(), PagedCache(model.config, pool=patched.pool) as cache:
        model(**prompts(8, (0,)), past_key_values=cache)
        with pytest.raises(InvalidRequest, match="has 2 rows and the cache 1"):
            model(input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache)


# -- threads and models ------------------------------------------------------------------------------------------------


def test_threads_in_a_full_pool_undo_no_step_of_another(model: Any) -> None:
    """A step that lacks frames makes other caches commit. It leaves alone those in the middle of a forward pass."""
    handle = patch(model, memory="128KiB", prefix_cache=False)
    frames = handle.pool.kv.num_frames
    one, two = prompts(16 * (frames // 2), (0,)), prompts(16 * (frames - frames // 2) + 1, (0,), seed=1)
    expected = model.generate(**one, **(OPTIONS | {"max_new_tokens": 1}))
    inside, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            assert go.wait(60)

    found = []
    held = model.model.layers[0].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: found.append(model.generate(**one, **(OPTIONS | {"max_new_tokens": 1}))))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(OutOfFrames):
        model.generate(**two, **OPTIONS)
    go.set()
    thread.join()
    held.remove()
    assert same(found[0], expected)
    handle.unpatch()


def test_two_models_of_one_config_object_serve_two_threads(model: Any) -> None:
    other = LlamaForCausalLM(model.config).eval()
    inputs, own = prompts(20, (0,)), model.config._attn_implementation
    expected = [each.generate(**inputs, **OPTIONS) for each in (model, other)]
    handles = [patch(each, memory="1MiB") for each in (model, other)]
    found: list[bool] = []

    def work(each: Any, tokens: torch.Tensor) -> None:
        for _ in range(8):
            found.append(same(each.generate(**inputs, **OPTIONS), tokens))

    threads = [threading.Thread(target=work, args=args) for args in zip((model, other), expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, model.config._attn_implementation) == ([True] * 16, own)
    for handle in handles:
        handle.unpatch()


def test_a_dropped_cache_gives_its_frames_back_at_once(model: Any) -> None:
    handle = patch(model, memory="256KiB")
    gc.collect()
    gc.disable()
    try:
        for seed in range(12):  # 13 of 32 frames each
            result = model.generate(**prompts(200, (0,), seed), **OPTIONS, return_dict_in_generate=True)
            del result
    finally:
        gc.enable()
    handle.unpatch()


# -- interrupts, copies, bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupted_pass_without_hooks_is_undone_and_said(model: Any, first: bool) -> None:
    ids, step = prompts(8, (0,))["input_ids"], torch.tensor([[5]])
    new = ids if first else step
    with torch.no_grad(), PagedCache(model.config, memory="1MiB") as cache:
        expected = logits_of(model, [ids] if first else [ids, step])
        if not first:
            model(input_ids=ids, past_key_values=cache)

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        held = model.model.layers[0].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=new, past_key_values=cache)
        held.remove()
        with pytest.raises(InvalidRequest, match=r"layers \[1\] had stored no K and V"):
            model(input_ids=new, past_key_values=cache)
        found = model(input_ids=new, past_key_values=cache).logits
        assert torch.allclose(found, expected, atol=1e-4)


def logits_of(model: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    cache = None
    for part in parts:
        result = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
    logits: torch.Tensor = result.logits
    return logits


def test_a_patched_model_is_not_copied_and_keeps_a_wrapper_of_the_user(model: Any) -> None:
    handle = patch(model, memory="1MiB")
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidRequest, match="cannot be copied or pickled"):
            make(model)
    inner = model.generate
    model.generate = lambda *args, **options: inner(*args, **options)
    wrapper = model.generate
    handle.unpatch()
    assert model.generate is wrapper
    assert "_pagedkv" not in vars(model)
    model.generate(**prompts(8, (0,)), **OPTIONS)  # that of the host
    del model.generate
    copy.deepcopy(model)


def test_a_call_without_tokens_is_refused(model: Any, patched: Any) -> None:
    with torch.no_grad(), PagedCache(model.config, pool=patched.pool) as cache:
        for inputs in ({}, {"input_ids": torch.ones(0, 3, dtype=torch.long)}):
            with pytest.raises(InvalidRequest, match="a batch of no rows"):
                model(**inputs, past_key_values=cache)


def test_bad_input_is_refused_in_words(model: Any) -> None:
    other = Pool(model_of("llama", num_hidden_layers=3).config)
    for call, words in (
        (lambda: patch(model, pool=5), "patch got a int as its pool"),  # type: ignore[arg-type]
        (lambda: patch(model, pool=other), "made for another config"),
        (lambda: patch(model, prefix_cache="no"), "prefix_cache is 'no'"),  # type: ignore[arg-type]
        (lambda: unpatch(3), "unpatch of a int that is not patched"),
        (lambda: PagedCache(None), "got a NoneType as the config"),
        (lambda: PagedCache(model.config, memory="lots"), "'lots' is not an amount of memory"),
        (lambda: PagedCache(model), "give model.config"),
        (lambda: PagedCache(model.config, pool=5), "PagedCache got a int as its pool"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest, match=words):
            call()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert model.config._attn_implementation != NAME
