"""The parts of `Engine.step` and `Engine.submit`. Each file is one noun; the engine calls them in order.

checks      a request, and a cache, before the engine takes them
sequence    one completion while it is computed, and the chunks of a step
step        the forward pass, over memory that exists before it begins (workspace)
draws       from rows of logits to tokens
outcome     by a step's logits, what each sequence gets
delivery    from tokens to text, and from text to listeners
pool        the cache of a model, and its default size
meter       totals and latencies of the steps so far
latency     the phases of a latency, and distributions in constant memory
events      a record of the steps, if one is asked for, and the same as a trace
"""

from __future__ import annotations
