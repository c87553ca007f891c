"""ApiKeys: which API key belongs to which tenant. Knows digests only: no key is kept, shown in an error, or logged.

A file has `key tenant` in each line; empty lines and lines that begin with # are skipped. The prefix cache never shows
a tenant the pages of another one.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

from pagedkv.errors import InvalidRequest

MOST_BYTES: Final = 2**24
"""Bytes of a file of keys: about 200,000 keys."""


class ApiKeys:
    """The keys that a server takes, as {sha256 of the key: tenant}.

    A look-up compares digests: its time says nothing about a key that a guess is near to.
    """

    def __init__(self, tenants: dict[bytes, bytes]) -> None:
        self._tenants = tenants

    @classmethod
    def of(cls, key: str) -> ApiKeys:
        """Return the keys of a server that has one. Its tenant is b"", as without a key. Blanks around it do not count.

        Raises: InvalidRequest
        """
        words = key.encode(errors="surrogateescape").split()
        if len(words) != 1:
            raise InvalidRequest("the API key is empty or has blanks inside; give one word")
        return cls({_digest(words[0]): b""})

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a file of keys. Raises: InvalidRequest, which names a line and never its text"""
        tenants: dict[bytes, bytes] = {}
        for number, line in enumerate(_lines(path), 1):
            words = line.split()
            if not words or words[0].startswith(b"#"):
                continue
            if len(words) != 2:
                raise InvalidRequest(
                    f"line {number} of {path} has {len(words)} words; give `key tenant`, both without spaces"
                )
            digest = _digest(words[0])
            if digest in tenants:
                raise InvalidRequest(f"the key in line {number} of {path} stands in an earlier line, too; drop one")
            tenants[digest] = words[1]
        if not tenants:
            raise InvalidRequest(f"{path} has no key; give a line of `key tenant` for each")
        return cls(tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def num_tenants(self) -> int:
        """The number of tenants; several keys may be of one."""
        return len(set(self._tenants.values()))

    def tenant_of(self, authorization: bytes) -> bytes | None:
        """Return the tenant of a header `Authorization: Bearer KEY`; None for any other value."""
        scheme, _, key = authorization.partition(b" ")
        return self._tenants.get(_digest(key.strip())) if scheme.lower() == b"bearer" else None


def _lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot read the keys in {path}: {reason}; give another file") from None
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{path} has more than {MOST_BYTES:,} bytes; give a file of keys")
    return data.splitlines()


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
