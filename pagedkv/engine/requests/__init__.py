"""Requests: what a caller asks for and keeps, and one completion while it is computed. Knows no model and no cache.

request     a prompt, its parameters, and its completions
limits      the most that one step may do
latency     the phases of a latency, and distributions in constant memory
sequence    one completion while it is computed, and the chunks of a step
draws       from rows of logits to tokens
beams       the search for the likeliest outputs, and the sequences that share their frames
"""

from __future__ import annotations
