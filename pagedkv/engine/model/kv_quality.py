"""The cost of a KV kind on a model: its predictions of each token of a text next to those with full precision.

Position t of the text predicts token t + 1. Full precision predicts with probabilities p, a kind with q:

    KL_t = sum_v p_t(v) (log p_t(v) - log q_t(v))        natural logarithm

A step stores its keys before it reads them, so no query sees a key in full precision. All kinds read the text in equal
pieces, side by side, and only two pieces of log-probabilities are held: 1,024 tokens of Gemma's vocabulary take 1 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pagedkv.engine.model.pool import new_cache
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.model.decoder import Decoder

BLOCK_SIZE: Final = 16
PIECE: Final = 128


class _Quality(NamedTuple):
    """A kind's predictions of a text, next to those with full precision.

    kl, kl_p99: mean and 99th percentile of the KL divergence, in nats
    kl_error:   the standard error of `kl` for independent positions
    same_top:   share of positions with the same most likely token
    perplexity: exp of the mean loss, of the kind alone
    """

    kl: float
    kl_p99: float
    kl_error: float
    same_top: float
    perplexity: float


@torch.inference_mode()
def kv_quality(decoder: Decoder, token_ids: Sequence[int], kv_dtypes: Sequence[str]) -> dict[str | None, _Quality]:
    """Measure each of `kv_dtypes` on a text, with the decoder's kernels. The key None stands for full precision.

    It takes a forward of the text for each kind and one more, and a pool for each of them.
    Raises: InvalidRequest for fewer than three tokens, or an unknown kind
    """
    ids = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
    if len(ids) < 3:
        raise InvalidRequest(f"the text has {len(ids)} tokens; a mean and its standard error need three or more")
    readers = {kind: _read(decoder, ids[:-1], kind) for kind in (None, *kv_dtypes)}
    positions: dict[str | None, list[Tensor]] = {kind: [] for kind in readers}
    for first in range(1, len(ids), PIECE):
        targets, full = ids[first : first + PIECE], next(readers[None])
        for kind, reader in readers.items():
            log_q = next(reader) if kind else full
            kl = (full.exp() * (full - log_q)).sum(-1)
            loss = -log_q.gather(1, targets[:, None])[:, 0]
            positions[kind].append(torch.stack([kl, full.argmax(-1) == log_q.argmax(-1), loss]))
    found = {}
    for kind, pieces in positions.items():
        kl, same_top, loss = torch.cat(pieces, 1).double()
        error = kl.std() / len(kl) ** 0.5
        numbers = kl.mean(), kl.quantile(0.99), error, same_top.mean(), loss.mean().exp()
        found[kind] = _Quality(*(number.item() for number in numbers))
    return found


def _read(decoder: Decoder, token_ids: Tensor, kv_dtype: str | None) -> Iterator[Tensor]:
    """Yield the log-probabilities of the token after each token, in pieces: float32 [T, V]."""
    num_frames = -(-len(token_ids) // BLOCK_SIZE)
    cache = new_cache(decoder, block_size=BLOCK_SIZE, kv_dtype=kv_dtype, grouped=False, num_frames=num_frames)
    calls, space = decoder.bind(cache), cache.open()
    for first in range(0, len(token_ids), PIECE):
        piece = token_ids[first : first + PIECE]
        batch = cache.plan([space], [len(piece)])
        yield decoder.forward(piece, batch, calls).log_softmax(-1)
        cache.commit(batch, None)
