"""Codes: the vocabulary in id order, and a code of 64 plus and minus ones for each token. No weights.

The codes are the words of the small Kasami set with the affine functions, an error-correcting code:

    word(c, a, b)[x] = (-1)^(c + <a, x> + Tr(b x^9))        x in GF(64), c a bit, a six bits, b in GF(8)

Two words agree in all 64 places, in none, or in 28 to 36, so a different word scores at most an eighth of the right
one. A word with b = 0 and a's top bit clear repeats a 32-element word; these halves are orthogonal or opposite to one
another. Things have these codes. With the top bit set, the second half has the sign turned. Colours have these codes.
So half a code is enough to match a thing or a colour.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tests.records import KINDS, MARKERS, OPENERS, PLAIN

WIDTH: Final = 64
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
MARKER_WORDS: Final = [*OPENERS, *(word for words in MARKERS.values() for word in words.split() if word not in OPENERS)]
"""The words that make a sentence a question."""
VOCABULARY: Final = [UNK, BOS, EOS, *PLAIN, *MARKER_WORDS, *(word for words in KINDS.values() for word in words)]
IDS: Final = {word: i for i, word in enumerate(VOCABULARY)}


def _times(a: int, b: int) -> int:
    """Return a·b in GF(64), modulo x^6 + x + 1."""
    product = 0
    for bit in range(6):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(10, 5, -1):
        if product >> bit & 1:
            product ^= 0b1000011 << (bit - 6)
    return product


def _power(a: int, exponent: int) -> int:
    """Return a^exponent in GF(64)."""
    product = 1
    for _ in range(exponent):
        product = _times(product, a)
    return product


def _trace(y: int) -> int:
    """Return the trace GF(8) → GF(2) of an element of the subfield."""
    return y ^ _times(y, y) ^ _power(y, 4)


def _words(b: int, first: int, last: int) -> list[list[int]]:
    """Return the words of one b with first <= a < last, then their opposites."""
    quadratic = [_trace(_times(b, _power(x, 9))) for x in range(WIDTH)]
    return [
        [(-1) ** (c + (a & x).bit_count() + quadratic[x]) for x in range(WIDTH)]
        for c in (0, 1)
        for a in range(first, last)
    ]


def codes() -> NDArray[np.float64]:
    """Return the code of each token of the vocabulary.

    Shapes: returns float64 [vocabulary, 64] of ±1; zeros for <unk> and <s>
    """
    doubled, turned = _words(0, 0, 32), _words(0, 32, 64)
    others = [word for power in range(7) for word in _words(_power(2, 9 * power), 0, 64)]
    table = np.zeros((len(VOCABULARY), WIDTH))
    kinds = {**KINDS, "other": [EOS, *PLAIN, *MARKER_WORDS]}
    for kind, words in kinds.items():
        source = {"object": doubled, "colour": turned}.get(kind, others)
        for word in words:
            table[IDS[word]] = source.pop(0)
    return table
