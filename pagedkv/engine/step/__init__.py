"""Steps: the loop of the engine. Each file is one noun; `Engine.step` calls them in order.

engine      requests in, completions out: the loop itself
scheduler   which sequences compute which tokens, and which is preempted
fetches     pages that come up from tiers while others compute
outcome     by a step's logits, what each sequence gets
delivery    from tokens to text, and from text to listeners
meter       totals and latencies of the steps so far
events      a record of the steps, if one is asked for, and the same as a trace
"""

from __future__ import annotations
