"""Transfer: prompts are computed in one process, and decoded in another. Pages cross as soon as they are computed.

    prefill process   PrefillServer   server.py   ◀─ a Link, by torch.distributed or NIXL ─▶   remote.py   RemotePrefill

Both are tiers. So what holds for tiers holds here: a page that does not come, or is damaged, is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pagedkv.tiers.transfer.distributed import DistributedLink
from pagedkv.tiers.transfer.link import Link, LinkDown
from pagedkv.tiers.transfer.nixl import NixlLink
from pagedkv.tiers.transfer.remote import RemotePrefill
from pagedkv.tiers.transfer.server import AskedPrompt, PrefillServer

__all__ = [
    "AskedPrompt", "DistributedLink", "Link", "LinkDown", "NixlLink", "PrefillServer", "RemotePrefill", "link_at",
]  # fmt: skip

BY_NIXL: Final = "nixl:"
"""The beginning of an address that is reached by NIXL."""


def link_at(text: str) -> Link:
    """Return the link to "HOST:PORT" by torch.distributed, or to "nixl:HOST:PORT" by NIXL. Raises: InvalidRequest"""
    make, address = kind_and_address(text)
    return make(address)


def kind_and_address(text: str) -> tuple[Callable[[str], Link], str]:
    """Return the class of the link that `link_at` makes, and the "HOST:PORT" in `text`."""
    address = text.removeprefix(BY_NIXL)
    return (NixlLink, address) if address != text and ":" in address else (DistributedLink, text)
