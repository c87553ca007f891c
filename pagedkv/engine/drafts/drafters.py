"""Drafters by name: the names that a user may give to `speculate=` or `--speculate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.drafts.draft_model import DraftModel
from pagedkv.engine.drafts.prompt_lookup import PromptLookup
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.engine.drafts.speculation import Drafter

LOOKUP: Final = "prompt-lookup"
DRAFT: Final = "draft"
BUNDLED_DRAFT: Final = BUNDLED / "draft"
"""The draft model of the bundled checkpoint: two of its four layers."""


def drafter_of(speculate: Drafter | Path | str | None, **options: Any) -> Drafter | None:
    """Return a drafter.

    speculate: "prompt-lookup"; "draft" for that of the bundled checkpoint; the Hugging Face folder of a draft model;
        a drafter; or None for none
    options: options of DraftModel.load. Raises: InvalidRequest, CheckpointError
    """
    if speculate == LOOKUP:
        return PromptLookup()
    if isinstance(speculate, str | Path):
        return DraftModel.load(BUNDLED_DRAFT if speculate == DRAFT else speculate, **options)
    if speculate is None or hasattr(speculate, "propose"):
        return speculate
    raise InvalidRequest(
        f"speculate is {speculate!r}; give {LOOKUP!r}, {DRAFT!r}, the folder of a draft model, a drafter, or None"
    )
