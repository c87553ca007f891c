"""Messages between the two sides of a transfer: JSON objects, each with the fields that there is something to say of.

    first, both   hello    [format, fingerprint of the cache, bytes of a frame, frames that may be under way]
    decode side   asks     [[ask, tenant, salt, token ids]]       compute this prompt
                  wants    [[number, ask, name of a page]]        send this page as soon as it is there
                  drops    [number]                               this page is not wanted any more
                  stops    [ask]                                  nor is this prompt
                  dones    [number]                               the frame of this offer is free: a credit
    prefill side  offers   [[number, checksum, place]]            read this page; no checksum: there is none
                  ends     [[ask, whether it was computed]]       no page of this prompt will follow
    both          {}                                              a sign of life
                  bye      [true]                                 this side ends

Bytes are written as hexadecimal digits. A message that does not have this form ends the connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from typing import Any, Final

from pagedkv.core.arguments import salt_row
from pagedkv.tiers.transfer.link import LinkDown, Refused

FORMAT: Final = 1
MOST_PROMPT: Final = 1 << 20
"""The size of the longest prompt that is asked for, see `size_of`. Its message is not longer than MOST_BYTES."""
MOST_ASKED: Final = 1 << 24
"""The size of all prompts that a decode side may ask for at a time. It asks for half of that."""
MOST_ASKS: Final = 1024
"""Their number. The prefill side counts a prompt until it has told its end; the decode side may have given it up."""

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return the bytes of a message, without empty fields."""
    return json.dumps({name: value for name, value in message.items() if value}, separators=(",", ":")).encode()


def decode(content: bytes) -> Message:
    """Return a message. Raises: LinkDown for bytes that are none"""
    try:
        message = json.loads(content)
    except ValueError:
        message = None
    if not isinstance(message, dict) or not all(isinstance(value, list) for value in message.values()):
        raise LinkDown("the other side sent bytes that are no message")
    return message


def hello(fingerprint: bytes, frame_bytes: int, window: int) -> Message:
    """Return the first message of each side. window: frames that it lets be under way."""
    return {"hello": [FORMAT, fingerprint.hex(), frame_bytes, window]}


def window_of(message: Message, ours: Message) -> int:
    """Return the frames that may be under way between two sides, who said `message` and `ours`. Raises: LinkDown"""
    theirs, mine = message.get("hello"), ours["hello"]
    if not theirs or type(theirs[0]) is not int:
        raise LinkDown("the other side does not begin as a pagedkv process does")
    if theirs[0] != mine[0]:  # first: another format may have other fields
        raise Refused(f"the other side speaks format {theirs[0]}, and this one {mine[0]}: use one version of pagedkv")
    if len(theirs) != len(mine) or type(theirs[-1]) is not int or theirs[-1] < 1:
        raise LinkDown("the other side does not begin as a pagedkv process does")
    if theirs[1:3] != mine[1:3]:
        raise Refused(
            "the caches differ: both sides need the same geometry, dtype, model= and rank=, and no call of `forget`"
        )
    return min(theirs[-1], int(mine[-1]))


def require_numbers(*numbers: object) -> None:
    """Check numbers that are kept, which may not be a long text. Raises: LinkDown"""
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise LinkDown("the other side has sent a number that is none")


def size_of(token_ids: Sized, tenant: bytes, salt: bytes | Mapping[int, bytes]) -> int:
    """Return the size of a prompt: a token counts 1, and a byte of a tenant or a salt."""
    return len(token_ids) + len(tenant) + sum(8 + len(digest) for _, digest in salt_row(salt))


def salt_text(salt: bytes | Mapping[int, bytes]) -> list[list[Any]]:
    """Return the form of a salt in a message."""
    return [[place, digest.hex()] for place, digest in salt_row(salt)]


def salt_of(pairs: list[list[Any]]) -> bytes | dict[int, bytes]:
    """Return the salt that `salt_text` wrote."""
    salts = {int(place): bytes.fromhex(digest) for place, digest in pairs}
    return salts.get(0, b"") if salts.keys() <= {0} else salts
