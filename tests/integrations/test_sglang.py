"""PagedStorage by the interface of SGLang's HiCacheStorage, called as its cache controller calls it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.sglang import PagedStorage
from pagedkv.tiers.shared.records import Client
from tests.tiers.stores import Memory, MemoryClient, Redis

KEYS = [f"{number:064x}" for number in range(5)]


def config(**changes: Any) -> SimpleNamespace:
    """Return what SGLang gives: HiCacheStorageConfig of one GPU."""
    facts = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "a/model",
        "extra_config": None,
    }  # fmt: skip
    return SimpleNamespace(**(facts | changes))


def storage(
    client: Client | None = None, *, dtype: torch.dtype = torch.bfloat16, layout: str = "page_first", **changes: Any
) -> PagedStorage:
    """Return a backend to which SGLang has told its host pool."""
    extra = {"weights": "sha"} | (changes.pop("extra_config", None) or {})
    made = PagedStorage(config(extra_config=extra, **changes), client=client)
    page = torch.zeros(24, dtype=dtype)
    pool = SimpleNamespace(dtype=dtype, layout=layout, page_size=1, layer_num=2, get_dummy_flat_data_page=lambda: page)
    made.register_mem_pool_host(pool)
    return made


def pages(count: int = len(KEYS)) -> list[torch.Tensor]:
    return [torch.full((2, 3, 4), number + 0.5, dtype=torch.bfloat16) for number in range(count)]


def empty() -> list[torch.Tensor]:
    return [torch.zeros(2, 3, 4, dtype=torch.bfloat16) for _ in KEYS]


def test_pages_come_back_as_they_were_in_another_process(tmp_path: Path) -> None:
    store = Redis(tmp_path)
    extra = {"store": f"redis:{store.url}"}
    one, two = (storage(extra_config=extra) for _ in range(2))
    assert one.batch_set(KEYS[:4], pages(4))
    assert one.batch_exists(KEYS) == two.batch_exists(KEYS) == 4
    found = two.batch_get(KEYS, empty())
    assert [page is not None for page in found] == [True] * 4 + [False]
    assert all(torch.equal(page, want) for page, want in zip(found[:4], pages(4), strict=True) if page is not None)
    single = two.get(KEYS[1], torch.zeros(2, 3, 4, dtype=torch.bfloat16))
    assert torch.equal(single, pages()[1])
    assert (two.exists(KEYS[3]), two.exists(KEYS[4])) == (True, False)
    store.close()
    assert two.batch_exists(KEYS) == 0  # a server that is gone has nothing, and raises nothing
    assert two.batch_get(KEYS, empty()) == [None] * 5
    assert two.set(KEYS[0], pages()[0]) is False


@pytest.mark.parametrize(
    "other",
    [
        {"extra_config": {"weights": "b"}},
        {"tp_rank": 1, "tp_size": 2},
        {"is_page_first_layout": False},
        {"pp_rank": 1},
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
    ],
    ids=["weights", "ranks", "first", "stage", "dtype", "layout"],
)
def test_servers_that_differ_share_nothing(other: dict[str, Any]) -> None:
    store = Memory(Path())
    storage(store.client()).batch_set(KEYS, pages())
    assert storage(store.client(), **other).batch_exists(KEYS) == 0


def test_ranks_of_a_model_with_latents_share_their_pages() -> None:
    store = Memory(Path())
    storage(store.client(), is_mla_model=True, tp_size=2).batch_set(KEYS, pages())
    other = storage(store.client(), is_mla_model=True, tp_size=2, tp_rank=1)
    assert other.batch_exists(KEYS) == 5


def test_a_flipped_bit_and_a_page_of_another_size_are_misses() -> None:
    store = Memory(Path())
    ours = storage(store.client())
    ours.batch_set(KEYS, pages())
    one = Memory(Path())
    storage(one.client()).set(KEYS[2], pages()[2])
    [name] = one.records()
    record = bytearray(store.read(name))
    record[-1] ^= 1
    store.write(name, bytes(record))
    targets = empty()
    assert [page is not None for page in ours.batch_get(KEYS, targets)] == [True, True, False, False, False]
    assert not targets[2].any()  # a damaged page does not reach its tensor
    assert ours.get(KEYS[0], torch.zeros(7)) is None


def test_a_store_that_fails_costs_a_prefix_and_no_thread_of_sglang() -> None:
    client = MemoryClient({})
    client.find = client.get = Mock(side_effect=TimeoutError("no answer"))  # type: ignore[method-assign]
    ours = storage(client)
    assert ours.batch_exists(KEYS) == 0
    assert ours.batch_get(KEYS, empty()) == [None] * 5
    assert ours.batch_set(KEYS, pages()) is False


def test_a_config_without_store_or_weights_is_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match="names no store"):
        PagedStorage(config())
    with pytest.raises(InvalidRequest, match="redis:URL"):
        PagedStorage(config(extra_config={"store": "ftp://there"}))
    with pytest.raises(InvalidRequest, match="names no weights"):
        PagedStorage(config(), client=MemoryClient({}))
    with pytest.raises(InvalidRequest, match="register_mem_pool_host"):
        PagedStorage(config(extra_config={"weights": "sha"}), client=MemoryClient({})).batch_get(KEYS, empty())
    with pytest.raises(InvalidRequest, match="a tensor for each page"):
        storage(MemoryClient({})).batch_get(KEYS)
