"""The minimal reference model and its loop: a prompt in, text out, every key and value through paged memory.

    config ─▶ rope ─┐
    weights ────────┴▶ decoder ─▶ logits ─▶ sampler ─▶ tokens        tokenizer: text ◀─▶ token ids

May import cache, core and kernels; never cli or integrations.
"""

from __future__ import annotations
