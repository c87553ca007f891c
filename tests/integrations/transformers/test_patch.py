"""patch() and unpatch(): what is computed once, what is refused, and what is left after errors and interrupts.

An import leaves no trace, and unpatch() and Pool.close() leave neither memory nor names.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from pagedkv.errors import InvalidRequest, OutOfFrames
from pagedkv.integrations.transformers import PagedCache, Patched, Pool, patch, unpatch
from pagedkv.integrations.transformers.geometry import CACHE
from tests.integrations.transformers.families import OPTIONS, model_of, prompts


class Counter:
    """Counts the columns that a model computes."""

    def __init__(self, model: Any) -> None:
        self.columns = self.tokens = 0
        model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if (ids := kwargs.get("input_ids")) is not None:
            self.columns += ids.shape[1]
            self.tokens += ids.numel()


@pytest.fixture
def model() -> Any:
    """Return a model that a test may leave changed."""
    return model_of("llama", num_hidden_layers=2)


def idle(handle: Patched) -> bool:
    """Return whether no sequence holds a frame, and the laws of core hold."""
    handle.pool.kv.check()
    return handle.pool.stats().mapped == 0 and not handle.pool.kv.has_plans


def test_a_known_prefix_is_not_computed_again(llama: Any, patched: Patched) -> None:
    first, counter = prompts(40, (0, 0)), Counter(llama)
    llama.generate(**first, **OPTIONS)
    longer = {name: torch.cat([value, value[:, :5]], 1) for name, value in first.items()}
    before = counter.columns
    llama.generate(**longer, **OPTIONS)
    assert counter.columns - before == 45 - 32 + 11  # two pages of 16 are known
    assert idle(patched)


def test_the_answer_is_part_of_the_next_prompt(llama: Any, patched: Patched) -> None:
    """A conversation: the tokens that were generated are known too."""
    counter = Counter(llama)
    answer = llama.generate(**prompts(40, (0,)), max_new_tokens=30, do_sample=False)
    before = counter.columns
    llama.generate(input_ids=torch.cat([answer, answer[:, :3]], 1), **OPTIONS)
    assert counter.columns - before == 73 - 64 + 11


def test_a_prompt_of_several_beams_is_computed_once_and_its_pages_are_shared(llama: Any, patched: Patched) -> None:
    counter = Counter(llama)
    llama.generate(**prompts(160, (0,)), num_beams=4, **OPTIONS)
    assert counter.tokens <= 159 + 4 * 12
    assert patched.pool.stats().peak_mapped <= 10 + 4 * 2
    assert idle(patched)


@pytest.mark.parametrize("name", ["mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_rows_with_windows_give_pages_back_and_begin_at_the_column_that_all_know(name: str) -> None:
    model, inputs = model_of(name), prompts(200, (0, 7))
    expected = model.generate(**inputs, **OPTIONS)
    handle, counter = patch(model, memory="16MiB"), Counter(model)
    model.generate(input_ids=inputs["input_ids"][:1], **OPTIONS)
    model.generate(input_ids=inputs["input_ids"][1:, 7 : 7 + 70], **OPTIONS)
    before = counter.columns
    assert model.generate(**inputs, **OPTIONS).equal(expected)
    assert counter.columns - before == 200 - (7 + 64) + 11
    assert idle(handle)


@pytest.mark.parametrize("what", ["positions", "embeds"])
def test_tokens_at_other_positions_or_without_ids_are_found_by_no_prompt(
    what: str, llama: Any, patched: Patched
) -> None:
    ids = prompts(40, (0,))["input_ids"]
    with torch.no_grad(), PagedCache(llama.config, pool=patched.pool) as cache:
        if what == "positions":
            llama(input_ids=ids, position_ids=torch.arange(40)[None] + 3, **{CACHE: cache})
        else:
            llama(inputs_embeds=llama.get_input_embeddings()(ids) * 2, **{CACHE: cache})
        assert cache.get_seq_length() == 40
    assert patched.pool.kv.lookup(ids[0].tolist()) == 0
    with torch.no_grad(), PagedCache(llama.config, pool=patched.pool) as cache:
        llama(input_ids=ids, **{CACHE: cache})
    assert patched.pool.kv.lookup(ids[0].tolist()) == 32


def test_angles_that_change_with_the_length_share_no_pages() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not Pool(LlamaConfig(rope_parameters=rope)).finds_prefixes
    assert Pool(LlamaConfig()).finds_prefixes


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_another_cache_is_served_by_the_host(cache: str, llama: Any, patched: Patched) -> None:
    inputs = prompts()
    options: dict[str, Any] = {
        "none": {"use_cache": False},
        "dynamic": {CACHE: DynamicCache(config=llama.config)},
        "static": {CACHE: StaticCache(config=llama.config, max_cache_len=64)},
    }[cache]
    taken = patched.pool.stats().peak_mapped
    found = llama.generate(**inputs, **OPTIONS, **options)
    assert patched.pool.stats().peak_mapped == taken
    assert found.equal(llama.generate(**inputs, **OPTIONS))


def test_a_copy_of_a_cache_continues_on_its_own(llama: Any, patched: Patched) -> None:
    inputs = prompts(40, (0,))
    answers = []
    with torch.no_grad(), PagedCache(llama.config, pool=patched.pool) as prompt:
        llama(**inputs, **{CACHE: prompt})
        for token in (3, 4, 3):
            with copy.deepcopy(prompt) as cache:
                ids = torch.cat([inputs["input_ids"], torch.tensor([[token]])], 1)
                answers.append(llama.generate(input_ids=ids, **OPTIONS, **{CACHE: cache}))
        assert prompt.get_seq_length() == 40
    assert answers[0].equal(answers[2])
    for token, answer in zip((3, 4), answers, strict=False):
        ids = torch.cat([inputs["input_ids"], torch.tensor([[token]])], 1)
        assert llama.generate(input_ids=ids, **OPTIONS, use_cache=False).equal(answer)
    assert idle(patched)


SLOW_KINDS = (pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_e4m3", "k8v4"))


@pytest.mark.parametrize("kv_dtype", ["int8", "k5v4", *SLOW_KINDS])
def test_quantised_pages_give_nearly_the_same_log_probabilities(kv_dtype: str) -> None:
    model, inputs = model_of("llama", head_dim=32), prompts(60, (0, 7))
    with torch.no_grad():
        expected = model(**inputs).logits[0].log_softmax(-1)
        handle = patch(model, memory="16MiB", kv_dtype=kv_dtype)
        with PagedCache(model.config, pool=handle.pool) as cache:
            found = model(**inputs, **{CACHE: cache}).logits[0].log_softmax(-1)
    assert 0 < (found - expected).abs().mean() < {"int8": 0.1, "fp8_e4m3": 0.4, "k8v4": 0.2, "k5v4": 0.2}[kv_dtype]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral", "gpt_oss"))])
@pytest.mark.parametrize("place", ["the call", "the config"])
def test_attentions_that_are_asked_for_are_the_hosts(name: str, place: str) -> None:
    model = model_of(name, num_hidden_layers=2, **{"sliding_window": 16} if name == "mistral" else {})
    model.set_attn_implementation("eager")  # sdpa has none to give
    inputs, options = prompts(20, (0, 9)), OPTIONS | {"return_dict_in_generate": True}
    if place == "the call":
        options["output_attentions"] = True
    else:
        model.config.output_attentions = True
    expected = model.generate(**inputs, **options)
    handle = patch(model, memory="16MiB")
    for _ in range(2):
        found = model.generate(**inputs, **options)
        assert found.sequences.equal(expected.sequences)
        steps = zip(found.attentions or (), expected.attentions or (), strict=True)
        for ours, theirs in [pair for step in steps for pair in zip(*step, strict=True)]:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert bool(found.attentions) == bool(expected.attentions) == (place == "the call")
    assert handle.attends_to_pages


@pytest.mark.parametrize(
    "option", ["assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "output_hidden_states"]
)
def test_a_call_that_needs_an_empty_cache_finds_no_prefix(
    option: str, patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, inputs = patched.model, prompts(40, (0, 0))
    llama.generate(**inputs, **OPTIONS)
    patched._generate = lambda *_, **given: given[CACHE].get_seq_length()  # the host's own generate
    assert llama.generate(**inputs, **OPTIONS) == 32
    assert llama.generate(**inputs, **OPTIONS, **{option: 2}) == 0
    with monkeypatch.context() as changed:  # by the model's own options
        changed.setattr(llama.generation_config, option, 2, raising=False)
        assert llama.generate(**inputs, **OPTIONS) == 0


def test_a_pool_that_is_full_says_how_to_enlarge_it(llama: Any) -> None:
    handle = patch(llama, memory="64KiB")
    with pytest.raises(OutOfFrames) as raised:
        llama.generate(**prompts(900, (0, 0)), **OPTIONS)
    assert "patch(model, memory=...)" in raised.value.__notes__[0]
    assert idle(handle)
    assert llama.generate(**prompts(20, (0, 0)), **OPTIONS).shape == (2, 32)
    handle.unpatch()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE}))
def test_a_cache_is_taken_by_its_old_name_and_by_its_new_one(llama: Any, patched: Patched, name: str) -> None:
    inputs = prompts(20, (0, 4))
    expected = llama.generate(**inputs, **OPTIONS)
    with PagedCache(llama.config, pool=patched.pool) as cache:
        with torch.no_grad():
            logits = llama(**inputs, **{name: cache}).logits
        assert cache.get_seq_length() == 20
        assert patched.pool.stats().mapped == 3  # attention to pages stores no padding: 20 and 16 tokens
    assert logits[:, -1].argmax(-1).equal(expected[:, 20])
    with PagedCache(llama.config, pool=patched.pool) as cache:
        result = llama.generate(**inputs, **OPTIONS, **{name: cache}, return_dict_in_generate=True)
        assert result.sequences.equal(expected)
        assert getattr(result, CACHE) is cache
    counter = Counter(llama)
    expected, before = llama.generate(**prompts(40, (0, 0)), **OPTIONS), counter.columns
    assert llama.generate(**prompts(40, (0, 0)), **OPTIONS, **{name: None}).equal(expected)
    assert counter.columns - before == 40 - 32 + 11  # None names no cache: two pages are known


@pytest.mark.parametrize(("error", "at"), [(RuntimeError, 3), (KeyboardInterrupt, 12)])
def test_a_forward_pass_that_raises_leaves_nothing(
    error: type[BaseException], at: int, llama: Any, patched: Patched
) -> None:
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    inputs = prompts()
    expected = llama.generate(**inputs, **OPTIONS)
    hook = llama.model.layers[1].register_forward_hook(fail)
    with pytest.raises(error):
        llama.generate(**inputs, **OPTIONS, num_beams=2)
    hook.remove()
    assert llama.config._attn_implementation == "sdpa"
    assert idle(patched)
    assert llama.generate(**inputs, **OPTIONS).equal(expected)


def test_threads_generate_with_one_model_and_with_two_of_one_config(llama: Any, patched: Patched) -> None:
    """Four threads and two models: our name is in the config that they share while one of them reads pages."""
    other, own = LlamaForCausalLM(llama.config).eval(), llama.config._attn_implementation
    second = patch(other, memory="16MiB")
    work = [(model, prompts(seed=seed)) for model in (llama, other) for seed in (1, 2)]
    expected = [model.generate(**inputs, **OPTIONS) for model, inputs in work]

    def twice(model: Any, inputs: dict[str, Any]) -> list[Any]:
        return [model.generate(**inputs, **OPTIONS) for _ in range(2)]

    with ThreadPoolExecutor(len(work)) as threads:
        found = threads.map(twice, *zip(*work, strict=True))
    for tokens, answers in zip(expected, found, strict=True):
        assert all(answer.equal(tokens) for answer in answers)
    assert llama.config._attn_implementation == own
    assert idle(patched)
    assert idle(second)
    second.unpatch()


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
            assert go.wait(300)

    found = []
    held = model.model.layers[0].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: found.append(model.generate(**one, **(OPTIONS | {"max_new_tokens": 1}))))
    thread.daemon = True  # a test that fails does not wait for it
    thread.start()
    assert inside.wait(300)
    with pytest.raises(OutOfFrames):
        model.generate(**two, **OPTIONS)
    go.set()
    thread.join()
    held.remove()
    assert found[0].equal(expected)


def test_a_dropped_cache_gives_its_frames_back_at_once(model: Any) -> None:
    patch(model, memory="256KiB")
    gc.collect()
    gc.disable()
    try:
        for seed in range(4):  # 13 of 32 frames each
            result = model.generate(**prompts(200, (0,), seed), **OPTIONS, return_dict_in_generate=True)
            del result
    finally:
        gc.enable()


def test_a_pool_made_in_inference_mode_serves_outside_of_it(model: Any) -> None:
    inputs = prompts(20, (0,))
    expected = model.generate(**inputs, **OPTIONS)
    with torch.inference_mode():
        patch(model, memory="1MiB")
        assert model.generate(**inputs, **OPTIONS).equal(expected)
    assert model.generate(**inputs, **OPTIONS).equal(expected)


def test_unpatch_keeps_a_wrapper_of_the_user(model: Any) -> None:
    handle = patch(model, memory="1MiB")
    inner = model.generate
    model.generate = lambda *args, **options: inner(*args, **options)
    wrapper = model.generate
    handle.unpatch()
    assert model.generate is wrapper
    assert "_pagedkv" not in vars(model)
    model.generate(**prompts(8, (0,)), **OPTIONS)  # that of the host


@pytest.mark.parametrize("backend", ["", *(pytest.param(n, marks=pytest.mark.slow) for n in ("eager", "inductor"))])
def test_a_compiled_forward_is_one_graph_and_gives_the_same_tokens(backend: str, monkeypatch: Any) -> None:
    model, inputs = model_of("llama", num_hidden_layers=2), prompts()
    expected = model.generate(**inputs, **OPTIONS)
    handle = patch(model, memory="16MiB")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []

    def count(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=count, dynamic=True))
    with torch.no_grad(), PagedCache(model.config, pool=handle.pool) as cache:
        model(**inputs, **{CACHE: cache})
    assert len(graphs) == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    if backend:
        monkeypatch.setattr(model, "forward", torch.compile(type(model).forward.__get__(model), backend=backend))
        assert model.generate(**inputs, **OPTIONS).equal(expected)
    handle.unpatch()
    torch._dynamo.reset()


def storages(handle: Patched) -> list[StorageWeakRef]:
    """Return weak references to the memory of all pages, and of their scales."""
    kv = handle.pool.kv
    tensors = [
        kv.storage.bytes,
        *(getattr(layer, name, None) for layer in kv for name in ("k", "v", "k_scale", "v_scale")),
    ]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor is not None]


def is_freed(references: list[StorageWeakRef]) -> bool:
    gc.collect()
    return all(reference.expired() for reference in references)


def used(name: str, **options: Any) -> tuple[Any, Patched, list[Any]]:
    """Return a model that is patched and has generated in several ways, its handle, and what the calls returned."""
    model = model_of(name)
    handle, inputs = patch(model, memory="16MiB", **options), prompts()
    kept = [
        model.generate(**inputs, **OPTIONS, return_dict_in_generate=True),  # with its cache
        model.generate(**inputs, **OPTIONS, num_beams=2),
        model.generate(input_ids=inputs["input_ids"][:1], **OPTIONS, prompt_lookup_num_tokens=4),
    ]
    with torch.no_grad():
        kept.append(model(**inputs, **{CACHE: PagedCache(model.config, pool=handle.pool)}))
    return model, handle, kept


FORMS = [
    ("llama", {"kv_dtype": "int8"}),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gpt_oss", {}), ("falcon", {"prefix_cache": False}))),
]


@pytest.mark.parametrize("end", ["unpatch", "close"])
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_unpatch_and_close_free_the_pages_while_the_model_lives(name: str, options: dict[str, Any], end: str) -> None:
    model, handle, kept = used(name, **options)
    references = storages(handle)
    assert not any(reference.expired() for reference in references)
    if end == "close":
        handle.pool.close()
        assert is_freed(references)
        with pytest.raises(InvalidRequest, match="the pool is closed"):
            model.generate(**prompts(), **OPTIONS)
        assert kept[0][CACHE].get_seq_length() == 0
    unpatch(model)
    assert is_freed(references)
    assert model.generate(**prompts(), **OPTIONS).equal(kept[0].sequences) or "kv_dtype" in options


def test_a_pool_of_the_user_outlives_unpatch_and_is_freed_by_close() -> None:
    model = model_of("llama")
    pool = Pool.for_model(model, memory="16MiB")
    handle = patch(model, pool=pool)
    model.generate(**prompts(), **OPTIONS)
    references = storages(handle)
    unpatch(model)
    assert not any(reference.expired() for reference in references)
    pool.close()
    assert is_freed(references)


_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
               "_forward_pre_hooks_with_kwargs", "_backward_hooks")  # fmt: skip


def looks(model: Any) -> dict[str, Any]:
    """Return what can be seen of a model: of each module the class, forward, attributes and hooks; its settings."""
    found: dict[str, Any] = {
        name: (
            type(module),
            module.forward.__func__,
            {key: id(value) for key, value in vars(module).items()},
            [dict(getattr(module, registry)) for registry in _REGISTRIES],
        )
        for name, module in model.named_modules()
    }
    config = model.config.get_text_config(decoder=True)
    return found | {
        "generate": model.generate.__func__,
        "attention": (model.config._attn_implementation, config._attn_implementation),
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "class": {key: id(value) for key, value in vars(type(model)).items() if not key.startswith("_abc")},
    }


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "falcon"))])
def test_a_model_looks_as_before_after_unpatch(name: str) -> None:
    model = model_of(name)
    model.generate(**prompts(), **OPTIONS)
    before = looks(model)
    handle = patch(model, memory="16MiB")
    for options in ({}, {"num_beams": 2}):
        model.generate(**prompts(), **OPTIONS, **options)
    assert model.generate.__module__ == "transformers.generation.utils"  # what functools.wraps leaves
    handle.unpatch()
    assert looks(model) == before


IMPORT = """
from transformers import masking_utils, modeling_utils
from pagedkv.integrations import transformers

def names():
    tables = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    return [transformers.NAME in table for table in tables]

assert names() == [False, False]
transformers.register()
assert names() == [True, True]
"""


@pytest.mark.slow
def test_an_import_registers_nothing() -> None:
    """In a process of its own: other tests patch models."""
    found = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
