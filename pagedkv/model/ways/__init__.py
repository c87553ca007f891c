"""Ways of decoding beside the plain one. Each file can be read alone; its head defines the tokens that come out.

speculation      guess the next tokens, compute them in one pass, and keep those that come true
trees            guesses of several continuations, of which one may come true
prompt_lookup    guesses copied from the text itself
draft_model      guesses of a smaller model with a cache of its own
drafters         the choice between the two by name
best_of          draw several samples, and return the likeliest of them
streaming        text without end: a window, and the first tokens
beams            search for the likeliest outputs with several beams, which share frames
"""

from __future__ import annotations
