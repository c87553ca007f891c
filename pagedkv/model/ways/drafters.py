"""Drafters by name: the names that a user may give to `speculate=` or `--speculate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv.checkpoint import BUNDLED
from pagedkv.errors import InvalidRequest
from pagedkv.model.ways.draft_model import DraftModel
from pagedkv.model.ways.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from pagedkv.model.ways.speculation import Drafter

LOOKUPS: Final[dict[str, dict[str, int]]] = {
    "prompt-lookup": {},
    "prompt-tree": {"num_tokens": 16, "width": 4, "shortest": 1},
}
"""Names of prompt lookup with its options."""
DRAFT: Final = "draft"
BUNDLED_DRAFT: Final = BUNDLED / "draft"
"""The draft model of the bundled checkpoint: two of its four layers."""


def drafter_of(speculate: Drafter | Path | str | None, **options: Any) -> Drafter | None:
    """Return a drafter.

    speculate: "prompt-lookup"; "prompt-tree" for several continuations in a step; "draft" for that of the bundled
        checkpoint; the Hugging Face folder of a draft model; a drafter; or None for none
    options: options of DraftModel.load. Raises: InvalidRequest, CheckpointError
    """
    if isinstance(speculate, str) and speculate in LOOKUPS:
        return PromptLookup(**LOOKUPS[speculate])
    if isinstance(speculate, str | Path):
        return DraftModel.load(BUNDLED_DRAFT if speculate == DRAFT else speculate, **options)
    if speculate is None or hasattr(speculate, "propose"):
        return speculate
    raise InvalidRequest(
        f"speculate is {speculate!r}; give {', '.join(map(repr, LOOKUPS))}, {DRAFT!r}, the folder of a draft model, "
        "a drafter, or None"
    )
