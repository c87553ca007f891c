"""The pool: a frame is one run of bytes, a layer's slice is one stream, and no two elements share a byte."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import PagedKVCache
from pagedkv.cache.storage import Storage
from pagedkv.errors import InvalidRequest
from pagedkv.spec import KVSpec, parse_bytes
from pagedkv.tiers.tier_names import fingerprint

SPECS = [
    KVSpec(3, 2, 64, block_size=4),
    KVSpec(2, 1, 80, head_dim_v=24, block_size=5, dtype="float32"),
    KVSpec(2, 3, 64, block_size=3, kv_dtype="int8"),
    KVSpec(2, 2, 64, block_size=16, kv_dtype="fp8_e4m3"),
    KVSpec(1, 2, 96, block_size=7, kv_dtype="fp8_e5m2"),
    KVSpec(2, 2, 64, head_dim_v=32, block_size=4, kv_dtype="k8v4"),
    KVSpec(2, 2, 64, head_dim_v=32, block_size=4, kv_dtype="k5v4"),
]


def parts(storage: Storage, layer: int) -> dict[str, torch.Tensor]:
    return {name: part for name, part in vars(storage.layers[layer]).items() if part is not None}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_element_has_bytes_of_its_own_inside_its_frame(spec: KVSpec) -> None:
    """Fill one part of one layer in one frame: all of its own bytes change, and no other byte."""
    storage = Storage(spec, num_frames=3)
    covered = torch.zeros_like(storage.frames, dtype=torch.int64)
    for layer in range(spec.num_layers):
        for name, part in parts(storage, layer).items():
            for frame in range(3):
                storage.bytes.zero_()
                one = part[frame].view(torch.uint8) if part.element_size() == 1 else part[frame]
                one.fill_(1)
                changed = storage.frames != 0
                assert not changed[torch.arange(3) != frame].any()
                first, last = changed[frame].nonzero()[[0, -1], 0].tolist()
                offset, size = spec.regions()[name]
                start = layer * spec.layer_bytes + offset
                assert start <= first
                assert last < start + size
                covered[frame, start : start + size] += 1
    assert covered.max() == 1
    used = sum(size for _, size in spec.regions().values()) * spec.num_layers
    assert int(covered[0].sum()) == used == spec.bytes_per_token * spec.block_size


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_heads_page_is_one_contiguous_run(spec: KVSpec) -> None:
    layer = Storage(spec, num_frames=2).layers[0]
    for pool in (layer.k, layer.v):
        assert pool[1, :, 0].is_contiguous()
        # The next head follows at once. (Of a single head torch 2.8 gives the stride as 1.)
        assert pool[1].transpose(0, 1).is_contiguous()
    assert layer.k.data_ptr() % 64 == 0
    assert layer.v.data_ptr() % 64 == 0


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_poison_is_nan_where_there_is_one(spec: KVSpec) -> None:
    storage = Storage(spec, num_frames=2)
    storage.poison(torch.tensor([1]))
    for part in parts(storage, 0).values():
        if part.dtype.is_floating_point:
            assert part[1].float().isnan().all()
            assert not part[0].float().isnan().any()


def test_statistics_of_channels_belong_to_each_layer_and_to_the_name_of_the_bytes() -> None:
    spec, statistics = KVSpec(3, 2, 64, kv_dtype="k5v4"), torch.rand(3, 2, 2, 64) + 0.1
    cache = PagedKVCache(spec, layer_groups=[0, 0, 0], num_frames=4, calibration=statistics)
    cache.resize(6)
    for layer, of_layer in enumerate(statistics):
        kept = cache[layer].calibration
        assert kept is not None
        assert torch.equal(kept, of_layer)
    specs = [PagedKVCache(spec, num_frames=4, calibration=x).spec for x in (statistics, statistics + 1, None)]
    assert specs[0] == cache.spec
    assert len({fingerprint([x], [0, 0, 0], 64) for x in specs}) == 3


@pytest.mark.parametrize(
    ("kind", "calibration", "words"),
    [
        ("int8", torch.ones(2, 2, 2, 64), "given for KV of int8; only k8v4 and k5v4 take one"),
        ("k8v4", torch.ones(2, 2, 64), "it must be float32 [2 layers, 2, 2, 64]: a centre and a divisor"),
        ("k8v4", [1.0], "calibration is list; it must be float32"),
        ("k5v4", torch.zeros(2, 2, 2, 64), "divisors that are not positive"),
        ("k5v4", torch.full((2, 2, 2, 64), torch.inf), "numbers that are not finite"),
    ],
)
def test_statistics_that_fit_no_layer_are_refused(kind: str, calibration: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        PagedKVCache(KVSpec(2, 2, 64, kv_dtype=kind), num_frames=4, calibration=calibration)


def test_a_pool_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="give fewer frames"):
        Storage(KVSpec(100, 100, 256, block_size=256), num_frames=2**31 - 1)


@pytest.mark.parametrize(
    ("text", "expected"), [("2GiB", 2**31), ("512 MB", 512 * 10**6), ("1.5k", 1500), ("64", 64), (7, 7)]
)
def test_amounts_of_memory(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "2 parsecs", "GiB", "-1", "1ib", "9" * 400])
def test_text_that_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="like '2GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("amount", [2e6, None, b"1GiB", True, ["1GiB"]])
def test_an_amount_of_memory_is_an_int_or_text(amount: object) -> None:
    for ask in (parse_bytes, SPECS[0].frames_in):
        with pytest.raises(InvalidRequest, match="is not an amount of memory; give an int"):
            ask(amount)  # type: ignore[arg-type]


def test_frames_in_an_amount_of_memory() -> None:
    spec = KVSpec(32, 8, 128, block_size=16)
    assert spec.frame_bytes == 2 * 2**20
    assert spec.frames_in("40GiB") == 20480
    assert spec.bytes_per_token == 131072
    with pytest.raises(InvalidRequest, match="holds no frame: one takes 2097152 bytes"):
        spec.frames_in("1MiB")


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 0},
        {"num_layers": 2.0},
        {"num_layers": None},
        {"num_layers": True},
        {"block_size": 0},
        {"block_size": "16"},
        {"dtype": "float64"},
        {"dtype": ["float32"]},
        {"kv_dtype": "int3"},
        {"kv_dtype": ""},
        {"kv_dtype": ["int8"]},
        {"kv_dtype": "float32"},  # of a model that computes in bfloat16
        {"kv_dtype": "float16"},
        {"kv_dtype": "int4"},  # it was a kind once
        {"kv_dtype": "k5v4", "head_dim": 36},
        {"kv_dtype": "k8v4", "value_in_key": True},
        {"window": 0},
        {"sinks": 4},  # without a window
        {"keep": 4},
        {"window": 4, "keep": -1},
    ],
)
def test_impossible_geometries_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        KVSpec(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, **options})  # type: ignore[arg-type]


def test_a_spec_takes_integers_of_every_library_and_nothing_else() -> None:
    """Geometry often comes from an array or a checkpoint's tensor."""
    spec = KVSpec(
        np.int64(2), np.uint8(2), torch.tensor(64), head_dim_v=np.int32(32), block_size=np.int64(4), window=np.int16(9)
    )
    assert spec == KVSpec(2, 2, 64, head_dim_v=32, block_size=4, window=9)
    assert all(type(value) is not np.int64 for value in vars(spec).values())
    assert parse_bytes(np.int64(2**33)) == 2**33
    for wrong in (0, -1, True, np.True_, 2.0, "2", None, np.array([1, 2])):
        with pytest.raises(InvalidRequest, match="KVSpec.num_layers is .*; it must be an int of at least 1"):
            KVSpec(wrong, 2, 64)  # type: ignore[arg-type]
    for wrong in (["int8"], 8):
        with pytest.raises(InvalidRequest, match="must be"):
            KVSpec(2, 2, 64, kv_dtype=wrong)  # type: ignore[arg-type]
