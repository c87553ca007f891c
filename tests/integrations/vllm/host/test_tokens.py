"""Greedy tokens of vLLM with our attention and our blocks are those of vLLM alone, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.vllm.host.engines import MODELS, adapter_in, encoder_in, generate, model_in, prompts

OURS = {"PAGEDKV_VLLM": "1"}
HAS_AMX = torch.cpu._is_amx_tile_supported()  # then vLLM keeps its own linear layers
SCHEDULER = {"scheduler_cls": "pagedkv.integrations.vllm.scheduler.PagedScheduler"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    """Return a function that gives what vLLM alone computes, once for each model."""
    known: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in known:
            known[name] = generate(model_in(folder, name))
            assert "by pagedkv" not in known[name]["log"]
        return known[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_our_attention_gives_the_tokens_of_vllm(name: str, stock: Any, folder: Path) -> None:
    expected = stock(name)
    found = generate(folder / name, environ=OURS)
    assert "Attention by pagedkv" in found["log"]
    assert ("Linear layers by pagedkv" in found["log"]) != HAS_AMX
    assert found["tokens"] == expected["tokens"]
    assert found["hits"] == expected["hits"]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_our_blocks_give_the_tokens_of_vllm_in_a_pool_that_preempts(name: str, folder: Path) -> None:
    """Answers are longer than a block, so requests outgrow the pool. Equal prompts are neighbours: there are hits."""
    model = model_in(folder, name)
    job = {"prompts": [ids for ids in prompts(16) for _ in range(2)], "max_tokens": 160}
    roomy = generate(model, job=job)
    few = {"job": job, "num_gpu_blocks_override": 48}
    plain = generate(model, **few)
    found = generate(model, environ=OURS, **few, **SCHEDULER)
    assert "Blocks by pagedkv" in found["log"]
    assert found["tokens"] == plain["tokens"] == roomy["tokens"]
    assert found["preempted"] == plain["preempted"] > roomy["preempted"] == 0
    assert sum(map(sum, plain["hits"])) > 0
    assert sum(map(sum, found["hits"])) >= sum(map(sum, plain["hits"]))


def test_additional_config_chooses_the_policy_and_a_wrong_one_is_refused(folder: Path) -> None:
    job = {"prompts": prompts(4, 300), "max_tokens": 4, "rounds": 1}
    run: dict[str, Any] = {"model": model_in(folder, "llama"), "environ": OURS, "job": job, **SCHEDULER}
    found = generate(**run, additional_config={"pagedkv_policy": "2q"})
    assert "cached), evicted by 2q" in found["log"]
    with pytest.raises(AssertionError, match="InvalidRequest: 'pagedkv_policy' of additional_config: policy is 'fifo'"):
        generate(**run, additional_config={"pagedkv_policy": "fifo"})


def test_a_block_size_that_the_kernels_of_vllm_refuse(stock: Any, folder: Path) -> None:
    found = generate(folder / "llama", environ=OURS, block_size=16, num_gpu_blocks_override=3200)
    assert "Attention by pagedkv" in found["log"]
    assert found["tokens"] == stock("llama")["tokens"]


def test_the_compiled_model_gives_the_same_tokens(stock: Any, folder: Path) -> None:
    found = generate(folder / "llama", environ=OURS, enforce_eager=False)
    assert "Attention by pagedkv" in found["log"]
    assert found["tokens"] == stock("llama")["tokens"]


def test_a_lora_for_every_second_prompt_gives_the_tokens_of_vllm(folder: Path) -> None:
    """Prompts come in pairs: one without the adapter, and the same with it.

    vLLM on a CPU reads "no adapter" as the last place for adapters, so that place must stay empty.
    """
    model, pairs = model_in(folder, "llama"), [ids for ids in prompts(8, 1200) for _ in range(2)]
    job = {"prompts": pairs, "max_tokens": 16, "adapter": str(adapter_in(folder))}
    options = {"job": job, "enable_lora": True, "max_loras": 2}
    plain, found = (generate(model, environ=environ, **options) for environ in ({}, OURS))
    assert "Attention by pagedkv" in found["log"]
    assert ("Linear layers by pagedkv" in found["log"]) != HAS_AMX
    assert found["tokens"] == plain["tokens"]
    assert sum(found["hits"][1]) > 0
    assert all(map(list.__ne__, found["tokens"][0][::2], found["tokens"][0][1::2]))


def test_two_workers_with_half_of_the_heads_each_give_the_tokens_of_vllm(folder: Path) -> None:
    model, job = model_in(folder, "llama"), {"prompts": prompts(8, 1200), "max_tokens": 16}
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    plain, found = (generate(model, environ=cores | environ, job=job, tensor_parallel_size=2) for environ in ({}, OURS))
    assert found["log"].count("Attention by pagedkv") == 2
    assert found["tokens"] == plain["tokens"]
    assert sum(found["hits"][1]) > 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_log_probabilities_in_bfloat16_are_as_near_as_those_of_vllm(name: str, folder: Path) -> None:
    """Of prompts, teacher-forced, in chunks: the mean distance from float32."""
    model = model_in(folder, name)
    job = {"prompts": prompts(8, 2000), "max_tokens": 1, "rounds": 1, "logprobs": 0}
    runs = [generate(model, job=job)["logprobs"][0]]
    runs += [generate(model, environ=environ, job=job, dtype="bfloat16")["logprobs"][0] for environ in ({}, OURS)]
    exact, plain, ours = (torch.tensor([one for prompt in run for one in prompt]) for run in runs)
    assert len(exact) > 3000
    noise = [(of - exact).abs().mean().item() for of in (plain, ours)]
    assert 0.0 < noise[1] <= 1.05 * noise[0], noise


def test_8_bit_keys_and_values_are_as_near_as_those_of_vllm(folder: Path) -> None:
    """Without AVX-512, vLLM refuses 8 bits, so our definition takes its place."""
    model, options = model_in(folder, "llama"), {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    job = {"prompts": prompts(8, 2000), "max_tokens": 1, "rounds": 1, "logprobs": 0}
    exact, other = generate(model, job=job)["logprobs"][0], dict[str, str]()
    if not torch.cpu._is_avx512_supported():
        with pytest.raises(AssertionError, match="FP8 KV cache on CPU requires x86 with AVX-512 or AMX"):
            generate(model, job=job, **options)
        other = OURS | {"PAGEDKV_KERNELS": "reference"}
    runs = [generate(model, environ=environ, job=job, **options)["logprobs"][0] for environ in (other, OURS)]
    noise = [
        sum(abs(x - y) for a, b in zip(run, exact, strict=True) for x, y in zip(a, b, strict=True)) for run in runs
    ]
    assert 0.0 < noise[1] <= 1.05 * noise[0], noise


def test_an_encoder_stays_with_vllm(folder: Path) -> None:
    model = encoder_in(folder)
    job = {"prompts": prompts(6, 300), "embed": True}
    options = {
        "runner": "pooling",
        "max_model_len": 512,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    }
    plain = generate(model, job=job, **options)
    found = generate(model, environ=OURS, job=job, **options)
    assert found["embeddings"] == plain["embeddings"]
