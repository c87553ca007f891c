"""Codes: the vocabulary in id order, and a 64-element word of plus and minus ones for each token. No weights.

The words are those of the small Kasami set with the affine functions, an error-correcting code:

    word(c, a, b)[x] = (-1)^(c + <a, x> + Tr(b x^9))        x in GF(64), c a bit, a six bits, b in GF(8)

Two of them agree in all 64 places, in none, or in 28 to 36: whatever is not the same word looks like noise an eighth as loud, at most.
Words with b = 0 and a's top bit clear are a 32-element word said twice, orthogonal or opposite to one another: the things take these.
With the top bit set, the second half is said with the sign turned: the colours take these. So half a word will do to match either.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedkv.model.records import KINDS, MARKERS, OPENERS, PLAIN

WIDTH: Final = 64
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
MARKER_WORDS: Final = [*OPENERS, *(word for words in MARKERS.values() for word in words.split() if word not in OPENERS)]
"""Whatever makes a sentence a question."""
VOCABULARY: Final = [UNK, BOS, EOS, *PLAIN, *MARKER_WORDS, *(word for words in KINDS.values() for word in words)]
IDS: Final = {word: i for i, word in enumerate(VOCABULARY)}


def _times(a: int, b: int) -> int:
    """a·b in GF(64), with x^6 + x + 1."""
    product = 0
    for bit in range(6):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(10, 5, -1):
        if product >> bit & 1:
            product ^= 0b1000011 << (bit - 6)
    return product


def _power(a: int, exponent: int) -> int:
    product = 1
    for _ in range(exponent):
        product = _times(product, a)
    return product


def _trace(y: int) -> int:
    """GF(8) → GF(2), for an element of the subfield."""
    return y ^ _times(y, y) ^ _power(y, 4)


def _words(b: int, first: int, last: int) -> list[list[int]]:
    """The words of one b, with a from `first` up to before `last`, and then their opposites."""
    quadratic = [_trace(_times(b, _power(x, 9))) for x in range(WIDTH)]
    return [
        [(-1) ** (c + (a & x).bit_count() + quadratic[x]) for x in range(WIDTH)]
        for c in (0, 1)
        for a in range(first, last)
    ]


def codes() -> NDArray[np.float64]:
    """A word for each token of the vocabulary.

    Shapes: float64 [vocabulary, 64] of ±1; zeros for <unk> and <s>, which say nothing
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
