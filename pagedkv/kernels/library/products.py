"""The calls of cuDNN for whole prompts, and for a chunk of one prompt behind a prefix: shapes, buffers and states.

    keys      0 ........ before  ...... prefix ......... N          before: `prefix` rounded down; 0 if it is short
    queries                                  0 ......... M
              |-- without mask --|----- causal square --------|     side: rounded up; rows past N and M are padding
                                 |- offset -|
                                            M new tokens

cuDNN's causal mask begins at the first query and the first key, so it serves squares alone. Keys before the square are
seen by all queries: a product without a mask. The two states are merged by their LSEs. Rows before the new tokens in
the square's queries hold anything; their results are not read. Keys past the last token are 0, and no new token sees
them.

torch keeps a plan of cuDNN for each shape and stride that a thread has called, and makes one in about 0.4 s (reports of
H20 and B200). So sides are multiples of a step that gives 16 shapes to each power of two, at least 128. By arithmetic
this costs a chunk behind a long prefix about one hundredth, and a whole prompt of 2048 tokens and more at most an
eighth.

Costs     out and LSE of the second state, written and read: 4 bytes H D M / 4.4 TB/s, and a launch. A square that takes
          in the prefix instead costs 4 H D prefix^2 / 2 at 600 TFLOP/s. They are equal at about 900 keys
          (`LEAST_PREFIX`). If sides are no multiples, queries are copied: as many bytes again.
Exact     the lengths must be those that the host's bounds say (`_present` in backend.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall

LEAST_PREFIX: Final = 1024
"""Keys before the new tokens from which they have a product of their own."""


class AttentionState(NamedTuple):
    """Attention over some of the keys: out [X, N, H, D] and lse float32 [X, N, H], any strides.

    Row t % N of part t // N is token t.
    """

    out: Tensor
    lse: Tensor


class _Products(NamedTuple):
    """The operands of cuDNN for one call.

    prefix: keys before the new tokens of each sequence, by the bounds
    before: keys of the product without a mask, the first ones of the prefix; 0: there is no such product
    M:      new tokens of each sequence
    queries [B, >= side, H, D], in which the new tokens begin at row prefix - before
    k, v    [B, before + side, K, D]: to be filled with all keys, and with zeros past the last one
    """

    prefix: int
    before: int
    M: int
    side: int
    queries: Tensor
    k: Tensor
    v: Tensor

    def square(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the operands of the causal square."""
        return _operands(self.queries, self.k, self.v, (0, self.side), (self.before, self.side))

    def unmasked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the operands of the product without a mask."""
        rows = (self.prefix - self.before, _rounded_up(self.M))
        return _operands(self.queries, self.k, self.v, rows, (0, self.before))

    def states(self, scale: float) -> list[AttentionState]:
        """Return one state, or two, of the new tokens."""
        offset = self.prefix - self.before
        states = [_state(*self.square(), True, scale, offset, self.M)]
        if self.before:
            states.append(_state(*self.unmasked(), False, scale, 0, self.M))
        return states


def products_of(call: AttentionCall) -> _Products | None:
    """Return the operands of cuDNN for `call`, with k and v not filled yet; None if cuDNN does not serve it."""
    (T, H, D), B, K = call.q.shape, call.seq_lens.shape[0], call.k.shape[2]
    M, prefix = call.max_seqlen_q, call.max_seqlen_k - call.max_seqlen_q
    # the bound of many sequences does not say that all have as many keys, unless each has as many as new tokens
    if T != B * M or prefix < 0 or (prefix and B > 1):
        return None
    before = _rounded_down(prefix) if prefix >= LEAST_PREFIX else 0
    offset = prefix - before
    side = _rounded_up(offset + M)
    rows = max(side, offset + _rounded_up(M)) if before else side
    is_copied = rows != M or not is_aligned(call.q)
    queries = call.q.new_empty(B, rows, H, D) if is_copied else call.q.view(B, M, H, D)
    k, v = (call.q.new_empty(B, before + side, K, D) for _ in range(2))
    products = _Products(prefix, before, M, side, queries, k, v)
    if not _cudnn_serves(*products.square(), True) or (before and not _cudnn_serves(*products.unmasked(), False)):
        return None
    if is_copied:
        queries.narrow(1, offset, M).copy_(call.q.view(B, M, H, D))
    return products


def is_aligned(x: Tensor) -> bool:
    """Return whether each vector of x begins at a multiple of 16 bytes, as libraries need it, if the storage does."""
    return not any(number * x.element_size() % 16 for number in (x.storage_offset(), *x.stride()[:-1]))


def _rounded_up(n: int) -> int:
    """Return the least multiple of the step of `n` that is not less."""
    return -(-n // _step(n)) * _step(n)


def _rounded_down(n: int) -> int:
    """Return the largest multiple of the step of `n` that is not more."""
    return n // _step(n) * _step(n)


def _step(n: int) -> int:
    return max(128, 1 << max(0, n.bit_length() - 5))


def _operands(
    q: Tensor, k: Tensor, v: Tensor, rows: tuple[int, int], keys: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [B, heads, N, D] of the queries `rows` and of `keys`, both (first, number)."""
    return _heads_first(q.narrow(1, *rows)), _heads_first(k.narrow(1, *keys)), _heads_first(v.narrow(1, *keys))


def _heads_first(x: Tensor) -> Tensor:
    """Return x [B, N, heads, D] as [B, heads, N, D]. Strides of a batch of one do not depend on what x is a part of."""
    return (x.squeeze(0).unsqueeze(0) if x.shape[0] == 1 else x).transpose(1, 2)


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether torch's operator of cuDNN takes q [B, H, M, D] and k, v [B, K, N, D].

    torch's own check says no where enable_cudnn_sdp(False) was called, as vLLM does. The operator does not obey this
    switch. The switch is one of the whole process, so this function does not turn it on for the time of a question:
    another thread might attend then. It asks for less instead: GPUs and versions for which torch prefers cuDNN, and
    heads that cuDNN takes on all of them.
    """
    if torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
        return torch.backends.cuda.can_use_cudnn_attention(params)
    is_new = (torch.backends.cudnn.version() or 0) > 91500  # type: ignore[no-untyped-call]
    is_served = max(q.shape[:2]) < 1 << 16 and q.shape[3] <= 128 and not torch.are_deterministic_algorithms_enabled()
    return is_new and is_served and torch.cuda.get_device_capability(q.device) in ((9, 0), (10, 0), (10, 3))


def _state(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, first: int, rows: int) -> AttentionState:
    """Return the state of `rows` queries of each sequence, from `first` on, by cuDNN."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    lse = lse.reshape(q.shape[:3]).transpose(1, 2)
    return AttentionState(out.transpose(1, 2).narrow(1, first, rows), lse.narrow(1, first, rows))
