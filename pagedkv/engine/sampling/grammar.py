"""Grammars: which tokens may come next, so that a text follows a JSON schema, a regular expression or a choice.

The library llguidance (extra `grammar`) parses the bytes of tokens. It knows each token's bytes from tokenizer.json, so
a tokenizer must be one whose tokens have bytes of their own: byte-level BPE, or SentencePiece with bytes as fallback.

    Grammars ── of one tokenizer ──▶ compiled(params): Grammar        once for each schema, some are kept
                                                        └─ start()    a copy for one sequence, which follows its output

An output that ended by itself (finish_reason "stop") is a whole text of the grammar, unless a stop string or a stop id
ended it. An output that max_tokens ended is the beginning of one.
"""

from __future__ import annotations

import json
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer

from pagedkv.engine.sampling.params import GRAMMARS
from pagedkv.errors import InvalidRequest, described

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.checkpoint.tokenizer import Tokenizer
    from pagedkv.engine.sampling.params import SamplingParams

KEPT: Final = 64
"""Compiled grammars that are kept. One takes some megabytes at most, and up to a second to compile."""


class Grammars:
    """The grammars of one tokenizer. Any thread may compile one.

    The library's own form of the tokenizer is made with the first grammar: about a second for 150,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._own_form: Any = None
        self._making = Lock()
        self._kept = lru_cache(KEPT)(self._compile)

    def compiled(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that `params` ask for; None if they ask for none.

        Raises: InvalidRequest if llguidance is missing, or cannot use the tokenizer, schema or expression
        """
        for name in GRAMMARS:
            if (value := getattr(params, name)) is not None:
                return self._kept(name, json.dumps(value) if isinstance(value, dict) else value)
        return None

    def _compile(self, name: str, value: Any) -> Grammar:
        try:
            import llguidance
        except ImportError:
            raise InvalidRequest(f"{name} needs llguidance; install pagedkv[grammar]") from None
        matcher, own_form = llguidance.LLMatcher, self._library_tokenizer(llguidance)
        try:
            if name == "json_schema":
                text = matcher.grammar_from_json_schema(value)
            elif name == "regex":
                text = matcher.grammar_from_regex(value)
            else:
                text = matcher.grammar_from_lark("start: " + " | ".join(map(_lark_text, value)))
            compiled = matcher(own_form, text, log_level=0)
        except ValueError as error:  # half of a surrogate pair
            raise InvalidRequest(f"{name} cannot be used ({error}); give valid Unicode") from None
        if compiled.is_error():
            raise InvalidRequest(f"{name} cannot be used: {compiled.get_error().strip()}")
        return Grammar(compiled)

    def _library_tokenizer(self, llguidance: Any) -> Any:
        with self._making:
            if self._own_form is None:
                raw = RawTokenizer.from_str(self._tokenizer.raw.to_str())  # a copy
                raw.no_padding()
                raw.no_truncation()
                ends = sorted(self._tokenizer.eos_ids) or None
                try:
                    self._own_form = llguidance.LLTokenizer(raw.to_str(), eos_token=ends)
                except Exception as error:
                    reason = described(error).partition(": ")[2].partition(": ")[0]  # the rest is a dump of Rust
                    raise InvalidRequest(
                        f"llguidance cannot use this tokenizer ({reason}); a grammar needs byte-level BPE, or "
                        "SentencePiece with bytes as fallback"
                    ) from None
            return self._own_form


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Grammar:
    """The state of a grammar after the output of one sequence. first: the number of tokens before the output."""

    def __init__(self, matcher: Any, first: int = 0) -> None:
        self._matcher = matcher
        self._num_followed = self._first = first

    def start(self, first: int) -> Grammar:
        """Return a copy for another sequence, before its output. first: the length of its prompt."""
        return Grammar(self._matcher.deep_copy(), first)

    def fork(self) -> Grammar:
        """Return a copy for another sequence, after the same tokens."""
        twin = Grammar(self._matcher.deep_copy(), self._first)
        twin._num_followed = self._num_followed
        return twin

    def follow(self, tokens: list[int]) -> Grammar:
        """Take the new tokens of a sequence, or take back those that it lost. Returns: this grammar

        Tokens behind the end of a text, as drafts may be, are not taken: the library would fail for good.
        """
        self.truncate(len(tokens))
        while self._num_followed < len(tokens) and not self._matcher.is_stopped():
            self._matcher.consume_tokens(tokens[self._num_followed : self._num_followed + 1])
            self._num_followed += 1
        return self

    def truncate(self, length: int) -> None:
        """Take back the tokens behind the first `length`; those of the prompt were not taken."""
        length = max(length, self._first)
        if length < self._num_followed:
            self._matcher.rollback(self._num_followed - length)
            self._num_followed = length

    def allowed(self, vocab_size: int) -> Tensor:
        """Return which tokens may come next: bool [vocab_size]. A token that the tokenizer does not have may not.

        Raises: InvalidRequest if the library gave up
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {self._matcher.get_error().strip()}")
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[: len(bits)] = bits[:vocab_size]
        return torch.from_numpy(allowed)

    @property
    def is_complete(self) -> bool:
        """Whether the output is a whole text of the grammar that no token can continue."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())
