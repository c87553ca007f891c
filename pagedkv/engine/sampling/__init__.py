"""Sampling: from logits to the next token of each request. Knows logits and sampling parameters; no model, no cache.

params      what a request asks
grammar     which tokens may follow, by a schema, an expression or a choice
logits      the rules that edit a row of logits before a token is drawn
sampler     the draw of a token, and its log-probability
"""

from __future__ import annotations
