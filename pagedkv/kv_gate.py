"""The choice of a KV kind by its measured cost: `kv_dtype="auto"`, or "auto:BOUND". This file knows no model.

Position t of a text predicts token t + 1. Full precision predicts with probabilities p, a kind with q:

    KL_t = sum_v p_t(v) (log p_t(v) - log q_t(v))        natural logarithm

The smallest kind with a mean KL plus one standard error under the bound is taken, or none. The engine and the
integration of transformers read the text, each with its own model; tensors are arguments here. The costs of a model are
kept in the cache folder of debug.py, so a second start measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagedkv import debug
from pagedkv.errors import InvalidRequest
from pagedkv.spec import KVSpec

PIECE: Final = 128
"""Tokens that all kinds read before the next ones: 1,024 log-probabilities of Gemma's vocabulary take 1 GiB."""
BOUND: Final = 0.02
"""The bound of "auto", in nats. On real models int8 costs a tenth to a third of it."""
CALIBRATED: Final = ("k8v4", "k5v4")
_KINDS: Final = ("fp8_e4m3", "int8", *CALIBRATED)
_TEXTS: Final = Path(__file__).parent / "kv_texts"
_LEAST, _MOST = 64, 1024  # different tokens of a text, and tokens that are read
_LOG: Final = logging.getLogger(__name__)


class _Cost(NamedTuple):
    """A kind's predictions of a text next to those with full precision, and its size.

    kl, kl_p99: mean and 99th percentile of the KL divergence, in nats
    kl_error:   the standard error of `kl` for independent positions
    same_top:   share of positions with the same most likely token
    perplexity: exp of the mean loss, of the kind alone
    bits:       bits of an element of K or V, scales included
    keys_per_s: keys of a layer that the attention of one token reads in a second; 0: not measured
    """

    kl: float
    kl_p99: float
    kl_error: float
    same_top: float
    perplexity: float
    bits: float
    bytes_per_token: int
    keys_per_s: float = 0


Costs = dict[str | None, _Cost]
"""The cost of each kind. The key None stands for full precision."""


@dataclass(frozen=True)
class Gate:
    """The bound that a kind must keep. bound: mean KL plus one standard error, in nats"""

    bound: float = BOUND

    @classmethod
    def of(cls, kv_dtype: Any, kv_text: object = None) -> Gate | None:
        """Return the gate of "auto" or "auto:BOUND"; None for another name, with which there is no text to measure on.

        Raises: InvalidRequest
        """
        name, colon, bound = kv_dtype.partition(":") if isinstance(kv_dtype, str) else ("", "", "")
        if name != "auto":
            if kv_text is not None:
                raise InvalidRequest(f"kv_text is given, and kv_dtype is {kv_dtype!r}; only kv_dtype auto reads a text")
            return None
        with suppress(ValueError):
            if 0 < (nats := float(bound) if colon else BOUND) < math.inf:
                return cls(nats)
        raise InvalidRequest(f"kv_dtype is {kv_dtype!r}; give auto, or auto:BOUND with a number above 0 (auto:{BOUND})")

    @staticmethod
    def kinds(specs: Sequence[KVSpec]) -> list[str]:
        """Return the kinds in which each geometry can be stored."""
        found = list[str]()
        for kind in _KINDS:
            with suppress(InvalidRequest):
                found += [kind] * all(replace(spec, kv_dtype=kind) for spec in specs)
        return found

    @staticmethod
    def token_ids(encode: Callable[[str], Sequence[int]], most: int, text: str | None) -> tuple[list[int], list[int]]:
        """Return the tokens of the text to measure on, and of the one to calibrate with: none if the model cannot read.

        text: None for that of the package. most: the positions of the model
        Raises: InvalidRequest for a text that is too short
        """
        texts = [(_TEXTS / f"{name}.txt").read_text(encoding="utf-8") for name in ("measure", "calibrate")]
        ids, others = ([*encode(each)][: min(most, _MOST)] for each in (texts[0] if text is None else text, texts[1]))
        if (count := len({*ids})) < _LEAST:
            raise InvalidRequest(
                f"KV kinds are measured on a text of {_LEAST} different tokens or more, and this one has {count} (all "
                "unknown words are one token); give a longer text, like those that the model reads"
            )
        return ids, others if len({*others}) >= _LEAST else []

    @staticmethod
    def calibration(keys: Any) -> Any:
        """Return a layer's calibration: the mean of each channel, and the root of its standard deviation (1 if 0).

        Shapes: keys [T, K, D]; returns float32 [K, 2, D]
        """
        spread = keys.float().std(0).sqrt()
        spread[spread == 0] = 1
        found = spread.new_empty(keys.shape[1], 2, keys.shape[2])
        found[:, 0], found[:, 1] = keys.float().mean(0), spread
        return found

    @staticmethod
    def compare(token_ids: Any, readers: dict[str | None, Iterator[Any]], specs: Sequence[KVSpec]) -> Costs:
        """Measure each kind on a text. Raises: InvalidRequest for fewer than three tokens

        readers: log-probabilities of the token after each token, in pieces, of each kind and of full precision
        specs:   the geometries of the layers, in full precision
        Shapes:  token_ids int64 [T]; a piece is float32 [PIECE or what is left, V]
        """
        if len(token_ids) < 3:
            raise InvalidRequest(f"the text has {len(token_ids)} tokens; a mean and its standard error need three")
        found: dict[str | None, list[list[float]]] = {kind: [[], [], []] for kind in readers}
        for first in range(1, len(token_ids), PIECE):
            targets, full = token_ids[first : first + PIECE], next(readers[None])
            for kind, reader in readers.items():
                log_q = full if kind is None else next(reader)
                kl, same = (full.exp() * (full - log_q)).sum(-1).clamp(min=0), full.argmax(-1) == log_q.argmax(-1)
                for numbers, new in zip(found[kind], (kl, same, -log_q.gather(1, targets[:, None])[:, 0]), strict=True):
                    numbers += new.tolist()
        return {kind: _cost(found[kind], [replace(spec, kv_dtype=kind) for spec in specs]) for kind in found}

    def settle(self, identity: str, measure: Callable[[], tuple[Costs, Any]]) -> tuple[str | None, Any]:
        """Return the kind that is taken, None for full precision, and its calibration as lists, or None. Log the table.

        identity: everything that decides the costs. measure: it is called if they are not kept
        """
        costs, calibration = _kept(identity, measure)
        kind, held = self.choose(costs), f"has a mean KL plus one standard error under {self.bound:g}"
        verdict = f"{kind}, the smallest kind that {held}" if kind else f"full precision stays, as no kind {held}"
        _LOG.warning("%s\nkv_dtype auto: %s", self.table(costs), verdict)
        return kind, calibration if kind in CALIBRATED else None

    def choose(self, costs: Costs) -> str | None:
        """Return the smallest kind under the bound; of equal sizes the one that costs less. None if there is none."""
        held = [kind for kind in costs if kind and not self._refuses(costs[kind])]
        return min(held, key=lambda kind: (costs[kind].bytes_per_token, costs[kind].kl), default=None)

    def _refuses(self, cost: _Cost) -> bool:
        return not cost.kl + cost.kl_error < self.bound  # NaN is refused

    def table(self, costs: Costs) -> str:
        """Return the costs in lines, and which kinds the bound refuses."""
        heads = "kind", "bits", "KL", "± error", "KL p99", "same top-1", "perplexity", "bytes/token", "keys/s", ""
        rows = [list(heads)]
        for kind, at in costs.items():
            kl = (f"{number:.4f}" for number in (at.kl, at.kl_error, at.kl_p99))
            speed, verdict = f"{at.keys_per_s:,.0f}", "over the bound" * self._refuses(at)
            row = kind or "full", f"{at.bits:.2f}", *kl, f"{at.same_top:.1%}", f"{at.perplexity:.2f}"
            rows.append([*row, f"{at.bytes_per_token:,}", speed if at.keys_per_s else "-", verdict])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)


def _cost(numbers: list[list[float]], specs: list[KVSpec]) -> _Cost:
    """Return the cost of a kind. numbers: KL, equal top-1 and loss of each position. specs: with the kind"""
    kl, (mean, same, loss) = numbers[0], map(statistics.fmean, numbers)
    p99 = statistics.quantiles(kl, n=100, method="inclusive")[98]
    error = (sum((each - mean) ** 2 for each in kl) / (len(kl) - 1) / len(kl)) ** 0.5
    num_bytes = sum(spec.bytes_per_token for spec in specs)
    elements = sum(spec.num_layers * spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in specs)
    perplexity = math.exp(min(loss, 700))  # a float ends at exp(709)
    return _Cost(mean, p99, error, same, perplexity, 8 * num_bytes / elements, num_bytes)


def _kept(identity: str, measure: Callable[[], tuple[Costs, Any]]) -> tuple[Costs, Any]:
    """Return the result of `measure` for an equal identity: from a file, or measured now and kept there."""
    name = f"kv-gate/{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, RuntimeError, ValueError, TypeError):  # no file, no home, or that of another version
        costs, calibration = json.loads((debug.cache_folder() / name).read_text())
        return {kind: _Cost(*cost) for kind, cost in costs}, calibration
    _LOG.warning("measuring what each KV kind costs this model, once: six forward passes of a thousand tokens")
    costs, calibration = measure()
    with suppress(OSError, RuntimeError):  # a folder that cannot be written: the next start measures again
        file = debug.cache_folder() / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as draft:
            Path(draft, "costs").write_text(json.dumps([list(costs.items()), calibration]))
            os.replace(Path(draft, "costs"), file)
    return costs, calibration
