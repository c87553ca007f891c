"""Engines with weights of integers: what is quantised, what stays, and that the bundled checkpoint still recalls."""

from __future__ import annotations

import json
from operator import eq
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pagedkv.engine.checkpoint import BUNDLED, weights
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.linear import Matrix
from tests.engine.conftest import SMALL, first_logits
from tests.records import document

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MATRICES = ("qkv", "out", "gate_up", "down")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Return a random checkpoint with a tied head, whose matrices have a multiple of 64 columns."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"intermediate_size": 128}, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def parts(found: Any) -> list[Tensor | Matrix]:
    """Return the norms, biases and matrices of all layers, and the head."""
    return [found.head, *(part for layer in found.layers for part in vars(layer).values() if part is not None)]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_matrices_of_linear_layers_are_integers_and_the_rest_stays(tied: Path, kind: str) -> None:
    plain, small = Decoder.load(tied).weights, Decoder.load(tied, weights=kind).weights
    assert torch.equal(plain.embedding, small.embedding)
    assert torch.equal(plain.norm, small.norm)
    for one, other in zip(plain.layers, small.layers, strict=True):
        for name, part in vars(one).items():
            if name in MATRICES:
                wanted = Matrix.quantised(part, kind)
                assert torch.equal(getattr(other, name).stored, wanted.stored)
                assert torch.equal(getattr(other, name).scales, wanted.scales)
            else:
                assert part is None or torch.equal(part, getattr(other, name))
    assert isinstance(small.head, Matrix)
    assert torch.equal(small.head.stored, Matrix.quantised(plain.embedding, kind).stored)
    share = {"int8": 0.5, "int4": 0.3}[kind]  # of bfloat16; these are float32
    assert sum(part.nbytes for part in parts(small)) < share / 2 * 1.2 * sum(part.nbytes for part in parts(plain))


def test_no_dense_copy_is_made(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    allocate = weights.huge_pages.allocate
    monkeypatch.setattr(weights.huge_pages, "allocate", lambda size: taken.append(size) or allocate(size))
    small = Decoder.load(tied, weights="int4").weights
    held = small.embedding.nbytes + small.norm.nbytes + sum(part.nbytes for part in parts(small))
    assert len(taken) == 1
    assert held <= taken[0] <= held + 64 * (len(parts(small)) * 2 + 2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_logits_are_those_of_the_values(tied: Path, kind: str) -> None:
    small, plain = Decoder.load(tied, weights=kind), Decoder.load(tied)
    for layer, dense in zip(small.weights.layers, plain.weights.layers, strict=True):
        for name in MATRICES:
            getattr(dense, name).copy_(getattr(layer, name).dense(torch.float32))
    exact, head = first_logits(plain), small.weights.head
    found = first_logits(small)
    object.__setattr__(plain.weights, "head", head.dense(torch.float32))  # type: ignore[union-attr]
    exact = first_logits(plain)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_unknown_names_and_columns_that_make_no_groups_are_refused(checkpoint: Any) -> None:
    with pytest.raises(InvalidRequest, match="weights is 'int3'; it must be None or one of int8, int4"):
        Engine.load(weights="int3")
    with pytest.raises(InvalidRequest, match=r"multiple of 64 columns, and .*o_proj.weight has 96"):
        Decoder.load(checkpoint("llama").folder, weights="int8")


def answers(kind: str | None, questions: list[tuple[str, str]]) -> list[str]:
    engine = Engine.load(weights=kind)
    params = SamplingParams(max_tokens=24)
    return [request.completions[0].text for request in engine.generate([text for text, _ in questions], params)]


def test_the_bundled_checkpoint_recalls_with_integers_as_without() -> None:
    """The limit of int4 is lower: of 100 questions it answers as many, but its logits are off by 1 % and not 0.1 %."""
    page = document(1000, seed=50_000)
    questions = [(page.prompt(question), question.answer) for question in page.questions[:8]]
    assert json.loads((BUNDLED / "config.json").read_text())["hidden_size"] % 64 == 0
    right = [answer for _, answer in questions]
    plain, int8, int4 = (answers(kind, questions) for kind in (None, "int8", "int4"))
    assert sum(map(eq, plain, right)) >= 7
    assert int8 == plain
    assert sum(map(eq, int4, right)) >= 7
