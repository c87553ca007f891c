"""An engine that owns its page tables: pagedkv counts references, finds pages by the engine's keys, and evicts.

Run: python examples/own_page_tables.py
"""

import hashlib
import sys

import numpy as np

from pagedkv.core import FramePool
from pagedkv.errors import OutOfFrames

BLOCK = 4
pool = FramePool(num_frames=8, key_bytes=32)
tables: dict[str, list[int]] = {}  # the engine's page tables: frames of each sequence
computed: list[int] = []  # frames of pages that the model computed


def keys_of(tokens: list[int]) -> list[bytes]:
    """Return the key of each full page: a chained digest, so that equal keys mean equal prefixes."""
    keys, before = [], b""
    for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hashlib.sha256(before + np.array(tokens[first : first + BLOCK], "<i4").tobytes()).digest()
        keys.append(before)
    return keys


def start(name: str, tokens: list[int]) -> None:
    """Map the known pages of a prompt, take frames for the others, compute them, and publish the full ones."""
    keys = keys_of(tokens)
    found = pool.find(keys)  # changes nothing; -1 from the first unknown page on
    pool.share(known := found[found >= 0])  # now they cannot be evicted
    try:
        new = pool.take(-(-len(tokens) // BLOCK) - len(known))
    except OutOfFrames:
        pool.drop(known[::-1])
        raise
    computed.extend(new)  # the model would compute these pages here, and store their KV in the frames `new`
    pool.publish(new[: len(keys) - len(known)], keys[len(known) :])
    tables[name] = [*known.tolist(), *new.tolist()]


def finish(name: str) -> None:
    """Give the frames back, the last page first, so that a tail is evicted before its prefix."""
    pool.drop(tables.pop(name)[::-1])


start("first", list(range(14)))
start("second", [*range(8), 90, 91, 92])  # shares two pages
print("page tables:", tables, f"- {len(computed)} pages computed")
assert tables["first"][:2] == tables["second"][:2]
finish("first")
start("third", list(range(20)))  # finds three pages of the first one: two referenced, one cached
finish("second")
finish("third")
print(pool, "evicts next", pool.victims(3).tolist())
pool.check()  # proves all invariants; for tests and debugging
assert len(computed) == 4 + 1 + 2
assert "torch" not in sys.modules
