"""Transfer: prompts are computed in one process, and decoded in another. Pages cross as soon as they are computed.

    prefill process   PrefillServer   server.py   ◀─ a Link, by torch.distributed or NIXL ─▶   remote.py   RemotePrefill

Both are tiers. So what holds for tiers holds here: a page that does not come, or is damaged, is computed.
"""

from pagedkv.tiers.transfer.distributed import DistributedLink
from pagedkv.tiers.transfer.link import Link, LinkDown
from pagedkv.tiers.transfer.nixl import NixlLink
from pagedkv.tiers.transfer.remote import RemotePrefill
from pagedkv.tiers.transfer.server import AskedPrompt, PrefillServer

__all__ = ["AskedPrompt", "DistributedLink", "Link", "LinkDown", "NixlLink", "PrefillServer", "RemotePrefill"]
