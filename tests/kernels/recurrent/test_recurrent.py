"""The C++ kernels are the definition: dtypes, heads, dims, ragged rows, saves, strides, threads, instruction sets.

Frames that a step writes hold NaN before, and no other frame may change. The truth is the definition in float64.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu as extension
from pagedkv.kernels import recurrent
from pagedkv.kernels.recurrent import ConvInputs, DeltaInputs, cpu, reference
from tests.kernels.conftest import SETS
from tests.kernels.recurrent.cases import DECODE, DRAFTS, ENDS, RAGGED, Step, conv, delta, ints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

pytestmark = pytest.mark.skipif(bool(extension.missing()), reason="the C++ extension is not built")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest error of a result, over the largest result; that of a state is the first."""
STEPS = {"ragged": RAGGED, "decode": DECODE, "drafts": DRAFTS, "ends": ENDS}


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return str(request.param)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the definition answers in place of C++."""

    def refused(*_: Any) -> None:
        raise AssertionError("C++ refused the call")

    for name in ("delta_rule", "causal_conv"):
        monkeypatch.setattr(reference, name, refused)


DELTA, CONV = reference.delta_rule, reference.causal_conv


def doubled(inputs: Any) -> Any:
    return type(inputs)(*(x.double() if isinstance(x, torch.Tensor) else x for x in inputs))


def close(found: Tensor, want: Tensor, error: float) -> None:
    assert not found.isnan().any()
    if found.numel():
        assert float((found.double() - want).abs().max()) <= error * max(1.0, float(want.abs().max()))


def check(step: Step, pool: Tensor, inputs: Any, out: Tensor | None = None) -> Tensor:
    """Compare a call with the definition in float64; return the results."""
    kernel, definition = (recurrent.delta_rule, DELTA) if len(inputs) == 5 else (recurrent.causal_conv, CONV)
    before, truth = step.copied(pool), step.copied(pool, torch.float64)
    found = kernel(pool, step, step.indptr, inputs, out)
    want = definition(truth, step, step.indptr, doubled(inputs))
    dtype = inputs[2].dtype if len(inputs) == 5 else inputs[0].dtype
    assert found.dtype == dtype
    close(found, want, ERROR[dtype])
    written = step.written()
    others = [frame for frame in range(len(pool)) if frame not in written]
    assert pool[others].equal(before[others])
    close(pool[written], truth[written], ERROR[torch.float32])
    if pool.stride(0) > pool[0].numel():  # and nothing beyond a frame
        gaps = pool.as_strided((len(pool) - 1, pool.stride(0) - pool[0].numel()), (pool.stride(0), 1), pool[0].numel())
        assert gaps.isnan().all()
    return found


@pytest.mark.usefixtures("isa", "served")
class TestDelta:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("name", STEPS)
    def test_dtypes(self, name: str, dtype: torch.dtype) -> None:
        check(STEPS[name], *delta(STEPS[name], (2, 1), (128, 64), dtype))

    @pytest.mark.parametrize("heads", [(1, 1), (6, 2), (3, 3)])
    @pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (16, 32)])
    def test_heads_and_dims(self, heads: tuple[int, int], dims: tuple[int, int]) -> None:
        step = Step((1, 18, 0, 33), from_zeros=(0, 3), kept_not=(2,), saves={3: (5, 32)})
        check(step, *delta(step, heads, dims))

    @pytest.mark.parametrize("threads", [1, 2])
    def test_threads_give_the_same_bits(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, inputs = delta(RAGGED, (4, 2), (128, 128))
        alone = RAGGED.copied(pool)
        want = recurrent.delta_rule(alone, RAGGED, RAGGED.indptr, inputs)
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
        assert recurrent.delta_rule(pool, RAGGED, RAGGED.indptr, inputs).equal(want)
        assert pool[RAGGED.written()].equal(alone[RAGGED.written()])

    @pytest.mark.parametrize("spread", [0, 16, 3], ids=["dense", "aligned", "unaligned"])
    def test_frames_lie_anywhere(self, spread: int) -> None:
        step = Step((1,) * 9)  # enough bytes to be stored past the caches
        pool, inputs = delta(step, (2, 2), (128, 128))
        wide = step.pool(tuple(pool.shape[1:]), spread=spread).copy_(pool)
        check(step, wide, inputs)

    def test_a_step_may_change_a_state_in_place(self) -> None:
        step = Step((1, 20, 3))
        pool, inputs = delta(step)
        apart = step.copied(pool)
        want = recurrent.delta_rule(apart, step, step.indptr, inputs)
        kept, step.state_out = step.state_out, step.state_in.clone()
        try:
            assert recurrent.delta_rule(pool, step, step.indptr, inputs).equal(want)
            assert pool[step.state_in.long()].equal(apart[kept.long()])
        finally:
            step.state_out = kept

    def test_a_cut_at_sixteen_tokens_keeps_the_bits(self) -> None:
        """A row that resumes at the end of a page computes what it would have computed."""
        whole = Step((100,), saves={0: (48,)})
        pool, inputs = delta(whole, (2, 1), (128, 64))
        found = recurrent.delta_rule(pool, whole, whole.indptr, inputs)
        rest = Step((52,))
        rest.state_in, rest.state_out = whole.save_frames, whole.state_in
        before = pool[whole.state_out.long()].clone()
        again = recurrent.delta_rule(pool, rest, rest.indptr, DeltaInputs(*(x[48:] for x in inputs)))
        assert again.equal(found[48:])
        assert pool[whole.state_in.long()].equal(before)

    def test_strong_and_no_decay(self) -> None:
        step = Step((40, 40, 1), from_zeros=(1,))
        pool, inputs = delta(step, (2, 2), (64, 64))
        inputs.decay[:20], inputs.decay[20:30], inputs.decay[60:] = 0.0, -200.0, -1e4
        check(step, pool, inputs)

    def test_nan_stays_in_its_row_and_head(self) -> None:
        step = Step((20, 20))
        pool, inputs = delta(step, (2, 2), (64, 64))
        inputs.v[3, 1, 5] = torch.nan
        found = recurrent.delta_rule(pool, step, step.indptr, inputs)
        assert found[3:20, 1, 5].isnan().all()
        found[3:20, 1, 5] = 0.0
        assert not found.isnan().any()

    def test_out_is_used(self) -> None:
        pool, inputs = delta(DRAFTS, (2, 1), (64, 64), torch.bfloat16)
        wide = torch.full((DRAFTS.num_tokens, 3, 64), 7.0, dtype=torch.bfloat16)
        assert check(DRAFTS, pool, inputs, wide[:, :2]).data_ptr() == wide.data_ptr()
        assert wide[:, 2].eq(7).all()


@pytest.mark.usefixtures("isa", "served")
class TestConv:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("name", STEPS)
    @pytest.mark.parametrize("activation", ["silu", ""])
    def test_dtypes(self, name: str, dtype: torch.dtype, activation: str) -> None:
        check(STEPS[name], *conv(STEPS[name], dtype=dtype, activation=activation))

    @pytest.mark.parametrize("width", [2, 3, 4, 7, 16])
    @pytest.mark.parametrize("channels", [1, 70, 256, 600])
    def test_widths_and_channels(self, width: int, channels: int) -> None:
        step = Step((1, 5, 0, 2, 30), from_zeros=(0,), kept_not=(2,), saves={1: (1, 4), 4: (2, 17)})
        check(step, *conv(step, channels, width))

    @pytest.mark.parametrize("count", [0, 1, 2, 9])
    def test_a_step_may_change_a_state_in_place(self, count: int) -> None:
        step = Step((count,))
        pool, inputs = conv(step)
        apart, kept = step.copied(pool), step.state_out
        recurrent.causal_conv(apart, step, step.indptr, inputs)
        step.state_out = step.state_in.clone()
        recurrent.causal_conv(pool, step, step.indptr, inputs)
        assert pool[step.state_in.long()].equal(apart[kept.long()])

    @pytest.mark.parametrize("threads", [1, 2])
    def test_threads(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
        step = Step((300, 1))
        check(step, *conv(step, 1024))


def changed(step: Step, **arrays: Tensor) -> Any:
    copy = dataclasses.replace(step)
    for name in ("state_in", "state_out", "save_indptr", "save_offsets", "save_frames", "indptr"):
        setattr(copy, name, arrays.get(name, getattr(step, name)))
    return copy


@pytest.mark.parametrize(
    "fault",
    ["state_in", "state_out", "save_frames", "save_offsets", "save_indptr", "indptr", "short", "negative frame"],
)
def test_no_number_of_a_step_is_trusted(fault: str) -> None:
    """C++ refuses a step that names what is not there, and the definition says so."""
    step = Step((2, 3), saves={1: (1, 2)})
    pool, inputs = delta(step)
    far = ints(0, 10**6)
    broken = changed(step, **{
        "state_in": {"state_in": far}, "state_out": {"state_out": far}, "save_frames": {"save_frames": far},
        "save_offsets": {"save_offsets": ints(1, 9)}, "save_indptr": {"save_indptr": ints(0, 0, 5)},
        "indptr": {"indptr": ints(0, 10**6, 5)}, "short": {"indptr": ints(0, 5)}, "negative frame": {
            "state_in": ints(0, -2)},
    }[fault])  # fmt: skip
    arrays = cpu._arrays(broken, broken.indptr)
    out = torch.empty_like(inputs.v)
    call = extension.extension().delta_rule
    assert call(pool, *arrays, *inputs, out, extension.isa(), 1) is None
    with pytest.raises((InvalidRequest, ValueError)):
        recurrent.delta_rule(pool, broken, broken.indptr, inputs)


REFUSED = {
    "kda": lambda x, pool: (x._replace(decay=x.decay[..., None].expand(-1, -1, 64).contiguous()), pool),
    "float64": lambda x, pool: (doubled(x), pool.double()),
    "mixed dtypes": lambda x, pool: (x._replace(q=x.q.bfloat16(), k=x.k.bfloat16()), pool),
    "strided channels": lambda x, pool: (x._replace(q=x.q.transpose(1, 2).contiguous().transpose(1, 2)), pool),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_definition_answers_what_cpp_does_not_serve(case: str) -> None:
    pool, inputs = delta(DRAFTS, (2, 2), (64, 64))
    inputs, pool = REFUSED[case](inputs, pool)
    again = pool.clone()
    found = recurrent.delta_rule(pool, DRAFTS, DRAFTS.indptr, inputs)
    assert found.equal(DELTA(again, DRAFTS, DRAFTS.indptr, inputs))


@pytest.mark.parametrize("dims", [(64, 40), (24, 32)])
def test_dims_that_cpp_refuses(dims: tuple[int, int]) -> None:
    pool, inputs = delta(DRAFTS, (2, 2), dims)
    again = pool.clone()
    found = recurrent.delta_rule(pool, DRAFTS, DRAFTS.indptr, inputs)
    assert found.equal(DELTA(again, DRAFTS, DRAFTS.indptr, inputs))


def test_results_that_overlap_an_input_are_right() -> None:
    pool, inputs = delta(DRAFTS, (2, 2), (64, 64))
    again, v = pool.clone(), inputs.v.clone()
    found = recurrent.delta_rule(pool, DRAFTS, DRAFTS.indptr, inputs, inputs.v)
    assert found.equal(DELTA(again, DRAFTS, DRAFTS.indptr, inputs._replace(v=v)))


def test_a_forced_kernel_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    pool, inputs = conv(DRAFTS)
    assert not cpu.causal_conv(pool, DRAFTS, DRAFTS.indptr, inputs, torch.empty_like(inputs.x))
    monkeypatch.setenv("PAGEDKV_KERNELS", "cpu")
    assert cpu.causal_conv(pool, DRAFTS, DRAFTS.indptr, ConvInputs(*inputs), torch.empty_like(inputs.x))


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_cpp_is_transformers_chunk(heads: tuple[int, int]) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    step = Step((200,))
    pool, inputs = delta(step, heads, (64, 64))
    before = pool[step.state_in[0]].unflatten(0, (heads[0], -1)).transpose(1, 2).flatten(2).clone()
    found = recurrent.delta_rule(pool, step, step.indptr, inputs)
    want, state = theirs.torch_chunk_gated_delta_rule(
        *(x[None] for x in inputs), initial_state=before[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(found, want[0], rtol=1e-3, atol=1e-4)
    after = pool[step.state_out[0]].unflatten(0, (heads[0], -1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(after, state[0], rtol=1e-3, atol=1e-4)
