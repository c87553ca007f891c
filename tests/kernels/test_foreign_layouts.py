"""KVLayer.of_frames: other programs' memory is read and written where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import KVLayer, write_kv
from pagedkv.errors import InvalidRequest
from tests.cases import Case

if TYPE_CHECKING:
    from tests.kernels.conftest import Runner

K, S, D = 2, 16, 64
GEOMETRY = {"num_kv_heads": K, "head_dim": D, "block_size": S}
LAYOUTS = [(order, packed) for order in ("HND", "NHD") for packed in ("kv", "separate", "outermost")]
CASE = Case(q_lens=(1, 5), kv_lens=(40, 60), dtype="bfloat16", heads=(4, K), dims=(D, D))


def foreign(layer: KVLayer, order: str, packed: str) -> torch.Tensor:
    """Return a copy of a layer in the memory layout of another program."""
    k, v = (x if order == "NHD" else x.transpose(1, 2) for x in (layer.k, layer.v))
    if packed == "kv":
        return torch.cat([k, v], -1)
    return torch.stack([k, v], 1 if packed == "separate" else 0)


@pytest.mark.parametrize(("order", "packed"), LAYOUTS)
def test_attention_reads_foreign_frames_where_they_lie(order: Any, packed: Any, runner: Runner) -> None:
    built = CASE.build()
    memory = foreign(built.layer, order, packed)
    wanted = runner.attend(built)
    flat = memory if packed == "outermost" else memory.flatten(1)  # a pool of bytes has no inner dims
    for tensor in (memory, flat):
        layer = KVLayer.of_frames(tensor, **GEOMETRY, order=order, packed=packed)
        assert layer.k.shape == built.layer.k.shape
        assert layer.k.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert torch.equal(runner.attend(built._replace(layer=layer))[0], wanted[0])


@pytest.mark.parametrize(("order", "packed"), LAYOUTS)
def test_writes_change_the_rows_of_their_slots_alone(order: Any, packed: Any) -> None:
    memory = torch.zeros(foreign(CASE.build().layer, order, packed).shape)
    layer = KVLayer.of_frames(memory, **GEOMETRY, order=order, packed=packed)
    new = torch.ones(1, K, D)
    write_kv(new, 2 * new, layer, torch.tensor([S + 3]))
    assert memory.sum() == K * D * 3
    assert (layer.k[1, 3] == 1).all()
    assert (layer.v[1, 3] == 2).all()


def test_a_slice_of_a_larger_pool_is_viewed() -> None:
    """One layer of memory [F, L, 2, K, S, D], as pagedkv lays it out."""
    pool = torch.arange(3 * 4 * 2 * K * S * D).view(3, 4, 2, K, S, D).float()
    layer = KVLayer.of_frames(pool[:, 2], **GEOMETRY, packed="separate")
    assert torch.equal(layer.v[1, 5, 1], pool[1, 2, 1, 1, 5])


def test_heads_of_values_may_have_another_size_and_int4_counts_elements() -> None:
    layer = KVLayer.of_frames(torch.zeros(3, K, S, 96), num_kv_heads=K, head_dim=64, head_dim_v=32, block_size=S)
    assert (layer.k.shape[-1], layer.v.shape[-1]) == (64, 32)
    scales = torch.ones(())
    small = KVLayer.of_frames(torch.zeros(3, K, S, 64, dtype=torch.uint8), **GEOMETRY, k_scale=scales, v_scale=0.5)
    assert small.k.shape == (3, S, K, 32)
    assert small.v_scale is not None
    assert small.v_scale.item() == 0.5


@pytest.mark.parametrize(
    ("tensor", "options", "text"),
    [
        (
            torch.zeros(3, K, S, 100),
            {},
            r"\[3, 2, 16, 100\] .* is no view of frames \[F, 2, 16, 128\], which order HND",
        ),
        (torch.zeros(3, S, K, 2 * D), {}, r"no view of frames \[F, 2, 16, 128\]"),  # NHD
        (torch.zeros(3, 2 * K * S * 2 * D)[:, ::2], {}, "the last one contiguous"),
        (torch.zeros(3, 3, K, S, D), {"packed": "outermost"}, r"no view of frames \[2, F, 2, 16, 64\]"),
        (torch.zeros(2, 3, K, S, D), {"packed": "separate"}, r"no view of frames \[F, 2, 2, 16, 64\]"),
        (torch.zeros(3, K, S, 2 * D), {"order": "DHN"}, "order is 'DHN' and packed is 'kv'; order is HND or NHD"),
        (torch.zeros(3, K, S, 2 * D), {"packed": "vk"}, "packed one of kv, separate, outermost"),
        (torch.zeros(3, K, S, 2 * D), {"packed": ["kv"]}, r"packed is \['kv'\]"),
        (torch.zeros(3, 2, K, S, D), {"packed": "separate", "head_dim_v": 32}, "only packed='kv' allows that"),
        (torch.zeros(3, K, S, 2 * D), {"block_size": -1}, "block_size is -1; it must be an integer of at least 1"),
        (torch.zeros(3, K, S, 2 * D), {"num_kv_heads": -1}, "num_kv_heads is -1"),
        (torch.zeros(3, K, S, 2 * D), {"head_dim": 64.0}, "head_dim is 64.0"),
        (torch.zeros(3, K, S, 2 * D), {"head_dim_v": 0}, "head_dim_v is 0"),
        ([0.0], {}, "the frames are of type list; give a tensor"),
        (torch.zeros(3, K, S, 64, dtype=torch.uint8), {"head_dim": 65}, "two elements in a byte, so both must be even"),
        (torch.zeros(3, K, S, 48, dtype=torch.uint8), {"head_dim_v": 33}, "head_dim_v is 33 of a uint8 tensor"),
    ],
)
def test_memory_that_cannot_be_viewed_is_refused(tensor: torch.Tensor, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        KVLayer.of_frames(tensor, **GEOMETRY | options)
