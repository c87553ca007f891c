"""`pagedkv bench bandwidth`: the bytes that it counts, the states of memory, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv.bench import clock
from pagedkv.bench.attention import pool
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.bandwidth import ceilings, device, subjects, turns
from pagedkv.bench.bandwidth.ceilings import KIB, Bound, Region
from pagedkv.bench.bandwidth.subjects import Subject
from pagedkv.bench.bandwidth.turns import Speeds

MIB = 1 << 20
FLOAT_OF_ONES = torch.tensor(0x01010101, dtype=torch.int32).view(torch.float32)
"""Each of its bytes is 1."""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(pool, "POOL_BYTES", MIB)
    monkeypatch.setattr(ceilings, "WINDOW", 4 * MIB)


def marked(cell: Cell) -> int:
    """Count the bytes of a pool that belong to a token of a step: each token's elements are set to ones, one by one."""
    region = torch.zeros(pool.Pool.bytes_of(cell), dtype=torch.uint8)
    ours = pool.Pool(cell, region)
    batch = ours.batch(ours.draw())
    for b, length in enumerate(cell.lens()):
        for position in range(length):
            at = int(batch.block_table[b, position // cell.block_size]), position % cell.block_size
            for part in (ours.layer.k, ours.layer.v):
                part[at].view(torch.uint8).fill_(1)
            for scale in (ours.layer.k_scale, ours.layer.v_scale):
                if scale is not None:
                    scale[at] = FLOAT_OF_ONES
    return int(region.sum())


@pytest.mark.parametrize("kv", ["", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("shape", [(3, 37, 16), (1, 20, 8), (2, 5, 32)], ids=str)
def test_the_bytes_of_a_decode_are_those_of_its_tokens_one_by_one(kv, shape):
    batch, context, block_size = shape
    cell = Cell(batch=batch, context=context, block_size=block_size, heads=4, kv_heads=2, head_dim=64, kv=kv)
    (subject,) = subjects.decodes([cell], Region.of(2 * MIB, is_huge=True), ())
    assert subject.num_bytes == marked(cell)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_the_bytes_of_a_gather_are_those_of_its_tokens_and_of_the_result(kv, monkeypatch):
    small = Cell(batch=4, context=48, kv_heads=2, head_dim=64)
    monkeypatch.setattr(subjects, "BASE", small)
    found = list(subjects.gathers([kv], Region.of(2 * MIB, is_huge=True)))
    assert [subject.axes.get("order") for subject in found] == [None, "in order"]
    result = 2 * 4 * 48 * 2 * 64 * 2
    moved = result + marked(Cell(**{**vars(small), "kv": "" if kv == "bfloat16" else kv}))
    assert [subject.num_bytes for subject in found] == [moved, moved]


def test_frames_in_order_are_gathered_from_neighbours(monkeypatch):
    drawn = []
    monkeypatch.setattr(subjects, "BASE", Cell(batch=4, context=48, kv_heads=2, head_dim=64))
    monkeypatch.setattr(subjects, "gather_kv", lambda layer, batch, out: drawn.append(batch.block_table[0, :3]))
    for subject in subjects.gathers(["bfloat16"], Region.of(2 * MIB, is_huge=True)):
        subject.variants["pagedkv"]()()
    assert drawn[1].diff().tolist() == [1, 1]


def test_the_copy_of_torch_moves_words_as_ours_does_and_no_single_bytes():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add((func.overloadpacket.__name__, args[0].dtype))
            return func(*args, **kwargs or {})

    seen: set[tuple[str, torch.dtype]] = set()
    subject = next(iter(subjects.copies([4 * KIB], halves())))
    run = subject.variants["torch"]()
    with Seen():
        run()
    assert {("index_copy_", torch.int64), ("index", torch.int64)} <= seen


def halves() -> Region:
    """A region of ones, then zeros."""
    region = Region.of(16 * MIB, is_huge=True)
    region.bytes[: 8 * MIB], region.bytes[8 * MIB :] = 1, 0
    return region


@pytest.mark.parametrize("size", [4 * KIB, 32 * KIB, 2048 * KIB])
def test_a_copy_moves_as_many_bytes_as_it_counts(size):
    names = set()
    for count, subject in enumerate(subjects.copies([size], halves())):
        for name in subject.variants:
            region = halves()
            fresh = list(subjects.copies([size], region))[count]
            fresh.variants[name]()()
            assert 2 * int(region.bytes[8 * MIB :].sum()) == subject.num_bytes
            assert region.bytes[: 8 * MIB].all()
            names.add((name, subject.axes["order"]))
    assert len(names) == 4


def test_the_ceilings_of_a_copy_move_as_many_bytes_as_they_count():
    region = halves()
    bound = region.bounds()["copy"]
    bound.step()()
    assert 2 * int(region.bytes[8 * MIB :].sum()) == bound.num_bytes == region.window
    source, target = region.pair()
    assert source.data_ptr() + len(source) <= target.data_ptr()


@pytest.mark.parametrize("operation", list(subjects.LINEAR))
def test_a_linear_operation_reads_its_weights_once_and_multiplies_each_by_each_token(operation, monkeypatch):
    monkeypatch.setattr(subjects, "LINEAR", {operation: 128})
    monkeypatch.setattr(subjects, "WIDE", 256)
    (subject,) = subjects.linears([3], [], Region.of(2 * MIB, is_huge=True))
    assert (subject.num_bytes, subject.flops) == (128 * 256 * 2, sum(2 for _ in range(3 * 128 * 256)))
    results = [step()() for step in subject.variants.values()]
    assert len(results) == 2


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no turn be left out because this machine is busy."""
    monkeypatch.setattr(clock, "spin", lambda: 1.0)


class Machine:
    """A machine of scripted speed. speeds: of each timing, in order; a negative one: a context switch falls into it."""

    def __init__(self, speeds: Iterator[float]) -> None:
        self.speeds = speeds

    def __call__(self, run: Callable[[], object]) -> tuple[float, bool]:
        speed = next(self.speeds)
        return 1.0 / abs(speed) * (2.0 if isinstance(run, turns._Repetition) else 1.0), speed > 0


def measured(speeds: list[float], repetitions: int) -> tuple[dict[str, object], Speeds]:
    """Measure an operation that moves as many bytes as the ceiling in twice the time."""
    bound = Speeds(Bound("read", 10**9, lambda: lambda: None))
    subject = Subject("decode", {}, 10**9, "read", {"pagedkv": lambda: lambda: None})
    machine = Machine(iter([1.0] * 6 + speeds))  # two turns that do not count
    (row,) = turns.rows([subject], {"read": bound}, repetitions, {}, machine)
    return row, bound


def test_a_ratio_is_of_its_own_turn_whatever_state_memory_is_in():
    row, bound = measured([45.0] * 3 + [80.0] * 3 + [45.0] * 3 + [80.0] * 3, 4)
    assert row["ratios"] == [0.5] * 4
    assert row["turns"] == [22.5, 40.0, 22.5, 40.0]
    assert (row["clean"], bound.switched, bound.changed) == (4, 0, 0)
    states = bound.row({})["states"]
    assert [part for state in states for part in state] == pytest.approx([45, 0.5, 80, 0.5])


def test_a_repetition_in_which_memory_changes_its_state_or_the_system_interrupts_is_left_out_and_counted():
    steady, changed, switched = [10.0] * 3, [10.0, 10.0, 20.0], [10.0, -10.0, 10.0]
    interrupted = [-10.0, -10.0, -10.0, 10.0, 10.0]  # no reading of the ceiling is clean
    row, bound = measured([*steady, *changed, *steady, *switched, *steady, *interrupted, *steady], 7)
    assert [turn is None for turn in row["turns"]] == [False, True, False, True, False, True, False]
    assert row["ratios"] == [0.5] * 4
    assert (row["clean"], bound.switched, bound.changed) == (4, 2, 1)


def test_a_ceiling_into_which_a_context_switch_falls_is_read_again():
    row, bound = measured([-3.0, 10.0, 10.0, 10.0] * 3, 3)
    assert row["ratios"] == [0.5] * 3
    assert (row["clean"], bound.switched, len(bound.readings)) == (3, 0, 6)


def test_a_swap_moves_the_frames_that_it_counts():
    """On a machine without a GPU the device is the CPU."""
    found, bounds = device.measured("cpu", 64 * KIB, 4 * KIB)
    swaps = [subject for subject in found if subject.case == "swap"]
    assert [subject.num_bytes for subject in swaps] == [64 * KIB] * 2
    for subject in found:
        for step in subject.variants.values():
            step()()
        bounds[subject.bound].step()()
        assert bounds[subject.bound].num_bytes == subject.num_bytes
