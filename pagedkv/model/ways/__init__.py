"""Ways of decoding beside the plain one. Each file can be read alone; its head defines the tokens that come out.

speculation      guess the next tokens, compute them in one pass, and keep those that come true
prompt_lookup    guesses copied from the text itself
draft_model      guesses of a smaller model with a cache of its own
drafters         the choice between the two by name
streaming        text without end: a window, and the first tokens
beams            search for the likeliest outputs with several beams, and the sequences that share their frames
"""

from __future__ import annotations
