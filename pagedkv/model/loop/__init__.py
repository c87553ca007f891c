"""The parts of `Engine.step` and `Engine.submit`. Each file is one noun; the engine calls them in order.

checks      a request, and a cache, before the engine takes them
gangs       the sequences of a beam search, which take their tokens together
sequence    one completion while it is computed, and the chunks of a step
step        the forward pass, over memory that exists before it begins (workspace)
draws       from rows of logits to tokens
outcome     by a step's logits, what each sequence gets
delivery    from tokens to text, and from text to listeners
validation  the user's own function accepts an output, or rejects it
pool        the cache of a model, and its default size
preemption  how much a sequence keeps when the pool runs out of frames
meter       totals and latencies of the steps so far
latency     the phases of a latency, and distributions in constant memory
events      a record of the lives of requests, if one is asked for
"""

from __future__ import annotations
