"""The circuit: all weights of the bundled checkpoint, written down. Numpy; no training, no random numbers.

The residual stream is cut into slots (`SLOTS`). Its last element is a large constant, so RMSNorm divides by nearly the
same number at each token. The norm's weight undoes this, and all matrices below are written as if there were no norm.

    layer 0   the last of its kind     NAME, OBJECT, COLOUR ← the latest such word; MODE ← the question type of the
                                       latest marker, or "record"
              MLP: a table             (MODE, word) → the next fixed word, or the kind of word that is WANTed;
                                       in records, it marks the facts (FACT, TOLD)
    layer 1   who and where            NAME ← the owner of COLOUR OBJECT, if "owner" stands for a name;
                                       TOWN ← the latest town
              MLP                      unmarks a town that is the subject of its sentence: it is no person's fact
    layer 2   facts about a person     OUT ← the place, thing, colour, town, job or year of NAME, OBJECT;
                                       TOWN ← the person's town, if "town" stands for it
    layer 3   facts about a town       OUT ← goods or number of TOWN

A draft model for speculation has layers 0 and 2 alone (DRAFT): it misses what needs an owner or a town looked up.

Rotary pairs 0..12 turn fast and measure distances of a few words (`REACH`). Pairs 13..63 hardly turn in thousands of
tokens and compare codes. If no token meets a comparison in full, the head attends to the first token, <s>, whose value
is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bundled.codes import BOS, EOS, IDS, MARKER_WORDS, VOCABULARY, WIDTH, codes
from tests.records import ANSWERS, KINDS, MARKERS, OPENERS, PRONOUNS

Matrix = NDArray[np.float64]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, NEURONS = 4, 4, 2, 128, 512, 128
DRAFT: Final = (0, 2)
"""The layers of the draft model."""
ROPE_THETA: Final = 1e20
CONSTANT: Final = 1024.0
"""Large beside the rest of a residual (about 20), so the rest hardly changes the norm. A power of two costs no bits."""

REACH: Final = (0.002, 0.006, 0.020, 0.072, 0.153, 0.139, 0.137, 0.135, 0.085, 0.078, 0.062, 0.078, 0.032)
"""Weights of the fast pairs in r(d) = sum_i REACH[i] cos(d theta^(-i/64)), a score of the distance d.

r falls at each step from 0 to 36. From any d <= 30 to d + 6, and to any larger distance up to 16,384, it falls by at
least 0.055. Found by linear programming: the largest such fall for weights with the sum 1.
"""

NEAR: Final = 640.0
"""Weight of r(d) in a score: a token that is 6 words nearer wins by e^35."""
IS_KIND: Final = 1200.0
"""Score of a token of the kind looked for: more than NEAR times the range of r."""
TIER: Final = 10.0
"""Score of a marker's tier. An opener beats the full stop just before it, and a later marker beats the opener. A full
stop that is 6 words nearer beats both."""
AGREE: Final = 64.0
"""Weight of each of the three slots that must agree. Two different codes agree by an eighth at most."""
ENOUGH: Final = 3 * AGREE - 28.0
"""Score of <s>: more than two agreeing slots of three can score (2 AGREE + AGREE / 8), less than three."""
FIRM: Final = 32.0
"""Slope of a neuron's gate. Its inputs are whole numbers minus a half, so silu gives 0.5 FIRM or nothing."""
LOGIT: Final = 0.4
"""Weight of the codes in the output head."""
LIKELY: Final = 0.94
"""Weight of the second of two synonyms, relative to the first."""
AT_A_LOSS: Final = 0.35
"""Weight of "I", which begins "I do not know.", if no other word is in the output."""

WANTS: Final = ("place", "object", "town", "job", "year", "goods", "number")
"""The kinds of facts that questions ask for."""
ASKS: Final = ("place", "object", "town", "job", "year", "job", "goods", "number")
"""For each mode, in the order of `ANSWERS`: the kind of the fact that must exist, or the answer does not begin."""


def _slots(**widths: int) -> dict[str, slice]:
    ends = np.cumsum(list(widths.values()))
    return {name: slice(int(end) - width, int(end)) for (name, width), end in zip(widths.items(), ends, strict=True)}


FLAGS: Final = [
    BOS,
    *KINDS,
    *sorted(
        {w for a in ANSWERS.values() for s in a.split() if not s.isupper() for w in s.split("|")}
        | {"?", *"I do not know".split()}
    ),
]
SLOTS: Final = _slots(
    OWN=WIDTH,  # the token's own code
    NAME=WIDTH,
    TOWN=WIDTH,
    OUT=WIDTH,  # the code of the next word
    OBJECT=32,
    COLOUR=32,
    FACT=32,  # OBJECT, on words of records that are things or places
    FLAG=len(FLAGS),  # the token is <s>, of a kind, or one of the words that answers are made of
    SELF=7,  # flags of the token itself: IS_NAME .. IS_PERSON below
    BRINGS=len(ANSWERS) + 1,  # the mode that a marker brings; the last is "record"
    MODE=len(ANSWERS) + 1,
    STANDS=2,  # the NAME is only "owner", the TOWN is only "town": layers 1 and 2 look them up
    NO_PERSON=1,  # no person was named since the last full stop: a town here is the subject of its sentence
    TOLD=len(WANTS),  # the token is a fact of this kind, in a record
    WANT=len(WANTS),  # the next word is of this kind
    FIRST=len(WANTS),  # the next word is the name, if there is a fact of this kind
    TINT=1,  # the next word is the colour
)
CONST: Final = HIDDEN - 1
IS_NAME, IS_OWNER, IS_TOWN, IS_HOME, IS_MARKER, IS_TIER, IS_PERSON = (SLOTS["SELF"].start + i for i in range(7))
"""Flags: name or "owner"; "owner"; town or "town"; "town"; marker; tier of the marker; name or pronoun."""
RECORD: Final = len(ANSWERS)

FAST: Final = slice(0, len(REACH))
CODE: Final = np.r_[13:45, 77:109]
HALF: Final = np.r_[45:61, 109:125]
CLASS: Final = (61, 125, 62, 126, 63)
SINK: Final = 127
"""Dimensions of a head. Pairs are (i, i + 64), fast to slow. CODE compares 64 elements, HALF 32, CLASS one each."""


def at(slot: str, offset: int = 0) -> int:
    """Return the index into the residual of an element of a slot."""
    return int(SLOTS[slot].start) + offset


def flag(name: str) -> int:
    """Return the index into the residual of the flag of a kind, or of a word."""
    return at("FLAG", FLAGS.index(name))


@dataclass
class Layer:
    """The matrices of one layer, as they act on a residual without norm. The attention matrices are split by head."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    neurons: int = 0

    @classmethod
    def empty(cls) -> Layer:
        """Return a layer of zeros."""
        q, k = np.zeros((HEADS, HEAD_DIM, HIDDEN)), np.zeros((KV_HEADS, HEAD_DIM, HIDDEN))
        wide, tall = np.zeros((NEURONS, HIDDEN)), np.zeros((HIDDEN, NEURONS))
        return cls(q, k, k.copy(), np.zeros((HIDDEN, HEADS, HEAD_DIM)), wide, wide.copy(), tall)

    def carry(self, kv_head: int, start: int, source: slice) -> None:
        """Copy the slot `source` into the values of a kv head, from element `start` on."""
        width = source.stop - source.start
        self.v[kv_head, start : start + width, source] = np.eye(width)

    def bring(self, head: int, start: int, target: slice) -> None:
        """Add the output of a head, from element `start` on, to the slot `target`."""
        width = target.stop - target.start
        self.o[target, head, start : start + width] = np.eye(width)

    def neuron(
        self, when: tuple[int, ...], target: int | slice, value: float | Matrix = 1.0, *, of: int = CONST
    ) -> None:
        """Add a neuron: where all flags in `when` are set, `target` grows by `value` times element `of`."""
        row, self.neurons = self.neurons, self.neurons + 1
        self.gate[row, list(when)] = FIRM
        self.gate[row, CONST] = -FIRM * (len(when) - 0.5) / CONSTANT
        self.up[row, of] = 1 / CONSTANT if of == CONST else 1.0
        self.down[target, row] = value / (0.5 * FIRM)


def look_back(layer: Layer, head: int, kinds: dict[int, float], first: int) -> None:
    """Let a head attend to the latest token that has one of the flags `kinds`, or to <s> if there is none.

    kinds: flag → the score that it adds. first: the dimension of the key that holds the first flag; the others follow
    it. SINK is the dimension of <s>.
    """
    kv_head = head // (HEADS // KV_HEADS)
    layer.k[kv_head, FAST, CONST] = 1 / CONSTANT
    layer.q[head, FAST, CONST] = NEAR * np.array(REACH) / CONSTANT
    for i, (kind, score) in enumerate({**kinds, flag(BOS): IS_KIND - 60.0}.items()):
        dim = SINK if kind == flag(BOS) else first + i
        layer.k[kv_head, dim, kind] = 1.0
        layer.q[head, dim, CONST] = score / CONSTANT


def compare(layer: Layer, head: int, dims: NDArray[np.int64], query: str, key: str) -> None:
    """Let a head score how far two slots agree: AGREE if they are equal. dims: their dimensions in query and key."""
    query_slot, key_slot = SLOTS[query], SLOTS[key]
    layer.k[head // (HEADS // KV_HEADS), dims, key_slot] = np.eye(len(dims))
    layer.q[head, dims, query_slot] = np.eye(len(dims)) * AGREE / len(dims)


def rest_on_first(layer: Layer, head: int) -> None:
    """Let a head attend to <s> unless a token scores more than ENOUGH."""
    layer.k[head // (HEADS // KV_HEADS), SINK, flag(BOS)] = 1.0
    layer.q[head, SINK, CONST] = ENOUGH / CONSTANT


def the_last_of_its_kind() -> Layer:
    """Return layer 0."""
    layer = Layer.empty()
    look_back(layer, 0, {IS_NAME: IS_KIND}, 61)
    look_back(layer, 1, {flag("object"): IS_KIND}, 62)
    look_back(layer, 2, {flag("colour"): IS_KIND}, 61)
    look_back(layer, 3, {IS_MARKER: IS_KIND, IS_TIER: TIER}, 62)
    layer.carry(0, 0, SLOTS["OWN"])
    layer.carry(0, 64, slice(IS_OWNER, IS_OWNER + 1))
    layer.bring(0, 0, SLOTS["NAME"])
    layer.bring(0, 64, slice(at("STANDS"), at("STANDS") + 1))
    layer.bring(1, 0, SLOTS["OBJECT"])
    layer.carry(1, 0, slice(at("OWN"), at("OWN") + 32))
    layer.carry(1, 32, SLOTS["BRINGS"])
    layer.bring(2, 0, SLOTS["COLOUR"])
    layer.bring(3, 32, SLOTS["MODE"])
    _the_table(layer)
    return layer


def _the_table(layer: Layer) -> None:
    """Write the MLP of layer 0: the next word of an answer, and the marks of facts in records."""
    code = codes()
    for mode, (answer, kind) in enumerate(zip(ANSWERS.values(), ASKS, strict=True)):
        layer.neuron((at("MODE", mode), flag("?")), at("FIRST", WANTS.index(kind)))
        steps = answer.split()
        for step, then in pairwise(steps):
            for word in step.split("|"):
                when = (at("MODE", mode), flag(word.lower() if step.isupper() else word))
                if then == "COLOUR":
                    layer.neuron(when, at("TINT"))
                elif then.isupper():
                    layer.neuron(when, at("WANT", WANTS.index(then.lower())))
                else:
                    likely, *others = then.split("|")
                    value = code[IDS[likely]] + LIKELY * sum(code[IDS[other]] for other in others)
                    layer.neuron(when, SLOTS["OUT"], value)
    for word, then in ((".", EOS), *zip("I do not know".split(), "do not know .".split(), strict=True)):
        layer.neuron((flag(word),), SLOTS["OUT"], code[IDS[then]])
    for i, kind in enumerate(WANTS):
        layer.neuron((at("MODE", RECORD), flag(kind)), at("TOLD", i))
    for i in range(32):  # a thing or a place: at most one of the two flags is set, so their sum is an "or"
        layer.neuron((flag("object"),), at("FACT", i), of=at("OBJECT", i))
        layer.gate[layer.neurons - 1, flag("place")] = FIRM


def who_and_where() -> Layer:
    """Return layer 1. Query head 1 is idle."""
    layer = Layer.empty()
    compare(layer, 0, CODE[:32], "COLOUR", "COLOUR")
    compare(layer, 0, HALF, "OBJECT", "FACT")
    layer.k[0, CLASS[0], at("TOLD", WANTS.index("object"))] = 1.0
    layer.q[0, CLASS[0], at("STANDS")] = AGREE
    rest_on_first(layer, 0)
    layer.carry(0, 0, SLOTS["NAME"])
    layer.bring(0, 0, SLOTS["NAME"])
    look_back(layer, 2, {IS_TOWN: IS_KIND}, 61)
    layer.carry(1, 0, SLOTS["OWN"])
    layer.carry(1, 64, slice(IS_HOME, IS_HOME + 1))
    layer.bring(2, 0, SLOTS["TOWN"])
    layer.bring(2, 64, slice(at("STANDS", 1), at("STANDS", 1) + 1))
    look_back(layer, 3, {IS_PERSON: IS_KIND + TIER, flag("."): IS_KIND}, 62)
    layer.carry(1, 65, slice(at("BRINGS", RECORD), at("BRINGS", RECORD) + 1))
    layer.bring(3, 65, SLOTS["NO_PERSON"])
    home = at("TOLD", WANTS.index("town"))
    layer.neuron((home, at("NO_PERSON")), home, -1.0)  # "Lisbon is famous ..." is no fact about the last person
    return layer


def facts_about_a_person() -> Layer:
    """Return layer 2. A fact that is not about a thing has no OBJECT to compare, so its kind counts twice."""
    layer = Layer.empty()
    weights = dict(zip(WANTS[:5], (AGREE, AGREE, 2 * AGREE, 2 * AGREE, 2 * AGREE), strict=True))
    for head in range(HEADS):
        compare(layer, head, CODE, "NAME", "NAME")
        if head != 1:
            compare(layer, head, HALF, "OBJECT", "FACT")
        rest_on_first(layer, head)
    for kv_head in range(KV_HEADS):
        layer.k[kv_head, HALF, SLOTS["FACT"]] = np.eye(32)
        for i in range(5):
            layer.k[kv_head, CLASS[i], at("TOLD", i)] = 1.0
    for i, weight in enumerate(weights.values()):
        layer.q[0, CLASS[i], at("WANT", i)] = weight
        layer.q[2, CLASS[i], at("FIRST", i)] = weight
    layer.q[1, CLASS[2], at("STANDS", 1)] = 2 * AGREE
    layer.q[3, CLASS[1], at("TINT")] = AGREE
    layer.carry(0, 0, SLOTS["OWN"])
    layer.carry(1, 0, SLOTS["NAME"])
    layer.carry(1, 64, SLOTS["COLOUR"])
    layer.bring(0, 0, SLOTS["OUT"])
    layer.bring(1, 0, SLOTS["TOWN"])
    layer.bring(2, 0, SLOTS["OUT"])
    layer.bring(3, 64, slice(at("OUT"), at("OUT") + 32))
    # The second half of a colour's code is the first half with the sign turned.
    layer.o[at("OUT") + 32 : at("OUT") + 64, 3, 64:96] = -np.eye(32)
    return layer


def facts_about_a_town() -> Layer:
    """Return layer 3. Query heads 1 and 3 are idle."""
    layer = Layer.empty()
    for head, want in ((0, "WANT"), (2, "FIRST")):
        compare(layer, head, CODE, "TOWN", "TOWN")
        rest_on_first(layer, head)
        for i in (5, 6):
            layer.k[head // 2, CLASS[i - 5], at("TOLD", i)] = 1.0
            layer.q[head, CLASS[i - 5], at(want, i)] = 2 * AGREE
        layer.bring(head, 0, SLOTS["OUT"])
    layer.carry(0, 0, SLOTS["OWN"])
    layer.carry(1, 0, SLOTS["TOWN"])
    return layer


def embedding() -> Matrix:
    """Return the residual with which each token begins: its code, its flags and the constant.

    Shapes: returns float64 [vocabulary, HIDDEN]
    """
    table = np.zeros((len(VOCABULARY), HIDDEN))
    table[:, SLOTS["OWN"]] = codes()
    table[:, CONST] = CONSTANT
    for i, name in enumerate(FLAGS):
        table[[IDS[word] for word in KINDS.get(name, [name])], at("FLAG", i)] = 1.0
    for i, words in enumerate(MARKERS.values()):
        table[[IDS[word] for word in words.split()], at("BRINGS", i)] = 1.0
    table[[IDS[word] for word in (".", EOS, *MARKER_WORDS)], IS_MARKER] = 1.0
    table[[IDS[word] for word in MARKER_WORDS], IS_TIER] = [1.0 if word in OPENERS else 2.0 for word in MARKER_WORDS]
    table[[IDS[word] for word in (".", EOS, BOS)], at("BRINGS", RECORD)] = 1.0
    table[[IDS[word] for word in KINDS["name"]], IS_NAME] = 1.0
    table[[IDS[word] for word in (*KINDS["name"], *PRONOUNS)], IS_PERSON] = 1.0
    table[[IDS[word] for word in KINDS["town"]], IS_TOWN] = 1.0
    for word, itself, stand_in in (
        ("owner", IS_NAME, IS_OWNER),
        ("Whose", IS_NAME, IS_OWNER),
        ("whose", IS_NAME, IS_OWNER),
        ("town", IS_TOWN, IS_HOME),
    ):
        table[IDS[word], SLOTS["OWN"]] = 0.0  # no code of its own: layer 1 or 2 adds the code of the name or town
        table[IDS[word], [itself, stand_in]] = 1.0
    return table


def tensors(layers: tuple[int, ...] = tuple(range(LAYERS))) -> dict[str, Matrix]:
    """Return all tensors of the checkpoint with these layers of the circuit by their Hugging Face names."""
    norm = np.full(HIDDEN, CONSTANT / HIDDEN**0.5)
    head = np.zeros((len(VOCABULARY), HIDDEN))
    head[:, SLOTS["OUT"]] = LOGIT * codes()
    head[IDS["I"], CONST] = AT_A_LOSS * LOGIT * WIDTH / CONSTANT
    found = {"model.embed_tokens.weight": embedding(), "model.norm.weight": norm, "lm_head.weight": head}
    circuit = (the_last_of_its_kind(), who_and_where(), facts_about_a_person(), facts_about_a_town())
    for i, layer in enumerate(circuit[number] for number in layers):
        parts = {
            "self_attn.q_proj": layer.q.reshape(-1, HIDDEN) * HEAD_DIM**0.5,  # attention divides by this root
            "self_attn.k_proj": layer.k.reshape(-1, HIDDEN),
            "self_attn.v_proj": layer.v.reshape(-1, HIDDEN),
            "self_attn.o_proj": layer.o.reshape(HIDDEN, -1),
            "mlp.gate_proj": layer.gate,
            "mlp.up_proj": layer.up,
            "mlp.down_proj": layer.down,
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
        }
        found |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    return found
