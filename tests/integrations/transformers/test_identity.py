"""Identity: a prompt finds a page only if every layer has stored K and V of its tokens, and would compute the same now.

The inputs besides tokens are the user's salt, adapters, autocast, weights, hooks and forwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, patch
from pagedkv.integrations.transformers.geometry import CACHE
from pagedkv.integrations.transformers.identity import fingerprint, identity_of
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
PROMPT = prompts(40, (0,))["input_ids"]
NORM, LINEAR = LlamaRMSNorm.forward, torch.nn.Linear.forward
SALTS = (b"", b"tenant 1", b"tenant 1\n", b"\x00" * 8, b"autocast torch.bfloat16")


@pytest.fixture
def llama() -> Any:
    return model_of("llama")


def tokens(model: Any, **options: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(PROMPT, **OPTIONS, **options).tolist()
    return found


def known(handle: Patched, salt: bytes = b"") -> int:
    with PagedCache(handle.model.config, pool=handle.pool, salt=salt) as cache:
        return cache.find(PROMPT)


def fill(handle: Patched, salt: bytes = b"") -> None:
    with torch.no_grad(), PagedCache(handle.model.config, pool=handle.pool, salt=salt) as cache:
        handle.model(PROMPT, **{CACHE: cache})


# -- salts -------------------------------------------------------------------------------------------------------------


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


def test_a_salt_is_added_to_adapters() -> None:
    salt = SALTS[1]
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model_of("llama", num_hidden_layers=2), config, adapter_name="a")
    adapted.add_adapter("b", config)
    model = adapted.eval().get_base_model()
    first = model.model.layers[0].self_attn

    q, k = first.q_proj, first.k_proj
    ways: list[Callable[[], Any]] = [
        lambda: adapted.set_adapter("a"), lambda: adapted.set_adapter("b"),
        lambda: adapted.base_model.set_adapter(["a", "b"]),
        lambda: (q.set_adapter("a"), k.set_adapter("b")), lambda: (q.set_adapter("b"), k.set_adapter("a")),
        lambda: q.scale_layer(3.0), lambda: (adapted.set_adapter("a"), q.enable_adapters(False)),
        lambda: (q.enable_adapters(True), k.enable_adapters(False)),
    ]  # fmt: skip
    handle = patch(model, memory="16MiB")
    for way in ways:
        way()
        assert known(handle, salt) == 0
        fill(handle, salt)
        assert known(handle, salt) == 32
    k.enable_adapters(True)
    with adapted.disable_adapter():
        assert known(handle, salt) == 0
        fill(handle, salt)
    with adapted.disable_adapter():
        assert known(handle, salt) == 32
    with torch.no_grad():
        k.lora_B["a"].weight.mul_(2)
    assert known(handle, salt) == 0  # changed in place
    handle.unpatch()


def test_no_salt_names_what_another_salt_and_the_model_name_together(llama: Any) -> None:
    named: dict[tuple[bytes, Any], bytes] = {}
    for _ in range(3):  # the names of one round are the crafted salts of the next
        for salt in {*SALTS, *named.values()}:
            for dtype in (None, torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    named[salt, dtype] = identity_of(llama, salt)
    assert len(set(named.values())) == len(named) > 100
    assert identity_of(llama, b"") == identity_of(None, b"") == b""


@pytest.mark.parametrize("salt", ["tenant", 5, None, {0: b"image"}])
def test_a_salt_that_is_no_bytes_is_refused(salt: Any, llama: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"the salt of a PagedCache is a \w+; give bytes"):
        PagedCache(llama.config, salt=salt)


# -- forwards and hooks ------------------------------------------------------------------------------------------------


def on_an_instance(model: Any, factor: float) -> None:
    layer = model.model.layers[1].mlp
    layer.forward = lambda hidden: type(layer).forward(layer, hidden) * factor


def as_a_method(model: Any, factor: float) -> None:
    attention = model.model.layers[0].self_attn
    attention.forward = MethodType(
        lambda self, *args, **given: (type(self).forward(self, *args, **given)[0] * factor, None), attention
    )


def on_a_class(_: Any, factor: float) -> None:
    LlamaRMSNorm.forward = lambda self, hidden: NORM(self, hidden) * factor


def another_class(model: Any, factor: float) -> None:
    forward = {"forward": lambda self, hidden: LlamaMLP.forward(self, hidden) * factor}
    model.model.layers[0].mlp.__class__ = type("Scaled", (LlamaMLP,), forward)


def another_module(model: Any, factor: float) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(hidden) * factor

    model.model.layers[0].mlp.act_fn = Scaled().eval()


def a_hook(model: Any, factor: float) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:]))


def on_a_base(_: Any, factor: float) -> None:
    torch.nn.Linear.forward = lambda self, x: LINEAR(self, x) * factor


def a_hook_of_all(_: Any, factor: float) -> None:
    torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * factor if type(module) is LlamaMLP else None
    )


def a_hook_before_all(_: Any, factor: float) -> None:
    torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * factor,) if type(module) is LlamaMLP else None
    )


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


def at_the_same_address(model: Any, factor: float) -> None:
    projection = model.model.layers[0].self_attn.k_proj
    shape = projection.weight.shape
    del projection.weight  # the allocator usually gives its memory again
    projection.weight = torch.nn.Parameter(torch.randn(shape) * factor)


@pytest.fixture
def put_back() -> Iterator[None]:
    yield
    LlamaRMSNorm.forward, torch.nn.Linear.forward = NORM, LINEAR
    torch.nn.modules.module._global_forward_hooks.clear()
    torch.nn.modules.module._global_forward_pre_hooks.clear()


CHANGES = [
    on_an_instance, as_a_method, on_a_class, on_a_base, another_class, another_module, a_hook, a_hook_of_all,
    a_hook_before_all, in_place, through_data, by_an_optimizer, at_the_same_address,
]  # fmt: skip


@pytest.mark.usefixtures("put_back")
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


def test_modules_that_torch_has_compiled_are_served_and_their_pages_found(llama: Any) -> None:
    layer = llama.model.layers
    layer[0].mlp = torch.jit.trace(layer[0].mlp, torch.zeros(1, 2, 64))
    layer[1].mlp.act_fn = torch.jit.script(torch.nn.SiLU())
    expected = tokens(llama.eval())
    handle = patch(llama, memory="16MiB")
    for _ in range(2):
        assert tokens(llama) == expected
        assert known(handle) == 32
    layer[0].mlp = torch.jit.trace(layer[2].mlp, torch.zeros(1, 2, 64)).eval()
    assert known(handle) == 0
    handle.unpatch()


@pytest.mark.parametrize("change", [on_an_instance, a_hook])
def test_a_turn_with_another_forward_or_hook_leaves_no_pages(change: Callable[[Any, float], None], llama: Any) -> None:
    """The change is taken back before the cache is closed, so the model is as it was when the cache began."""
    more = torch.cat([llama.generate(PROMPT, **OPTIONS), PROMPT], 1)
    expected = llama.generate(more, **OPTIONS)
    handle = patch(llama, memory="16MiB")
    talk = llama.generate(PROMPT, **OPTIONS, return_dict_in_generate=True)
    assert talk[CACHE].get_seq_length() == 51  # all but the last token
    change(llama, -1.0)
    assert not llama.generate(more, **OPTIONS, **{CACHE: talk[CACHE]}).equal(expected)
    vars(llama.model.layers[1].mlp).pop("forward", None)
    llama.model.layers[0]._forward_pre_hooks.clear()
    assert llama.generate(more, **OPTIONS).equal(expected)
    talk[CACHE].close()
    assert llama.generate(more, **OPTIONS).equal(expected)
    handle.unpatch()


def test_a_forward_at_the_address_of_an_old_one_is_another(llama: Any) -> None:
    layer, seen = llama.model.layers[1].mlp, {}
    for _ in range(1000):
        layer.forward = lambda hidden: hidden
        address, found = id(layer.forward), fingerprint(llama)
        assert found == fingerprint(llama) != seen.get(address)
        if address in seen:
            return
        seen[address] = found
        del layer.forward
    pytest.fail("no function had the address of an old one")


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


# -- layers ------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("name", "number"), [("llama", 1), ("gemma2", 3), ("deepseek_v3", 2)])
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
    handle.unpatch()


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
        if self.how.does == "interrupt":
            raise KeyboardInterrupt
        return self.layer(hidden, **given) if self.how.does == "twice" else made


@pytest.fixture
def sometimes() -> Callable[[int], tuple[Any, SimpleNamespace]]:
    def make(number: int) -> tuple[Any, SimpleNamespace]:
        model, how = model_of("llama"), SimpleNamespace(does="")
        model.model.layers[number] = Sometimes(model.model.layers[number], how)
        return model.eval(), how

    return make


@pytest.mark.parametrize(("number", "does"), [(0, "skip"), (0, "raise"), (3, "skip"), (3, "interrupt")])
def test_a_call_that_skips_a_layer_or_ends_in_it_leaves_no_pages(number: int, does: str, sometimes: Any) -> None:
    model, how = sometimes(number)
    expected, handle = answer(model), patch(model, memory="16MiB")
    how.does = does
    for beams in (1, 2):
        if does == "skip":
            assert answer(model, num_beams=beams) != expected
        else:
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                answer(model, num_beams=beams)
        assert in_pages(handle) == 0
    how.does = ""
    assert answer(model) == expected
    handle.pool.kv.check()
    handle.unpatch()


def test_a_layer_that_stores_twice_is_refused(sometimes: Any) -> None:
    model, how = sometimes(1)
    expected = answer(model)
    handle = patch(model, memory="16MiB")
    how.does = "twice"
    with pytest.raises(InvalidRequest, match="layer 1 stores K and V twice in a forward pass"):
        answer(model)
    how.does = ""
    assert answer(model) == expected
    handle.unpatch()


def test_more_layers_than_the_pool_has_are_refused(llama: Any) -> None:
    with layers(llama, 2):
        handle, expected = patch(llama, memory="16MiB"), answer(llama)
    with pytest.raises(InvalidRequest, match="layer 2 stores K and V, and the pool was made for 2 layers"):
        answer(llama)
    with layers(llama, 2):
        assert answer(llama) == expected
    handle.unpatch()


@pytest.mark.parametrize("drafts", [[1], [1, 2, 1]])
@torch.no_grad()
def test_drafts_of_fewer_layers_that_are_cropped_away_leave_no_trace(
    drafts: list[int], llama: Any, patched: Patched
) -> None:
    ids, wrong = prompts(70, (0, 0))["input_ids"], torch.full((2, 4), 5)
    expected = llama(ids, use_cache=False).logits[:, 40:]
    with PagedCache(llama.config, pool=patched.pool) as cache:
        llama(ids[:, :40], **{CACHE: cache})
        found = []
        for columns in range(40, 70, 3):
            with layers(llama, 2):
                for number in drafts:
                    llama(wrong[:, :number], **{CACHE: cache})
            if sum(drafts) > 1:
                cache.crop(1 - sum(drafts))
                with pytest.raises(InvalidRequest, match="layer 2 has not computed all tokens of the cache"):
                    llama(wrong[:, :1], **{CACHE: cache})
            cache.crop(-1)
            found.append(llama(ids[:, columns : columns + 3], **{CACHE: cache}).logits)
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=2e-3, rtol=2e-3)
        with layers(llama, 2):
            llama(wrong[:, :1], **{CACHE: cache})
        cache.reset()  # all layers may begin again
        llama(ids, **{CACHE: cache})
    for row in range(2):
        with PagedCache(llama.config, pool=patched.pool) as cache:
            held = cache.find(ids[row : row + 1])
            found = llama(ids[row : row + 1, held:], **{CACHE: cache}).logits[0, -6:]
            torch.testing.assert_close(found, expected[row, -6:], atol=2e-3, rtol=2e-3)
