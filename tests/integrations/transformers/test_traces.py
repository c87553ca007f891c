"""Traces of the plug-in: an import leaves none, and unpatch() and Pool.close() leave neither memory nor names."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, Pool, patch, unpatch
from pagedkv.integrations.transformers.geometry import CACHE
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


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
