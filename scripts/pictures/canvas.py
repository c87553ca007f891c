"""Canvas: an SVG of boxes, words and lines in the colours of the manual, for a light page and for a dark one.

One colour has one meaning in all pictures:

    found     tokens of pages that were there already       queued    a request that waits
    prefill   tokens of a prompt, computed                  lost      rolled back, or preempted
    decode    one new token                                 free      an unused frame

The style sheet stands in the SVG, so a picture needs nothing else. No library is needed to draw.
"""

from __future__ import annotations

from html import escape
from typing import Final

FILLS: Final[dict[str, tuple[str, str, str, str]]] = {
    "found": ("#e6dcfa", "#8a63d2", "#3b2a63", "#b197f0"),
    "prefill": ("#d3e5fb", "#3b78c9", "#1c3d63", "#6ea8f0"),
    "decode": ("#cfeed6", "#2f8f4e", "#1d4a2b", "#56c27c"),
    "lost": ("#fde4cc", "#c5702a", "#5c3716", "#f0a35e"),
    "queued": ("#eef0f2", "#afb8c1", "#2b3036", "#59626c"),
    "free": ("none", "#afb8c1", "none", "#59626c"),
    "plain": ("none", "#8c959f", "none", "#6e7681"),
}
"""Meaning → fill and line on a light page, fill and line on a dark one."""

FONT: Final = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
CODE: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"


def _rules(dark: bool) -> str:
    """Return the colours of one scheme."""
    ink, dim = ("#e6edf3", "#9aa4af") if dark else ("#24292f", "#5f6974")
    rules = [f"text {{ fill: {ink}; }} .dim {{ fill: {dim}; }} .axis {{ stroke: {dim}; }} #tip path {{ fill: {dim}; }}"]
    for kind, colours in FILLS.items():
        fill, line = colours[2:] if dark else colours[:2]
        rules.append(f".{kind} {{ fill: {fill}; stroke: {line}; }} .{kind}-line {{ stroke: {line}; }}")
        rules.append(f".{kind}-ink {{ fill: {line}; stroke: none; }}")
    return "\n    ".join(rules)


class Canvas:
    """A drawing under way. Coordinates are pixels at full size; y grows downwards."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        """description: for a reader who cannot see the picture."""
        self.width, self.height = width, height
        self._title, self._description = title, description
        self._parts: list[str] = []

    def box(self, x: float, y: float, size: tuple[float, float], kind: str, *, more: str = "") -> None:
        """Draw a box. size: width and height. kind: a name of FILLS. more: further classes"""
        classes = f"{kind} {more}".strip()
        width, height = size
        self._parts.append(f'<rect class="{classes}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Write words from x on. kind: classes, such as "dim", "head", "mid" (centred on x), "end", "code", "small"."""
        of = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{of} x="{x:g}" y="{y:g}">{escape(words, quote=False)}</text>')

    def path(self, d: str, kind: str) -> None:
        """Draw a line without a fill. kind: classes, such as "axis", "decode-line arrow", "dash"."""
        self._parts.append(f'<path class="{kind} bare" d="{d}"/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 3) -> None:
        """Draw a filled dot in the line colour of a kind."""
        self._parts.append(f'<circle class="{kind}-ink" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Write which colour means what, from x on. entries: pairs of a kind and its words"""
        for kind, words in entries:
            self.box(x, y - 10, (14, 12), *kind.split(" ", 1)[:1], more=kind.partition(" ")[2])
            self.text(x + 20, y, words, "dim")
            x += 20 + 6.4 * len(words) + 22

    def svg(self) -> str:
        """Return the picture."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="t d" font-family="{FONT}" font-size="12">\n'
            f'  <title id="t">{escape(self._title, quote=False)}</title>\n'
            f'  <desc id="d">{escape(self._description, quote=False)}</desc>'
        )
        style = (
            "  <style>\n    .head { font-weight: 600; } .big { font-size: 15px; font-weight: 600; } "
            ".small { font-size: 10px; } .mid { text-anchor: middle; } .end { text-anchor: end; }\n"
            f"    .code {{ font-family: {CODE}; }} .bare {{ fill: none; stroke-width: 1.6; }} "
            ".thin { stroke-width: 1; } .dash { stroke-dasharray: 4 3; } .gone { text-decoration: line-through; }\n"
            "    rect { stroke-width: 1; } .thick { stroke-width: 2.4; } .arrow { marker-end: url(#tip); }\n"
            f"    {_rules(dark=False)}\n    @media (prefers-color-scheme: dark) {{\n    {_rules(dark=True)}\n    }}\n"
            "  </style>\n"
            '  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        return "\n".join([head, style, *(f"  {part}" for part in self._parts), "</svg>\n"])
