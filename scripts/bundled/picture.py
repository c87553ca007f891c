"""circuit.svg: the lookup of one word of an answer, and a question of three steps in three layers. No library."""

from __future__ import annotations

from typing import Final

WIDTH, HEIGHT = 1200, 690
INK, FAINT, PAPER = "#1f2933", "#8a94a0", "#ffffff"
NAME, THING, ASKED, FOUND = "#2563a8", "#b4540a", "#6b3fa0", "#1b7f4b"
"""A colour for each slot that must agree, and one for the word that is found."""

RECORD: Final = "Mira keeps a red lamp in the cellar .".split()
ANSWER: Final = "Where is the lamp of Mira ? Mira keeps a red lamp in the".split()


def _text(x: float, y: float, words: str, *, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def _box(x: float, y: float, size: tuple[float, float], colour: str, fill: str = PAPER) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{size[0]:g}" height="{size[1]:g}" rx="4" fill="{fill}" stroke="{colour}"/>'
    )


def _strip(words: list[str], x: float, y: float) -> tuple[list[str], list[float]]:
    """Draw words in boxes from x on. Returns: the elements, and the middle of each box."""
    parts, middles = [], []
    for word in words:
        width = 8 * len(word) + 12
        parts += [_box(x, y, (width, 28), FAINT), _text(x + width / 2, y + 19, word, style='text-anchor="middle"')]
        middles.append(x + width / 2)
        x += width + 3
    return parts, middles


def _look_back(start: float, end: float, y: float, depth: float, colour: str) -> str:
    """Draw an arc under the words, from the word that looks back to the word that it finds."""
    curve = f"M{start:g} {y:g} Q{(start + end) / 2:g} {y + 2 * depth:g} {end:g} {y + 4:g}"
    return f'<path d="{curve}" fill="none" stroke="{colour}" marker-end="url(#to)"/>'


def _card(x: float, y: float, title: str, rows: list[tuple[str, str, str]]) -> list[str]:
    """Draw a card with the slots of a token: rows of (slot, value, colour)."""
    parts = [_box(x, y, (190, 30 + 24 * len(rows)), FAINT), _text(x + 10, y + 19, title, style='font-weight="600"')]
    for i, (slot, value, colour) in enumerate(rows):
        parts.append(_text(x + 10, y + 42 + 24 * i, slot, style=f'fill="{FAINT}" font-size="13"'))
        parts.append(_text(x + 84, y + 42 + 24 * i, value, style=f'fill="{colour}" font-weight="600"'))
    return parts


def _one_word() -> list[str]:
    """Draw the upper half: a record, far from it the question and half of its answer, and the next word."""
    top = 96
    record, r = _strip(RECORD, 30, top)
    answer, a = _strip(ANSWER, 554, top)
    parts = [
        _text(30, 38, "Where is the lamp of Mira?", style='font-size="20" font-weight="600"'),
        _text(
            30,
            62,
            "The next word is looked up in a record that may lie thousands of tokens back.",
            style=f'fill="{FAINT}"',
        ),
        *record,
        _text(
            (r[-1] + a[0]) / 2 - 4, top + 19, "· · ·  4,000 tokens  · · ·", style=f'text-anchor="middle" fill="{FAINT}"'
        ),
        *answer,
        _box(a[-1] + 24, top, (60, 28), FOUND, "#e6f4ec"),
        _text(a[-1] + 54, top + 19, "cellar", style=f'text-anchor="middle" fill="{FOUND}" font-weight="600"'),
        _text(30, top + 132, "layer 0: the last of its kind", style='font-weight="600"'),
    ]
    under = top + 30
    for start, found, depth, colour in (
        (r[7], r[0], 62, NAME),
        (r[7], r[4], 34, THING),
        (a[13], a[7], 62, NAME),
        (a[13], a[11], 26, THING),
    ):
        parts.append(_look_back(start, found, under, depth, colour))
    parts.append(_look_back(a[13], a[0], under, 92, ASKED))
    y = 264
    parts += _card(
        r[7] - 95, y, "at “cellar”", [("NAME", "Mira", NAME), ("OBJECT", "lamp", THING), ("TOLD", "a place", ASKED)]
    )
    parts += _card(
        a[13] - 110, y, "at “the”", [("NAME", "Mira", NAME), ("OBJECT", "lamp", THING), ("WANT", "a place", ASKED)]
    )
    left, right = r[7] + 99, a[13] - 114
    parts += [
        f'<path d="M{right:g} {y + 50} H{left:g}" stroke="{INK}" stroke-width="1.6" marker-end="url(#to)"/>',
        _text((left + right) / 2, y + 40, "layer 2: all three agree?", style='text-anchor="middle" font-weight="600"'),
        _text(
            (left + right) / 2,
            y + 70,
            "then its word is the next one; if nothing agrees,",
            style='text-anchor="middle" font-size="13"',
        ),
        _text(
            (left + right) / 2,
            y + 88,
            "the head rests on &lt;s&gt; and the answer is “I do not know.”",
            style='text-anchor="middle" font-size="13"',
        ),
    ]
    return parts


def _three_steps() -> list[str]:
    """Draw the lower half: each layer resolves one step of the question, all at the question mark."""
    y = 440
    parts = [
        f'<path d="M30 {y - 32} H{WIDTH - 30}" stroke="#d9dee3"/>',
        _text(
            30,
            y + 8,
            "What is the home town of the owner of the red lamp known for?",
            style='font-size="20" font-weight="600"',
        ),
        _text(30, y + 32, "Three records, three layers, one position: the question mark.", style=f'fill="{FAINT}"'),
    ]
    steps = (
        ("layer 0", "reads the question", "red lamp", THING, "the last name, thing, colour, marker"),
        ("layer 1", "red, lamp → who?", "Mira", NAME, "Mira keeps a red lamp in the cellar."),
        ("layer 2", "Mira → which town?", "Lisbon", ASKED, "Mira is a clockmaker from Lisbon."),
        ("layer 3", "Lisbon → told of?", "Lisbon is …", FOUND, "Lisbon is famous for its tulips."),
    )
    for i, (layer, does, finds, colour, source) in enumerate(steps):
        x = 30 + 290 * i
        parts += [
            _box(x, y + 56, (250, 92), colour),
            _text(x + 14, y + 80, layer, style='font-weight="600"'),
            _text(x + 14, y + 104, does),
            _text(x + 14, y + 132, finds, style=f'fill="{colour}" font-size="18" font-weight="600"'),
        ]
        parts.append(_text(x, y + 172, source, style=f'fill="{FAINT}" font-size="13" font-style="italic"'))
        if i:
            parts.append(
                f'<path d="M{x - 36} {y + 102} H{x - 5}" stroke="{INK}" stroke-width="1.6" marker-end="url(#to)"/>'
            )
    caption = (
        "Then word by word: fixed words come from a table in the MLP of layer 0, all others from the records; "
        "last comes &lt;/s&gt;."
    )
    parts.append(_text(30, y + 216, caption))
    return parts


def picture() -> str:
    """Return the picture as the text of an SVG file."""
    font = f'font-family="Helvetica, Arial, sans-serif" font-size="15" fill="{INK}"'
    tip = '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>',
        "<title>How the bundled checkpoint finds the words of an answer</title>",
        f'<defs>{tip}<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
    )
    return "\n".join([*head, *_one_word(), *_three_steps(), "</svg>", ""])
