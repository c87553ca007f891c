"""KV dtypes: what each dtype of the stored keys and values costs in bytes, and in answers of the bundled checkpoint.

Documents of records are read once; each question continues a fork of them, with the right answer behind it. An answer
is right if each of its tokens has the largest logit. The error is that of the logits at these tokens, against keys and
values of bfloat16: the root of the mean square, relative to the standard deviation of the logits.

Run it by `python -m pagedkv.bench.generate.kv_dtypes`: a minute. It prints the table of docs/reference/command-line.md
and appends a row for each figure to bench/results/generate.jsonl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.bench import record
from pagedkv.bench.progress import track
from pagedkv.checkpoint import BUNDLED
from pagedkv.checkpoint.records import document
from pagedkv.checkpoint.tokenizer import Tokenizer
from pagedkv.model.decoder import Decoder
from pagedkv.model.loop.pool import new_cache

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.cache import PagedKVCache
    from pagedkv.core import AddressSpace

KINDS: Final = (None, "fp8_e4m3", "fp8_e5m2", "int8", "int4")
DOCUMENTS: Final = ((1000, 2), (4000, 2))
"""Tokens of a document, and how many documents."""
QUESTIONS: Final = 100
FIRST_SEED: Final = 2_000


class Reader:
    """The bundled checkpoint over a pool of one KV dtype."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, kv_dtype: str | None) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self.cache: PagedKVCache = new_cache(decoder, block_size=16, kv_dtype=kv_dtype, num_frames=600)
        self.layers = decoder.bind(self.cache)

    def read(self, space: AddressSpace, ids: list[int], num_logits: int) -> Tensor:
        """Append tokens to a sequence; return the logits after the last `num_logits` of them."""
        batch = self.cache.plan([space], [len(ids)])
        rows = torch.arange(len(ids) - num_logits, len(ids))
        logits = self.decoder.forward(torch.tensor(ids), batch, self.layers, logits_of=rows)
        self.cache.commit(batch, ids)
        return logits

    def answers(self, num_tokens: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Return, for each question about a document, the logits of its answer [n, V] and the right tokens [n]."""
        asked, found = document(num_tokens, seed=seed), []
        space = self.cache.open()
        self.read(space, self.tokenizer.encode(asked.text), 1)
        for question in asked.questions[:QUESTIONS]:
            ids = self.tokenizer.encode(question.text, special_tokens=False)
            answer = self.tokenizer.encode(question.answer, special_tokens=False)
            fork = space.fork()
            logits = self.read(fork, [*ids, *answer], len(answer) + 1)
            fork.release()
            found.append((logits, torch.tensor([*answer, *self.tokenizer.eos_ids])))
        space.release()
        return found


def measured() -> list[dict[str, Any]]:
    """Return the rows of all kinds: bytes of a token, and for each length of documents the recall and the error."""
    decoder, tokenizer = Decoder.load(BUNDLED), Tokenizer.load(BUNDLED)
    exact: dict[int, list[tuple[Tensor, Tensor]]] = {}
    rows = []
    for kind in track(KINDS, "kinds of K and V"):
        reader, name = Reader(decoder, tokenizer, kind), kind or "bfloat16"
        rows.append(_row("KV", {"kv": name}, "bytes a token", reader.cache.spec.bytes_per_token))
        for num_tokens, count in DOCUMENTS:
            found = [pair for i in range(count) for pair in reader.answers(num_tokens, FIRST_SEED + num_tokens + i)]
            plain = exact.setdefault(num_tokens, found)
            right = sum(bool((logits.argmax(-1) == answer).all()) for logits, answer in found)
            ours, wanted = (torch.cat([logits for logits, _ in part]) for part in (found, plain))
            error = float((ours - wanted).square().mean().sqrt() / wanted.std())
            axes = {"kv": name, "tokens": num_tokens}
            rows.append(_row("KV, recall", axes, "answers right, of 100", 100 * right / len(found)))
            rows.append(_row("KV, error of the logits", axes, "of their deviation", error))
    return rows


def _row(case: str, axes: dict[str, Any], unit: str, figure: float) -> dict[str, Any]:
    return {"bench": "generate", "case": case} | axes | {"variant": "pagedkv", "unit": unit, "median": figure}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as the manual has them: a line for each kind."""
    questions = {num_tokens: QUESTIONS * count for num_tokens, count in DOCUMENTS}
    heads = " | ".join(f"right, {num_tokens:,} tokens | error" for num_tokens in questions)
    lines = [f"| `--kv-dtype` | bytes per token | {heads} |", f"|---|---|{'---|---|' * len(questions)}"]
    for kind in dict.fromkeys(row["kv"] for row in rows):
        size, *rest = (row["median"] for row in rows if row["kv"] == kind)
        cells = [f"{size:,}"]
        for (right, error), count in zip(zip(rest[::2], rest[1::2], strict=True), questions.values(), strict=True):
            cells += [f"{right * count / 100:.0f} of {count}", f"{error:.2%}"]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, keep the rows, and print the table."""
    rows, about = measured(), record.provenance()
    record.append([row | about for row in rows], None, "generate")
    print(table(rows))


if __name__ == "__main__":
    main()
