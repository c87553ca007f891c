"""The share of questions that a checkpoint answers right: held-out documents, through transformers. Needs torch.

A question counts as right if each token of its answer, the stop token included, has the largest logit after the right
tokens before it. Greedy generation then writes exactly this answer. Each question follows the bare document, whose keys
and values are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pagedkv.checkpoint.records import ANSWERS, document

if TYPE_CHECKING:
    from pathlib import Path

    from pagedkv.checkpoint.records import Document

CASES = ((1000, 5, 100), (4000, 3, 200), (8000, 1, 400))
"""(tokens of a document, number of documents, questions about each document)"""
FIRST_SEED = 1_000


@dataclass
class Score:
    """Counts over the questions so far.

    tokens: tokens of all answers. margin: the smallest lead of a right token's logit over that of any token but its
    synonym.
    """

    right: int = 0
    asked: int = 0
    tokens: int = 0
    margin: float = float("inf")


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def ask(model: Any, tokenizer: Any, held_out: Document, num_questions: int, score: Score) -> None:
    """Ask the first `num_questions` questions about a document and add the results to `score`."""
    synonyms = {
        a: b
        for step in " ".join(ANSWERS.values()).split()
        if "|" in step
        for a, b in [tokenizer.convert_tokens_to_ids(step.split("|"))]
    }
    cache = DynamicCache()
    ids = tokenizer(held_out.text, return_tensors="pt").input_ids
    model(ids, past_key_values=cache, logits_to_keep=1)
    for question in held_out.questions[:num_questions]:
        asked, answer = (
            tokenizer(text, add_special_tokens=False).input_ids for text in (question.text, question.answer)
        )
        answer = torch.tensor([*answer, tokenizer.eos_token_id])
        logits = (
            model(torch.tensor([[*asked, *answer[:-1]]]), past_key_values=cache).logits[0, len(asked) - 1 :].float()
        )
        cache.crop(ids.shape[1] - cache.get_seq_length())
        score.right += bool((logits.argmax(-1) == answer).all())
        score.asked += 1
        score.tokens += len(answer)
        best = logits.gather(1, answer[:, None])[:, 0]
        for row, token in enumerate(answer.tolist()):
            logits[row, [token, synonyms.get(token, token)]] = -torch.inf
        score.margin = min(score.margin, float((best - logits.amax(-1)).min()))


def evaluate(folder: Path) -> int:
    """Print a table of results. Returns: exit status 1 below 99 % at 1,000 tokens or below 98 % at more tokens"""
    torch.set_num_threads(1)  # the layers are too small for several threads
    print("| prompt, tokens | dtype | right | asked | share | tokens per answer | smallest lead |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = load(folder, dtype)
        for num_tokens, num_documents, num_questions in CASES:
            score = Score()
            for i in range(num_documents):
                ask(model, tokenizer, document(num_tokens, seed=FIRST_SEED + num_tokens + i), num_questions, score)
            share = score.right / score.asked
            failed |= share < (0.99 if num_tokens <= 1000 else 0.98)
            name = str(dtype).removeprefix("torch.")
            print(
                f"| {num_tokens:,} | {name} | {score.right} | {score.asked} | {share:.2%} "
                f"| {score.tokens / score.asked:.1f} | {score.margin:.1f} |",
                flush=True,
            )
    return int(failed)
