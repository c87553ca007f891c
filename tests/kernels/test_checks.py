"""Each wrong argument is named in the letters of the contract, whichever kernel would have run; nothing is written
before it is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagedkv import bind_attention, bind_write, copy_frames, explain, gather_kv, merge_states, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks
from pagedkv.kernels.args import KVLayer, PagedBatch, RotaryTable
from tests.cases import Case, call_of

if TYPE_CHECKING:
    from tests.cases import Built

CASE = Case(q_lens=(1, 4), kv_lens=(40, 4), heads=(6, 2))
INT32 = torch.int32


def batch(**changes: Any) -> Callable[[Built], Built]:
    return lambda built: built._replace(batch=replace(built.batch, **changes))


def layer(change: Callable[[KVLayer], KVLayer]) -> Callable[[Built], Built]:
    return lambda built: built._replace(layer=change(built.layer))


def option(**changes: Any) -> Callable[[Built], Built]:
    return lambda built: built._replace(options=built.options | changes)


def query(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Built], Built]:
    return lambda built: built._replace(q=change(built.q))


ROTATED = Case(q_lens=(1, 4), kv_lens=(40, 33), heads=(6, 2), kv="k5v4/calibrated", layout="HND").build().layer
WRONG_ROTATED: list[tuple[Callable[[KVLayer], dict[str, Any]], str]] = [
    (lambda x: {"k": x.k.contiguous()}, "must be one run, so stride 1 must be 40"),
    (lambda x: {"k": x.k[..., :38]}, "K of 5 bits has 5 D / 8 bytes, V of 4 bits Dv / 2"),
    (lambda x: {"v": x.v.to(torch.int8)}, "layer.k is uint8 and layer.v is int8: K and V of one layer have one dtype"),
    (lambda x: {"v_scale": torch.ones(())}, "layer.v_scale is float32 []; it must be float16"),
    (lambda x: {"k_scale": None}, "layer.k_scale is None but layer.k is uint8; it must be float16"),
    (
        lambda x: {"calibration": torch.ones(2, 2, 32)},
        "layer.calibration is float32 [2, 2, 32]; it must be float32 [K=",
    ),
]
WRONG_SHAPES: list[tuple[Callable[[Built], Built], str]] = [
    (query(lambda q: q[:, :5]), "q has H=5 heads but layer.k has K=2 kv heads: H must be a multiple of K"),
    (query(lambda q: q[..., :32]), "q is float32 [5, 6, 32]; it must be float32, bfloat16, float16, float64 [T=5, H=6"),
    (query(lambda q: q[0]), "q is float32 [6, 64]; it must be float32, bfloat16, float16, float64 [T, H, D=64]"),
    (query(lambda q: q.half()), "q is float16 but layer.k is float32: convert q"),
    (query(lambda q: q.int()), "q is int32; it must be float32, bfloat16 or float16"),
    (query(lambda q: q.mT.contiguous().mT), "its last dim must be contiguous"),
    (layer(lambda x: replace(x, v=x.v[:, :8])), "layer.v is float32 [7, 8, 2, 64]; it must be float32, bfloat16"),
    (layer(lambda x: replace(x, v=x.v.half())), "layer.k is float32 and layer.v is float16: K and V of one layer"),
    (layer(lambda x: KVLayer(x.k.to(torch.int8), x.v.to(torch.int8))), "layer.k_scale is None but layer.k is int8"),
    (layer(lambda x: replace(x, k_scale=torch.ones(()))), "only fp8 and integers have scales"),
    (
        layer(lambda x: KVLayer(x.k.to(torch.int8), x.v.to(torch.int8), torch.ones(2), None)),
        "it must be float32 [] (one for all) or float16 [7, 16, 2]",
    ),
    *((layer(lambda x, change=change: replace(ROTATED, **change(ROTATED))), text) for change, text in WRONG_ROTATED),
    (batch(seq_lens=torch.tensor([40, 4])), "batch.seq_lens is int64 [2]; it must be int32 [B]"),
    (batch(cu_seqlens_q=torch.tensor([0, 5], dtype=INT32)), "batch.cu_seqlens_q is int32 [2]; it must be int32 [B+1=3"),
    (batch(rows=torch.zeros(3, dtype=INT32)), "batch.rows is int32 [3]; it must be int32 [B=2]"),
    (batch(seq_lens=[40, 4]), "batch.seq_lens is [40, 4]; it must be a tensor"),
    *(
        (batch(**{name: bound}), f"batch.{name} is {bound!r}; give an int of the host")
        for name in ("max_seqlen_q", "max_seqlen_k")
        for bound in (None, 4.0, "4")
    ),
    (batch(block_table=torch.zeros(1, 4, dtype=INT32)), "batch.block_table is int32 [1, 4]; it must be int32 [A >= B="),
    (option(sinks=torch.zeros(5)), "sinks is float32 [5]; it must be float32 [H=6], or None"),
    (option(alibi_slopes=torch.zeros(6).long()), "alibi_slopes is int64 [6]; it must be a float tensor [H"),
    (option(tree_mask=torch.ones(5, 3, dtype=torch.bool)), "tree_mask is bool [5, 3]; it must be bool [T=5, >=max_seq"),
    (option(window=0), "window is 0; it must be an integer of at least 1, or None"),
    *(
        (option(window=window), f"window is {window}; a tuple must be (left, right), the numbers of positions before")
        for window in [(1, 2, 3), (), (-2, 0), (0, 1.5), ("4", 0), (2**63 - 1, 0)]
    ),
    *(
        (option(window=window), f"window is {window!r}; give an integer, (left, right), or None for all positions")
        for window in ("4", 1.5, torch.ones(1))
    ),
    (option(window=(4, 1)), "window shows 1 positions after a query, and a causal query sees none of them"),
    *(
        (
            option(causal=x),
            f"causal is {str(x.dtype)[6:]} {list(x.shape)}; it must be bool [>=B=2], or None: which sequences",
        )
        for x in (torch.ones(1, dtype=torch.bool), torch.ones(2), torch.ones(1, 2, dtype=torch.bool))
    ),
    (option(split_tokens=-1), "split_tokens is -1; it must be an integer of at least 1, or None"),
    (option(out=torch._neg_view(torch.zeros(5, 6, 64))), "out is a view of negated memory, which no kernel writes"),
    (option(tree_mask=[True]), "tree_mask is [True]; it must be a tensor"),
    (option(softcap=-1.0), "softcap is -1.0; it must be a finite number, 0 for none"),
    (option(scale=float("nan")), "scale is nan; it must be a finite number, or None for D ** -0.5"),
    (option(out=torch.zeros(5, 1, 64).expand(5, 6, 64)), "out has strides (64, 0, 1): several of its elements share m"),
    (query(lambda q: q[:, :0]), "q has H=0 heads but layer.k has K=2 kv heads: H must be a multiple of K"),
    (layer(lambda x: KVLayer(x.k[:, :, :0], x.v[:, :, :0])), "layer.k is [7, 16, 0, 64] and layer.v is [7, 16, 0, 64]"),
    (layer(lambda x: KVLayer(x.k[:, :0], x.v[:, :0])), "only F may be 0"),
    (option(out=torch.zeros(5, 6, 32)), "out is float32 [5, 6, 32]; it must be float32 [T=5, H=6, Dv=64]"),
]


def attend(built: Built) -> None:
    paged_attention(built.q, built.layer, built.batch, **built.options)


def attend_bound(built: Built) -> None:
    of_call = {name: x for name, x in built.options.items() if name in ("tree_mask", "out")}
    fixed = {name: x for name, x in built.options.items() if name not in of_call}
    if isinstance(built.options["causal"], torch.Tensor):
        of_call["causal"], fixed["causal"] = fixed["causal"], False
    bound = bind_attention(built.layer, **fixed)
    bound(built.q, built.batch, **of_call)


def write_bound(k: torch.Tensor, v: torch.Tensor, layer: KVLayer, batch: PagedBatch, rope: RotaryTable | None) -> None:
    bind_write(layer, rope=rope)(k, v, batch)


each_way = pytest.mark.parametrize("attend", [attend, attend_bound])


WRONG_VALUES: list[tuple[Callable[[Built], Built], str]] = [
    (batch(seq_lens=torch.tensor([81, 4], dtype=INT32)), "batch.seq_lens goes from 4 to 81 but a row of 5 pages of 16"),
    (batch(max_seqlen_k=39), "the batch holds 4 queries and 40 tokens in a sequence, more than its bounds max_seqlen_"),
    (batch(cu_seqlens_q=torch.tensor([0, 6, 5], dtype=INT32)), "batch.cu_seqlens_q is [0, 6, 5]; it must rise from 0 "),
    (batch(rows=torch.tensor([0, 2], dtype=INT32)), "batch.rows holds 0 to 2 but there are 2 rows in batch.block_tabl"),
    (batch(block_table=torch.full((2, 5), 9, dtype=INT32)), "batch.block_table names frames 9 to 9 but the layer has "),
]


WRONG = [("0", *each) for each in WRONG_SHAPES] + [("1", *each) for each in WRONG_VALUES]
"""Shapes, dtypes and devices are always looked at, values when debugging."""


@each_way
@pytest.mark.parametrize(("level", "change", "text"), WRONG, ids=[text[:50] for _, _, text in WRONG])
def test_a_wrong_shape_dtype_device_or_value_is_named(
    attend: Callable[[Built], None], level: str, change: Callable[[Built], Built], text: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", level)
    built = change(CASE.build())
    with pytest.raises(InvalidRequest) as wrong:
        attend(built)
    assert text in str(wrong.value)


TURNS = RotaryTable(torch.ones(39, 32), torch.ones(39, 32))

WRONG_WRITES: list[tuple[str, dict[str, Any], str]] = [
    (
        "0",
        {"layer": KVLayer(torch._neg_view(torch.zeros(7, 16, 2, 64)), torch.zeros(7, 16, 2, 64))},
        "layer.k is a view of negated memory, which no kernel writes; give layer.k.resolve_neg()",
    ),
    ("0", {"k": torch.zeros(5, 2, 32)}, "k is float32 [5, 2, 32]; it must be float32, bfloat16, float16, float64, flo"),
    ("0", {"v": torch.zeros(4, 2, 64)}, "v is float32 [4, 2, 64]; it must be float32, bfloat16, float16, float64, flo"),
    ("0", {"k": torch.zeros(5, 2, 64).int()}, "float8_e5m2 [T, K=2, D=64]: the store quantises floats itself"),
    ("0", {"slots": torch.zeros(4).long()}, "slots is int64 [4]; it must be int64 [T=5]"),
    ("0", {"slots": torch.zeros(5, dtype=INT32)}, "slots is int32 [5]"),
    ("1", {"slots": torch.tensor([0, 1, 2, 3, 112])}, "slots holds 0 to 112 but there are 112 slots in F=7 frames of "),
    (
        "0",
        {"layer": KVLayer(torch.zeros(7, 16, 1, 64).expand(7, 16, 2, 64), torch.zeros(7, 16, 2, 64))},
        "layer.k has strides (1024, 64, 0, 1): several of its elements share memory",
    ),
    ("0", {"rope": RotaryTable(torch.ones(9, 40), torch.ones(9, 40))}, "rope.cos is float32 [9, 40]; cos and sin must"),
    ("0", {"rope": RotaryTable(torch.ones(9, 32), torch.ones(8, 32))}, "rope.sin is float32 [8, 32]; cos and sin must"),
    ("0", {"rope": RotaryTable(torch.ones(9, 32).half(), torch.ones(9, 32))}, "rope.cos is float16 [9, 32]"),
    ("0", {"rope": TURNS, "positions": torch.zeros(4).long()}, "positions is int64 [4]; it must be int64 [T=5], or No"),
    ("1", {"rope": TURNS}, "positions holds 0 to 39 but there are 39 positions in rope.cos: 0 to 38 are allowed"),
    ("2", {"slots": torch.tensor([0, 9, 9, -1, -1])}, "slots names slots [9] more than once"),
]


@pytest.mark.parametrize("write", [write_kv, write_bound])
@pytest.mark.parametrize(("level", "changes", "text"), WRONG_WRITES, ids=[text[:50] for _, _, text in WRONG_WRITES])
def test_a_wrong_write_is_named_and_writes_nothing(
    write: Callable[..., None], level: str, changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", level)
    built = CASE.build()
    before = built.layer.k.clone()
    given = {"k": torch.zeros(5, 2, 64), "v": torch.zeros(5, 2, 64), "layer": built.layer, "rope": None} | changes
    tables = {name: value for name, value in changes.items() if name in ("slots", "positions")}
    with pytest.raises(InvalidRequest) as wrong:
        write(given["k"], given["v"], given["layer"], replace(built.batch, **tables), rope=given["rope"])
    assert text in str(wrong.value)
    assert torch.equal(before, built.layer.k) or torch.equal(before.nan_to_num(7), built.layer.k.nan_to_num(7))


each_level = pytest.mark.parametrize("level", ["0", "1"])
"""At 0 the extension serves merges and copies without torch's dispatcher."""

WRONG_MERGES: list[tuple[Callable[..., tuple[Any, ...]], str]] = [
    (lambda a, la, b, lb: (a, la, b.half(), lb), "out_b is float16 .* the two states must match"),
    (lambda a, la, b, lb: (a, la, b[:, :5], lb), "the two states must match"),
    (lambda a, la, b, lb: (a.int(), la, b.int(), lb), "out_a is int32 .*; it must be float32, bfloat16, float16, flo"),
    (lambda a, la, b, lb: (a, la.double(), b, lb), "lse_a is"),
    (
        lambda a, la, b, lb: (a, la, b, lb.T),
        r"lse_b is float32 \[6, 5\]; it must be float32 \[T=5, H=6\]: a natural log",
    ),
    (lambda a, la, b, lb: (a[0], la, b, lb), "out_a is"),
    (lambda a, la, b, lb: (a, None, b, lb), "lse_a is None; it must be a tensor"),
    (lambda a, la, b, lb: (3, la, b, lb), "out_a is 3; it must be a tensor"),
    (lambda a, la, b, lb: (a.requires_grad_(), la, b, lb), "out_a requires grad"),
]


@each_level
@pytest.mark.parametrize(("change", "text"), WRONG_MERGES)
def test_wrong_states_are_named(
    change: Callable[..., tuple[Any, ...]], text: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", level)
    with pytest.raises(InvalidRequest, match=text):
        merge_states(*change(*[torch.zeros(5, 6, 8), torch.zeros(5, 6)] * 2))


WRONG_COPIES: list[tuple[Any, str]] = [
    (torch.tensor([[0, 4]], dtype=INT32), "copies holds 0 to 4 but there are 4 frames in storage: 0 to 3 are allowed"),
    (torch.tensor([[-1, 2]], dtype=INT32), "copies holds -1 to 2 but there are 4 frames"),
    (torch.tensor([[2, -1]], dtype=INT32), "copies holds -1 to 2 but there are 4 frames"),
    (torch.tensor([[0, 1]]), r"copies is \[1, 2\] int64"),
    (torch.tensor([0, 1], dtype=INT32), r"copies is \[2\] int32"),
    ([[0, 1]], "must be a tensor"),
]


@each_level
@pytest.mark.parametrize(("copies", "text"), WRONG_COPIES)
def test_a_wrong_copy_is_named_and_copies_nothing(
    copies: Any, text: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", level)
    storage = torch.arange(4, dtype=torch.uint8).view(4, 1)
    with pytest.raises(InvalidRequest, match=text):
        copy_frames(storage, copies)
    with pytest.raises(InvalidRequest, match=r"storage has strides \(0, 1\): several of its elements share memory"):
        copy_frames(storage[:1].expand(4, 1), torch.tensor([[0, 1]], dtype=INT32))
    assert storage.flatten().tolist() == [0, 1, 2, 3]


def test_a_frame_that_is_written_twice_is_named_when_debugging() -> None:
    with pytest.raises(InvalidRequest, match="names a destination frame twice"):
        copy_frames(torch.zeros(4, 64), torch.tensor([[0, 2], [1, 2]], dtype=INT32))


def test_tensors_on_two_devices_are_named() -> None:
    call, out, lse = call_of(CASE.build()), torch.zeros(3, 2, 8), torch.zeros(3, 2)
    with pytest.raises(InvalidRequest, match="q is on cpu but seq_lens is on meta: all tensors of a call live on one"):
        checks.attention(call._replace(seq_lens=call.seq_lens.to("meta")))
    with pytest.raises(InvalidRequest, match="out_a is on cpu but lse_b is on meta: all tensors of a call live on one"):
        checks.merge(out, lse, out, lse.to("meta"))


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"causal": [True, False]}, "causal is [True, False]; give True or False, or a tensor bool [B]"),
    ({"causal": np.array([True, False])}, "causal is array([ True, False]); give True or False"),
    ({"causal": None}, "causal is None; give True or False"),
    ({"sinks": [0.0] * 6}, "it must be a float tensor [H]"),
    ({"sinks": torch.zeros(6).int()}, "sinks is int32 [6]; it must be a float tensor [H]"),
    ({"alibi_slopes": (0.5,) * 6}, "it must be a float tensor [H]"),
    ({"alibi_slopes": torch.zeros(2, 3)}, "alibi_slopes is float32 [2, 3]; it must be a float tensor [H]"),
    ({"softcap": None}, "softcap is None; it must be a number"),
    ({"softcap": "5"}, "softcap is '5'; it must be a number"),
    ({"scale": "1"}, "scale is '1'; it must be a number"),
    ({"split_tokens": 1.5}, "split_tokens is 1.5; it must be an integer"),
    ({"split_tokens": 1 << 70}, "split_tokens is 1180591620717411303424; it must be"),
]


@pytest.mark.parametrize(("option", "text"), WRONG_OPTIONS)
def test_an_option_of_another_type_is_refused_in_words_by_every_call(option: dict[str, Any], text: str) -> None:
    """torch's own errors came from the first call with an option, and ours from the second."""
    built = CASE.build()
    for _ in range(3):
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            paged_attention(built.q, built.layer, built.batch, **option)
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        bind_attention(built.layer, **option)(built.q, built.batch)


Q, LAYER, BATCH, _ = CASE.build()
NEW, SLOTS, FOUR_DIMS = torch.ones(5, 2, 64), torch.arange(5), torch.ones(2, 4, 3, 64)
LEARNT = RotaryTable(torch.rand(39, 32, requires_grad=True), torch.ones(39, 32))
SCALED = Case(kv="int8/tensor").build().layer
UNPLACED = replace(BATCH, slots=None)
WRONG_ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: gather_kv(3, BATCH), "layer is of type int"),  # type: ignore[arg-type]
    (lambda: gather_kv(LAYER, 3), "batch is of type int"),  # type: ignore[arg-type]
    (lambda: gather_kv(SCALED, BATCH), "dtype is None, and layer.k is int8; give one of float32"),
    (lambda: paged_attention(Q, 3, BATCH), "layer is of type int"),  # type: ignore[call-overload]
    (lambda: paged_attention(Q, LAYER.k, BATCH), "layer is of type Tensor; give a KV"),  # type: ignore[call-overload]
    (lambda: paged_attention([1.0], LAYER, BATCH), "q is [1.0]; it must"),  # type: ignore[call-overload]
    (lambda: paged_attention(FOUR_DIMS, LAYER, BATCH), "q is float32 [2, 4, 3, 64]; it must be"),
    (lambda: paged_attention(Q, LAYER, None), "batch is of type NoneType"),  # type: ignore[call-overload]
    (lambda: paged_attention(Q, LAYER, BATCH, backend=3), "there is no kernel 3;"),  # type: ignore[call-overload]
    (lambda: bind_attention(LAYER)(Q, 7), "batch is of type int"),  # type: ignore[call-overload]
    (lambda: bind_attention(LAYER.k), "layer is of type Tensor; give a KVLayer"),  # type: ignore[arg-type]
    (lambda: bind_attention(LAYER, causal=torch.ones(2) > 0), "attend(q, batch, causal=...)"),  # type: ignore[arg-type]
    (lambda: write_kv(3, NEW, LAYER, BATCH), "k is 3; it must be a tensor"),  # type: ignore[arg-type]
    (lambda: write_kv(NEW, [1], LAYER, BATCH), "v is [1]; it must be a tensor"),  # type: ignore[arg-type]
    (lambda: write_kv(FOUR_DIMS, FOUR_DIMS, LAYER, SLOTS), "k is float32 [2, 4, 3, 64]; it must be"),
    (lambda: write_kv(NEW, NEW, LAYER, None), "slots is None; it must be a tensor, or a"),  # type: ignore[arg-type]
    (lambda: write_kv(NEW, NEW, LAYER, UNPLACED), "slots is None; it must be a tensor, or a PagedBatch that has one"),
    (lambda: write_kv(NEW, NEW, LAYER, SLOTS, [0], rope=TURNS), "positions is [0]; it must"),  # type: ignore[arg-type]
    (lambda: write_kv(NEW, NEW, LAYER, SLOTS, rope=TURNS), "positions is None; it must be int64 [T=5] to turn keys"),
    (lambda: write_kv(NEW, NEW, LAYER, SLOTS, SLOTS, rope=LEARNT), "rope.cos requires grad"),
    (lambda: write_kv(NEW, None, LAYER, SLOTS), "layer.v is not the first part of layer.k with the same scales"),
    (lambda: bind_write(LAYER)([1], NEW, BATCH), "k is [1]; it must be a tensor"),  # type: ignore[arg-type]
    (lambda: bind_write(LAYER)(NEW, NEW, None), "slots is None; it must be a tensor, or a"),  # type: ignore[arg-type]
    (lambda: bind_write(LAYER)(NEW, None, SLOTS), "layer.v is not the first part of layer.k with the same scales"),
    (lambda: bind_write(LAYER, rope=10000), "rope is 10000; give a RotaryTable"),  # type: ignore[arg-type]
    (lambda: BATCH.padded([[True]]), "mask is of type list; give a tensor, bool"),  # type: ignore[arg-type]
    (lambda: explain(5), "case is of type int; give a Case"),  # type: ignore[arg-type]
    (lambda: KVLayer(LAYER.k, None), "k and v of a layer are of type Tensor and NoneTyp"),  # type: ignore[arg-type]
    *(
        (lambda scale=scale: KVLayer(SCALED.k, SCALED.v, 1.0, scale), "; give a number, a float32 tensor")
        for scale in (True, "1", 10**400, float("nan"), [1.0])
    ),
]


@each_level
@pytest.mark.parametrize(("call", "text"), WRONG_ARGUMENTS, ids=[text[:40] for _, text in WRONG_ARGUMENTS])
def test_an_argument_of_another_type_is_named_with_its_type(
    call: Callable[[], Any], text: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", level)
    for _ in range(3):  # the first goes to torch's operator, later ones to a bound call
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            call()
    assert not LAYER.k.eq(1).any()
