"""The definitions of the recurrent layers are those of transformers' torch code, and keep the laws of state frames."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagedkv.errors import InvalidRequest
from pagedkv.kernels import recurrent
from pagedkv.kernels.recurrent import DeltaInputs, delta_state, reference
from tests.kernels.recurrent.cases import DECODE, RAGGED, Step, conv, delta, ints

ONE_ROW = Step((70,))


def plain(state: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a state of a delta rule as [H, K, V]."""
    return state.unflatten(0, (heads, -1)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("module", ["qwen3_next", "qwen3_5"])
def test_the_delta_rule_is_that_of_transformers(module, heads):
    theirs = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    pool, inputs = delta(ONE_ROW, heads, (32, 96))
    before = plain(pool[ONE_ROW.state_in[0]], heads[0]).clone()
    found = reference.delta_rule(pool, ONE_ROW, ONE_ROW.indptr, inputs)
    want, state = theirs.torch_recurrent_gated_delta_rule(
        *(x[None] for x in inputs), initial_state=before[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(found, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain(pool[ONE_ROW.state_out[0]], heads[0]), state[0], rtol=1e-4, atol=1e-5)


def test_kda_is_that_of_transformers():
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    pool, inputs = delta(ONE_ROW, (2, 2), (64, 32))
    inputs = inputs._replace(decay=-F.softplus(torch.randn(70, 2, 64)))
    before = plain(pool[ONE_ROW.state_in[0]], 2).clone()
    found = recurrent.delta_rule(pool, ONE_ROW, ONE_ROW.indptr, inputs)
    want, state = theirs.recurrent_kimi_delta_attention(
        *(x[None] for x in inputs), before[None], True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(found, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain(pool[ONE_ROW.state_out[0]], 2), state[0], rtol=1e-4, atol=1e-5)


def test_ssd_is_that_of_transformers():
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    T, H, G, P, N = 70, 4, 2, 16, 32
    pool = ONE_ROW.pool((H, P, N))
    x, dt, A, D = torch.randn(T, H, P), F.softplus(torch.randn(T, H)), -torch.rand(H) - 0.1, torch.randn(H)
    B, C = torch.randn(T, G, N), torch.randn(T, G, N)
    before = pool[ONE_ROW.state_in[0]].clone()[None]
    found = reference.ssd(pool, ONE_ROW, ONE_ROW.indptr, reference.SsdInputs(x, dt, A, B, C, D))
    want, state = theirs.mamba2_chunk_scan(
        *(x[None], dt[None], A, B[None], C[None], 16), D=D, initial_states=before, return_final_states=True
    )
    torch.testing.assert_close(found, want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool[ONE_ROW.state_out[0]], state[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", ""])
def test_the_convolution_is_torchs(activation):
    pool, inputs = conv(ONE_ROW, activation=activation)
    full = torch.cat([pool[ONE_ROW.state_in[0]], inputs.x])
    found = reference.causal_conv(pool, ONE_ROW, ONE_ROW.indptr, inputs)
    want = F.conv1d(full.t()[None], inputs.weight[:, None], groups=96)[0].t()
    torch.testing.assert_close(found, F.silu(want) if activation else want)
    assert pool[ONE_ROW.state_out[0]].equal(full[-3:])


def test_a_save_is_the_state_of_a_step_that_ends_there():
    """And no frame changes but those that the step names."""
    pool, inputs = delta(RAGGED)
    before = RAGGED.copied(pool)
    out = reference.delta_rule(pool, RAGGED, RAGGED.indptr, inputs)
    others = [frame for frame in range(len(pool)) if frame not in RAGGED.written()]
    assert pool[others].equal(before[others])
    assert not pool.isnan().any()
    for row, offsets in RAGGED.saves.items():
        first = int(RAGGED.indptr[row])
        for i, offset in enumerate(offsets):
            short = Step((offset,))
            short.state_in, short.state_out = RAGGED.state_in[row : row + 1], ints(0)
            part = DeltaInputs(*(x[first : first + offset] for x in inputs))
            again = RAGGED.copied(before)
            assert reference.delta_rule(again, short, short.indptr, part).equal(out[first : first + offset])
            assert again[0].equal(pool[RAGGED.save_frames[int(RAGGED.save_indptr[row]) + i]])


def test_a_row_without_tokens_has_the_state_before():
    step = Step((0, 0), from_zeros=(1,))
    pool, inputs = delta(step)
    recurrent.delta_rule(pool, step, step.indptr, inputs)
    assert pool[step.state_out[0]].equal(pool[step.state_in[0]])
    assert not pool[step.state_out[1]].any()


@pytest.mark.parametrize("fault", ["states", "heads", "decay", "frame", "tokens", "weight", "activation"])
def test_a_wrong_shape_is_refused_with_what_to_give(fault):
    step = Step((1, 2))
    pool, inputs = delta(step)
    conv_pool, (x, weight, activation) = conv(step)
    if fault in ("weight", "activation"):
        weight, activation = (weight[:5], "") if fault == "weight" else (weight, "gelu")
        with pytest.raises(InvalidRequest, match="activation"):
            recurrent.causal_conv(conv_pool, step, step.indptr, (x, weight, activation))
        return
    indptr, shape = step.indptr, delta_state(2, 64, 64)
    assert pool.shape[1:] == shape
    if fault == "states":
        pool = pool[:, 1:]
    elif fault == "heads":
        inputs = inputs._replace(q=inputs.q.repeat(1, 3, 1), k=inputs.k.repeat(1, 3, 1))
    elif fault == "decay":
        inputs = inputs._replace(decay=inputs.decay[:1])
    elif fault == "frame":
        step.state_in[1] = len(pool)
    else:
        indptr = ints(0, 1, 2)
    with pytest.raises(InvalidRequest, match=r"states has|q, k, v, decay and beta|frame|indptr"):
        recurrent.delta_rule(pool, step, indptr, inputs)


def test_a_decode_step_is_the_formula():
    pool, inputs = delta(DECODE, (1, 1), (32, 64))
    before = pool.double()
    out = reference.delta_rule(pool, DECODE, DECODE.indptr, inputs)
    q, k, v, decay, beta = (x.double()[0, 0] for x in inputs)
    q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
    S = plain(before[DECODE.state_in[0]], 1)[0] * decay.exp()
    S = S + torch.outer(k, beta * (v - S.t() @ k))
    torch.testing.assert_close(out[0, 0].double(), S.t() @ q / 32**0.5, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain(pool[DECODE.state_out[0]], 1)[0].double(), S, rtol=1e-5, atol=1e-6)
