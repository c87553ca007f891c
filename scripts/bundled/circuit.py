"""The circuit: every weight of the bundled checkpoint, written down. Numpy; no training, no random numbers.

The residual stream is cut into slots (`SLOTS`). A large constant is its last element, so RMSNorm divides by nearly the same number at
every token; the norm's weight undoes it, and every matrix below is written as if there were no norm.

    layer 0   the last of its kind       NAME, OBJECT, COLOUR ← the latest such word; MODE ← what the latest marker asks, or "record"
              MLP: a table               (MODE, word) → the next fixed word, or what is WANTed; marks what a record tells (FACT, TOLD)
    layer 1   who and where              NAME ← the owner of COLOUR OBJECT, if "owner" stands for a name; TOWN ← the latest town
              MLP                        a town that a sentence is about is not told of a person
    layer 2   what is told of a person   OUT ← the place, thing, colour, town, job, year of NAME, OBJECT; TOWN ← theirs, for a mere "town"
    layer 3   what is told of a town     OUT ← goods, number of TOWN

Rotary pairs 0..12 turn fast and serve to look back a few words (`REACH`); pairs 13..63 hardly turn in thousands of tokens and serve to
compare. A comparison that nothing meets in full goes to the first token, <s>, whose value is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bundled.codes import BOS, EOS, IDS, MARKER_WORDS, VOCABULARY, WIDTH, codes
from pagedkv.model.records import ANSWERS, KINDS, MARKERS, OPENERS, PRONOUNS

Matrix = NDArray[np.float64]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, NEURONS = 4, 4, 2, 128, 512, 128
ROPE_THETA: Final = 1e20
CONSTANT: Final = 1024.0
"""Large beside the rest of a residual (about 20), so the rest hardly changes the norm; a power of two, so it costs no bits."""

REACH: Final = (0.002, 0.006, 0.020, 0.072, 0.153, 0.139, 0.137, 0.135, 0.085, 0.078, 0.062, 0.078, 0.032)
"""r(d) = sum_i REACH[i] cos(d theta^(-i/64)), a sum of what the fast pairs make of a distance d. It falls at every step from 0 to 36,
by at least 0.055 from any d <= 30 to d + 6 and to all that is farther, up to 16,384. Found by linear programming: that lead, made largest
for a sum of 1."""

NEAR: Final = 640.0
"""Weight of r(d) in a score: any 6 words nearer win by e^35."""
IS_KIND: Final = 1200.0
"""Being of the kind looked for; more than NEAR times the range of r."""
TIER: Final = 10.0
"""A question's opener beats the full stop just before it, and a later marker beats the opener; a full stop 6 words nearer beats both."""
AGREE: Final = 64.0
"""Weight of each of the three things that must agree. Two codes that are not the same agree by an eighth at most."""
ENOUGH: Final = 3 * AGREE - 28.0
"""Score of <s>: above the best that two of three give (2 AGREE + AGREE / 8), below all three."""
FIRM: Final = 32.0
"""Slope of a neuron's gate: it sees whole numbers minus a half, so silu gives 0.5 FIRM or nothing."""
LOGIT: Final = 0.4
LIKELY: Final = 0.94
"""Weight of the second of two words that mean the same."""
AT_A_LOSS: Final = 0.35
"""Weight of "I" when nothing else is said, which begins "I do not know."."""

WANTS: Final = ("place", "object", "town", "job", "year", "goods", "number")
"""Kinds that records are asked for."""
ASKS: Final = ("place", "object", "town", "job", "year", "job", "goods", "number")
"""Per mode, in the order of `ANSWERS`: the kind of the fact that must be there before the answer begins with the name it was told of."""


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
    OUT=WIDTH,  # what will be said next
    OBJECT=32,
    COLOUR=32,
    FACT=32,  # OBJECT, on words of records that tell of a thing
    FLAG=len(FLAGS),  # the token is <s>, of a kind, or one of the words that answers are made of
    SELF=7,  # name or owner, owner, town or its stand-in, the stand-in, marker, tier of the marker, name or pronoun
    BRINGS=len(ANSWERS) + 1,  # the mode that a marker brings; the last is "record"
    MODE=len(ANSWERS) + 1,
    STANDS=2,  # the NAME is a mere "owner", the TOWN a mere "town"
    NOBODY=1,  # no person was named since the last full stop: a town here is what the sentence is about
    TOLD=len(WANTS),  # the token tells a fact of this kind, in a record
    WANT=len(WANTS),  # a word of this kind is to be said next
    FIRST=len(WANTS),  # the name is to be said next, if there is a fact of this kind
    TINT=1,  # the colour is to be said next
)
CONST: Final = HIDDEN - 1
IS_NAME, IS_OWNER, IS_TOWN, IS_HOME, IS_MARKER, IS_TIER, IS_PERSON = (SLOTS["SELF"].start + i for i in range(7))
RECORD: Final = len(ANSWERS)

FAST: Final = slice(0, len(REACH))
CODE: Final = np.r_[13:45, 77:109]
HALF: Final = np.r_[45:61, 109:125]
CLASS: Final = (61, 125, 62, 126, 63)
SINK: Final = 127
"""Dimensions of a head. Pairs are (i, i + 64): CODE compares 64 elements, HALF 32, CLASS one each, from the quick to the slow."""


def at(slot: str, offset: int = 0) -> int:
    """Index into the residual of an element of a slot."""
    return int(SLOTS[slot].start) + offset


def flag(name: str) -> int:
    """Index into the residual of the flag of a kind, or of a word."""
    return at("FLAG", FLAGS.index(name))


@dataclass
class Layer:
    """The matrices of one layer, as they act on a residual without norm; those of attention by head."""

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
        """A layer that does nothing yet."""
        q, k = np.zeros((HEADS, HEAD_DIM, HIDDEN)), np.zeros((KV_HEADS, HEAD_DIM, HIDDEN))
        wide, tall = np.zeros((NEURONS, HIDDEN)), np.zeros((HIDDEN, NEURONS))
        return cls(q, k, k.copy(), np.zeros((HIDDEN, HEADS, HEAD_DIM)), wide, wide.copy(), tall)

    def carry(self, kv_head: int, start: int, source: slice) -> None:
        """Let the values of a kv head hold `source`, from element `start` on."""
        width = source.stop - source.start
        self.v[kv_head, start : start + width, source] = np.eye(width)

    def bring(self, head: int, start: int, target: slice) -> None:
        """Let a head write its elements from `start` on into `target`."""
        width = target.stop - target.start
        self.o[target, head, start : start + width] = np.eye(width)

    def neuron(
        self, when: tuple[int, ...], target: int | slice, says: float | Matrix = 1.0, *, of: int = CONST
    ) -> None:
        """Add `says` times element `of` to `target` where all the flags in `when` are set."""
        row, self.neurons = self.neurons, self.neurons + 1
        self.gate[row, list(when)] = FIRM
        self.gate[row, CONST] = -FIRM * (len(when) - 0.5) / CONSTANT
        self.up[row, of] = 1 / CONSTANT if of == CONST else 1.0
        self.down[target, row] = says / (0.5 * FIRM)


def look_back(layer: Layer, head: int, kinds: dict[int, float], first: int) -> None:
    """Let a head attend to the latest token that has one of the residual's flags `kinds`; to <s> if there is none.

    kinds: flag → the score it adds. first: the dimension of the key in which the flags stand, one after the other; SINK is that of <s>.
    """
    kv_head = head // (HEADS // KV_HEADS)
    layer.k[kv_head, FAST, CONST] = 1 / CONSTANT
    layer.q[head, FAST, CONST] = NEAR * np.array(REACH) / CONSTANT
    for i, (kind, score) in enumerate({**kinds, flag(BOS): IS_KIND - 60.0}.items()):
        dim = SINK if kind == flag(BOS) else first + i
        layer.k[kv_head, dim, kind] = 1.0
        layer.q[head, dim, CONST] = score / CONSTANT


def compare(layer: Layer, head: int, dims: NDArray[np.int64], query: str, key: str) -> None:
    """Let a head score by how far two slots agree, AGREE if wholly. `dims` says where in query and key."""
    query_slot, key_slot = SLOTS[query], SLOTS[key]
    layer.k[head // (HEADS // KV_HEADS), dims, key_slot] = np.eye(len(dims))
    layer.q[head, dims, query_slot] = np.eye(len(dims)) * AGREE / len(dims)


def rest_on_first(layer: Layer, head: int) -> None:
    """Let a head attend to <s> unless something scores more than ENOUGH."""
    layer.k[head // (HEADS // KV_HEADS), SINK, flag(BOS)] = 1.0
    layer.q[head, SINK, CONST] = ENOUGH / CONSTANT


def the_last_of_its_kind() -> Layer:
    """Layer 0."""
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
    """The MLP of layer 0: what follows, and what a record tells."""
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
                    says = code[IDS[likely]] + LIKELY * sum(code[IDS[other]] for other in others)
                    layer.neuron(when, SLOTS["OUT"], says)
    for word, then in ((".", EOS), *zip("I do not know".split(), "do not know .".split(), strict=True)):
        layer.neuron((flag(word),), SLOTS["OUT"], code[IDS[then]])
    for i, kind in enumerate(WANTS):
        layer.neuron((at("MODE", RECORD), flag(kind)), at("TOLD", i))
    for i in range(32):  # a thing or a place: at most one flag is set, so this is an or
        layer.neuron((flag("object"),), at("FACT", i), of=at("OBJECT", i))
        layer.gate[layer.neurons - 1, flag("place")] = FIRM


def who_and_where() -> Layer:
    """Layer 1. Query head 1 is idle."""
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
    layer.bring(3, 65, SLOTS["NOBODY"])
    home = at("TOLD", WANTS.index("town"))
    layer.neuron((home, at("NOBODY")), home, -1.0)  # "Lisbon is famous ..." is not told of the person before
    return layer


def what_is_told_of_a_person() -> Layer:
    """Layer 2. Facts that are not of a thing have no OBJECT to agree in, so their kind counts twice."""
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
    layer.o[at("OUT") + 32 : at("OUT") + 64, 3, 64:96] = -np.eye(
        32
    )  # a colour's second half is its first with the sign turned
    return layer


def what_is_told_of_a_town() -> Layer:
    """Layer 3. Query heads 1 and 3 are idle."""
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
    """What the circuit knows of each token when it comes in.

    Shapes: float64 [vocabulary, HIDDEN]
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
        table[IDS[word], SLOTS["OWN"]] = 0.0  # nobody yet; who it is will be added
        table[IDS[word], [itself, stand_in]] = 1.0
    return table


def tensors() -> dict[str, Matrix]:
    """Every tensor of the checkpoint, by its Hugging Face name."""
    norm = np.full(HIDDEN, CONSTANT / HIDDEN**0.5)
    head = np.zeros((len(VOCABULARY), HIDDEN))
    head[:, SLOTS["OUT"]] = LOGIT * codes()
    head[IDS["I"], CONST] = AT_A_LOSS * LOGIT * WIDTH / CONSTANT
    found = {"model.embed_tokens.weight": embedding(), "model.norm.weight": norm, "lm_head.weight": head}
    layers = (the_last_of_its_kind(), who_and_where(), what_is_told_of_a_person(), what_is_told_of_a_town())
    for i, layer in enumerate(layers):
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
