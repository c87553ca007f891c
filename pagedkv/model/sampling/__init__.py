"""Sampling: from logits to the next token of each request. Knows logits and sampling parameters; no model, no cache.

params      what a request asks
sampler     the draw of its next token
"""

from __future__ import annotations
