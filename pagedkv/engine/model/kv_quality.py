"""The cost of KV kinds on a model of the engine: a decoder reads a text with each kind, see pagedkv/kv_gate.py.

A step stores its keys before it reads them, so no query sees a key in full precision. The caches have one group for all
layers: no page behind a window is given back, and a calibration reads the keys of all tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.cache.states import LEAST_FRAMES
from pagedkv.engine.model.pool import new_cache
from pagedkv.kv_gate import CALIBRATED, PIECE, Costs, Gate

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.model.decoder import Decoder

BLOCK_SIZE: Final = 16
_TURNS: Final = 5
"""Decode steps of each kind that are timed; the fastest counts."""


@torch.inference_mode()
def kv_quality(
    decoder: Decoder,
    token_ids: Sequence[int],
    kinds: Sequence[str] | None = None,
    calibration: Tensor | None = None,
) -> Costs:
    """Measure each of `kinds` on a text, with the decoder's kernels. The key None stands for full precision.

    It takes a forward of the text for each kind and one more, and a pool for each of them.
    kinds:       None for those of the gate
    calibration: for the kinds that take one, see `calibration_of`
    Raises: InvalidRequest for fewer than three tokens, or an unknown kind
    """
    ids = torch.tensor(token_ids, dtype=torch.int64, device=decoder.device)
    spec = decoder.config.spec(block_size=BLOCK_SIZE, dtype=str(decoder.dtype).removeprefix("torch."))
    every = (None, *(Gate.kinds([spec]) if kinds is None else kinds))
    readers = {kind: _Reader(decoder, ids, kind, calibration if kind in CALIBRATED else None) for kind in every}
    costs = Gate.compare(ids, {kind: reader.log_probabilities() for kind, reader in readers.items()}, [spec])
    turns = [{kind: reader.decode_s() for kind, reader in readers.items()} for _ in range(_TURNS)]
    keys = spec.num_layers * len(ids)
    return {kind: cost._replace(keys_per_s=keys / min(turn[kind] for turn in turns)) for kind, cost in costs.items()}


@torch.inference_mode()
def calibration_of(decoder: Decoder, token_ids: Sequence[int]) -> Tensor | None:
    """Return the mean of each channel of K over a text, and the root of its standard deviation. None without a text.

    The last token is not read. Shapes: returns float32 [L, K, 2, D]
    """
    if not token_ids:
        return None
    reader = _Reader(decoder, torch.tensor(token_ids, dtype=torch.int64, device=decoder.device))
    for _ in reader.log_probabilities():
        pass
    batch = reader.cache.plan([reader.space], [0])
    return torch.stack([Gate.calibration(reader.cache.gather(i, batch)[0]) for i in range(len(reader.cache))])


def _settled_kind(
    gate: Gate, decoder: Decoder, encode: Callable[[str], list[int]], text: str | None, identity: str
) -> tuple[str | None, Tensor | None]:
    """Return the KV kind that a gate takes, None for full precision, and its calibration.

    text: a text of the user, or None. identity: the weights. Raises: InvalidRequest for a text that is too short
    """
    ids, others = gate.token_ids(encode, decoder.config.max_position_embeddings, text)

    def measure() -> tuple[Costs, Any]:
        found = calibration_of(decoder, others)
        return kv_quality(decoder, ids, None, found), None if found is None else found.tolist()

    kind, found = gate.settle(f"{identity} {decoder.dtype} {decoder.device.type} {ids} {others}", measure)
    return kind, None if found is None else torch.tensor(found, device=decoder.device)


class _Reader:
    """A decoder, a text and a cache of one kind for it."""

    def __init__(
        self, decoder: Decoder, token_ids: Tensor, kv_dtype: str | None = None, calibration: Tensor | None = None
    ) -> None:
        self.decoder, self.token_ids = decoder, token_ids
        self.cache = new_cache(
            decoder, block_size=BLOCK_SIZE, kv_dtype=kv_dtype, grouped=False, calibration=calibration,
            num_frames=len(token_ids) // BLOCK_SIZE + 1, state_memory=LEAST_FRAMES if decoder.config.linear else None,
        )  # fmt: skip
        self.calls, self.space = decoder.bind(self.cache), self.cache.open()

    def log_probabilities(self) -> Iterator[Tensor]:
        """Yield those of the token after each token but the last, in pieces: float32 [T, V]."""
        for first in range(0, len(self.token_ids) - 1, PIECE):
            piece = self.token_ids[first : min(first + PIECE, len(self.token_ids) - 1)]
            batch = self.cache.plan([self.space], [len(piece)])
            found = self.decoder.forward(piece, batch, self.calls).log_softmax(-1)
            self.cache.commit(batch, None)  # first: the reader may stop here, and recurrent states allow one plan
            yield found

    def decode_s(self) -> float:
        """Return the seconds that the attention of all layers takes for the token after the text."""
        config, batch = self.decoder.config, self.cache.plan([self.space], [1])
        q = torch.ones(1, config.num_heads, config.head_dim, dtype=self.decoder.dtype, device=self.decoder.device)
        began = time.perf_counter()
        for layer, call in enumerate(self.calls):
            out = call.attend(q, batch[layer])
        out[0, 0, 0].item()  # a GPU has finished
        seconds = time.perf_counter() - began
        self.cache.abort(batch)
        return seconds
