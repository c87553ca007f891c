"""The gate of `patch(model, kv_dtype="auto")`: the model reads a text with each KV kind, see pagedkv/kv_gate.py.

A pool for each kind holds the text, and a PagedCache reads it piece by piece through the hooks of `patch`. The
calibration reads the keys of a cache of the host, which keeps no more than its window in a layer with one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import xxhash
from transformers import DynamicCache

from pagedkv import __version__
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.cache import PagedCache
from pagedkv.integrations.transformers.geometry import CACHE, Geometry, shapes_of
from pagedkv.integrations.transformers.pool import Pool
from pagedkv.integrations.transformers.trial import _plain
from pagedkv.kv_gate import CALIBRATED, PIECE, Costs, Gate

_BLOCK_SIZE: Final = 16


@torch.no_grad()  # type: ignore[untyped-decorator]
def _settled_kind(
    gate: Gate, model: Any, patched: Callable[[Pool], Any], tokenizer: Any, text: str | None
) -> dict[str, Any]:
    """Return the options of the pool that a gate takes: `kv_dtype`, None for full precision, and `calibration`.

    patched: patches the model with a pool. text: a text of the user, or None
    Raises: InvalidRequest for a text that is too short, or no tokenizer
    """
    if tokenizer is None:
        raise InvalidRequest("kv_dtype auto measures on a text; give the tokenizer, too: patch(model, tokenizer=...)")
    geometry, config = Geometry.of(model.config), model.config.get_text_config(decoder=True)
    specs, _ = geometry.specs(shapes_of(model, geometry).kv, _BLOCK_SIZE, None)
    most = getattr(config, "max_position_embeddings", 1 << 20)
    ids, others = gate.token_ids(lambda text: tokenizer(text).input_ids, most, text)
    num_frames = len(specs) * (len(ids) // _BLOCK_SIZE + 2)
    size: dict[str, Any] = {"num_frames": num_frames, "block_size": _BLOCK_SIZE, "state_memory": 8}
    pool_of = functools.partial(Pool, model.config, prefix_cache=False, **size)

    def measure() -> tuple[Costs, Any]:
        handle = patched(pool_of())
        try:
            with _plain(model):
                found = _calibration(model, geometry, others)
                pools: dict[str | None, Pool] = {None: pool_of()}
                for kind in gate.kinds(specs):
                    pools[kind] = pool_of(kv_dtype=kind, calibration=found if kind in CALIBRATED else None)
                readers = {kind: _read(model, ids[:-1], pool) for kind, pool in pools.items()}
                costs = gate.compare(torch.tensor(ids, device=model.device), readers, specs)
        finally:
            handle.unpatch()
        return costs, None if found is None else found.tolist()

    identity = f"{__version__} transformers {_digest(model)} {model.device.type} {ids} {others}"
    kind, found = gate.settle(identity, measure)
    return {"kv_dtype": kind, "calibration": None if found is None else torch.tensor(found)}


def _read(model: Any, token_ids: list[int], pool: Pool) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities of the token after each token, in pieces: float32 [T, V]."""
    with PagedCache(model.config, pool=pool) as cache:
        for first in range(0, len(token_ids), PIECE):
            piece = torch.tensor([token_ids[first : first + PIECE]], device=model.device)
            yield model(input_ids=piece, use_cache=True, **{CACHE: cache}).logits[0].float().log_softmax(-1)


def _calibration(model: Any, geometry: Geometry, token_ids: list[int]) -> torch.Tensor | None:
    """Return float32 [L, K, 2, D]; None without a text, or if the shapes of layers differ."""
    cache: Any = DynamicCache(config=model.config)
    if not token_ids:
        return None
    model.get_decoder()(input_ids=torch.tensor([token_ids], device=model.device), use_cache=True, **{CACHE: cache})
    found = [Gate.calibration(cache.layers[layer].keys[0].transpose(0, 1)) for layer in geometry.cached]
    return torch.stack(found) if len({each.shape for each in found}) == 1 else None


def _digest(model: Any) -> str:
    """Return 32 hex digits for the config and all weights."""
    digest = xxhash.xxh3_128(model.config.to_json_string().encode())
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {weight.dtype} {[*weight.shape]}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
