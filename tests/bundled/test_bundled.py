"""The bundled checkpoint: reproducible byte for byte, readable by transformers, right about held-out documents."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from tokenizers import Tokenizer

from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
from tests import records
from tests.records import (
    ANSWERS,
    DEMO_ANSWER,
    KINDS,
    MARKERS,
    UNKNOWN,
    WORD,
    document,
    num_tokens_of,
)

if TYPE_CHECKING:
    from tests.records import Document, Question

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "pagedkv" / "checkpoint" / "bundled"
EOS: Final = "</s>"

LARGEST: Final = 16 * 10**6
FLOORS: Final = {1000: 0.99, 4000: 0.98}
"""Tokens of a prompt → the least share of questions with a fully right answer."""
LEAD: Final = 4.0
"""The least lead of a right token's logit: half of the measured one. A less exact dtype or cache lowers the lead before
answers fail."""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/make_bundled.py"), *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@dataclass
class Reader:
    """A model that reads a document once and then answers each question without seeing the others."""

    model: Any
    tokenizer: Tokenizer

    @torch.inference_mode()
    def answers(self, text: str, questions: list[Question]) -> list[tuple[str, float]]:
        """Return each greedy answer of at most 24 tokens, `</s>` included, and the smallest lead of its tokens."""
        from transformers import DynamicCache

        cache = DynamicCache()
        read = self.tokenizer.encode(text).ids
        self.model(torch.tensor([read]), past_key_values=cache, logits_to_keep=1)
        found = []
        for question in questions:
            ids = self.tokenizer.encode(question.text, add_special_tokens=False).ids
            output, lead = list[int](), float("inf")
            while len(output) < 24 and EOS not in map(self.tokenizer.id_to_token, output[-1:]):
                logits = self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
                best = logits.topk(3)
                ids = best.indices[:1].tolist()
                output += ids
                synonyms = self._are_synonyms(best.indices.tolist())
                lead = min(lead, float(best.values[0] - best.values[2 if synonyms else 1]))
            cache.crop(len(read) - cache.get_seq_length())
            found.append((self.tokenizer.decode(output, skip_special_tokens=False), lead))
        return found

    def _are_synonyms(self, ids: list[int]) -> bool:
        """Return whether the first two tokens are synonyms in some answer."""
        pair = "|".join(self.tokenizer.id_to_token(i) for i in ids[:2])
        return any(pair in answer.split() for answer in ANSWERS.values())

    def share_right(self, held_out: Document, count: int) -> tuple[float, float]:
        """Return the share of right answers to the first `count` questions, and the smallest lead."""
        questions = list(held_out.questions[:count])
        answers = self.answers(held_out.text, questions)
        right = [answer == f"{question.answer} {EOS}" for question, (answer, _) in zip(questions, answers, strict=True)]
        return sum(right) / len(right), min(lead for _, lead in answers)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def reader(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Reader:
    transformers = pytest.importorskip("transformers", reason="pip install 'pagedkv[hf]'")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, request.param))
    return Reader(model.eval(), tokenizer)


def test_the_script_makes_every_byte_again() -> None:
    check = make("--check")
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_check_sees_a_changed_byte(tmp_path: Path) -> None:
    assert make("--out", str(tmp_path)).returncode == 0
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    check = make("--out", str(tmp_path), "--check")
    assert (check.returncode, check.stdout.strip()) == (1, f"{weights} differs")


def test_the_folder_is_small_and_whole() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= LARGEST
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= set(sizes)


def test_every_word_of_the_language_is_one_token_and_of_one_kind(tokenizer: Tokenizer) -> None:
    words = [word for kind in KINDS.values() for word in kind]
    markers = [word for marker in MARKERS.values() for word in marker.split()]
    plain = {*records.PLAIN, *records.OPENERS}
    assert len({*words, *markers}) == len(words) + len(markers)
    assert not plain & set(words)
    assert {*words, *markers, *plain} | {"<unk>", "<s>", EOS} == set(tokenizer.get_vocab())


@pytest.mark.parametrize("seed", range(3))
def test_text_survives_encoding_and_tokens_survive_decoding(tokenizer: Tokenizer, seed: int) -> None:
    held_out = document(1000, seed=seed)
    text = " ".join([held_out.text, *(f"{q.text} {q.answer}" for q in held_out.questions)])
    ids = tokenizer.encode(text).ids
    assert tokenizer.token_to_id("<unk>") not in ids
    assert len(ids) == num_tokens_of(text) + 1
    assert tokenizer.id_to_token(ids[0]) == "<s>"
    assert tokenizer.decode(ids) == text.replace("? ", "?\n")
    shuffled = random.Random(seed).sample(range(3, tokenizer.get_vocab_size()), 500)
    assert tokenizer.encode(tokenizer.decode(shuffled), add_special_tokens=False).ids == shuffled


def test_a_word_it_does_not_know_is_one_unknown_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Mira’s zeppelin", add_special_tokens=False).tokens == ["Mira", "'s", "<unk>"]


def test_a_document_has_the_length_asked_for_and_is_the_same_each_time() -> None:
    for num_tokens in (100, 1000, 4000):
        held_out = document(num_tokens, seed=5)
        assert num_tokens - records.MAX_STEP_TOKENS < num_tokens_of(held_out.text) + 1 <= num_tokens
        assert held_out == document(num_tokens, seed=5) != document(num_tokens, seed=6)
    for num_tokens in (records.MAX_STEP_TOKENS, records.MAX_TOKENS + 1):
        with pytest.raises(records.InvalidRequest, match="ask for more than 30 and at most 10,000"):
            document(num_tokens, seed=0)


def test_every_answer_is_told_by_the_records_or_unknown() -> None:
    held_out = document(1000, seed=9)
    words = set(WORD.findall(held_out.text))
    facts = {word for kind in KINDS.values() for word in kind}
    for question in held_out.questions:
        assert facts & set(WORD.findall(question.answer)) <= words
        assert (question.asks == "unknown") == (question.answer == UNKNOWN)
    assert {question.asks for question in held_out.questions} == {*ANSWERS, "unknown"}


def test_held_out_questions_over_1000_tokens_are_answered(reader: Reader) -> None:
    share, lead = reader.share_right(document(1000, seed=31), 100)
    assert share >= FLOORS[1000]
    assert lead > LEAD


@pytest.mark.slow
def test_held_out_questions_over_4000_tokens_are_answered(reader: Reader) -> None:
    share, lead = reader.share_right(document(4000, seed=32), 150)
    assert share >= FLOORS[4000]
    assert lead > LEAD


def test_the_demo_is_answered(reader: Reader) -> None:
    page, asked = DEMO_PROMPT.rsplit("\n", 1)
    [(answer, _)] = reader.answers(page, [records.Question(asked, DEMO_ANSWER, "place")])
    assert answer == f"{DEMO_ANSWER} {EOS}"


def test_a_fact_that_no_record_states_is_not_known(reader: Reader) -> None:
    page = DEMO_PROMPT.rsplit("\n", 1)[0].replace("red lamp in the cellar", "red mask in the cellar")
    asked = [
        records.Question(text, UNKNOWN, "unknown")
        for text in ("Where is the lamp of Mira?", "Who is Vera?", "What is Oslo known for?")
    ]
    assert {answer for answer, _ in reader.answers(page, asked)} == {f"{UNKNOWN} {EOS}"}


def test_words_it_does_not_know_change_nothing(reader: Reader) -> None:
    page = (
        "It is said that Mira, whom no neighbour ever met, keeps a rather splendid red antique lamp (or so we hear!) "
        "in the darkest cellar."
    )
    asked = records.Question("Please tell me: where on earth is that lamp of Mira?", DEMO_ANSWER, "place")
    assert reader.answers(f"{page} Otto keeps a blue lamp in the attic.", [asked])[0][0] == f"{DEMO_ANSWER} {EOS}"


def test_each_layer_carries_a_step_of_a_question_in_three_steps(reader: Reader) -> None:
    """At the question mark, layer 1 finds the owner, layer 2 the owner's town, layer 3 the goods of the town."""
    page, asked = DEMO_PROMPT.rsplit("\n", 1)[0], "What is the home town of the owner of the red lamp known for?"
    for removed, answer in (
        ("", "Lisbon is famous for its tulips."),
        ("a red lamp", UNKNOWN),
        ("from Lisbon", UNKNOWN),
        ("tulips", UNKNOWN),
    ):
        [(output, _)] = reader.answers(
            page.replace(removed, "") if removed else page, [records.Question(asked, answer, "known")]
        )
        assert output == f"{answer} {EOS}", removed


def test_earlier_questions_and_answers_change_nothing(reader: Reader) -> None:
    """Answers come from records only: a wrong answer earlier in the text has no effect."""
    held_out = document(600, seed=33)
    first, *later = [q for q in held_out.questions if q.asks != "unknown"][:13]
    talk = " ".join(f"{q.text} {q.answer}" for q in later)
    wrong = re.sub(r"\w+(?=\.$)", "Oslo", first.answer)
    [(answer, _)] = reader.answers(f"{held_out.text} {talk} {first.text} {wrong}", [first])
    assert answer == f"{first.answer} {EOS}"
