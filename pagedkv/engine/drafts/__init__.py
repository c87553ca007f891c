"""Drafts: guesses of the next tokens, computed in one pass; those that come true stay.

speculation      what a step does with drafts; a drafter's protocol
prompt_lookup    guesses copied from the text itself
draft_model      guesses of a smaller model with its own cache
drafters         the choice between the two by name
"""

from __future__ import annotations
