"""The model: one forward pass, every key and value through paged memory. Knows token ids; no request and no queue.

decoder     token ids in, logits out
rope        rotary positions
streaming   text without end: a window, and the first tokens
workspace   memory for the results of a decode step
runner      the forward passes of an engine's steps, with graphs on a GPU
pool        the cache of a model, and its default size
"""

from __future__ import annotations
