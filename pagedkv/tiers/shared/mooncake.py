"""MooncakeTier: pages in a Mooncake store, the memory of several machines under one master.

    pagedkv-<name in hex>   header and bytes of a page

The master evicts records used longest ago when its memory is nearly full. A record that was read a moment ago has a
lease and cannot be deleted yet: then it stays until the master evicts it. Mooncake has no passwords: bind it to a
private network, and give `key`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes
from pagedkv.tiers.checksum import Bytes
from pagedkv.tiers.shared.records import Record
from pagedkv.tiers.shared.tier import SharedTier
from pagedkv.tiers.slots import FULL
from pagedkv.tiers.urls import shown

PREFIX: Final = "pagedkv-"
NO_SPACE: Final = -200
"""Mooncake's number for a store without free memory."""


class MooncakeTier(SharedTier):
    """Pages in the Mooncake store whose master is at `master`, such as "127.0.0.1:50051".

    host:     the address under which the other machines reach this one.
    lend:     memory of this process that becomes part of the store: bytes, or text like "16GiB". It is gone when the
              process ends. 0: none.
    buffer:   memory for transfers.
    protocol: "tcp" or "rdma", with `devices` the names of the network devices.
    size, key, threads, patience, limit, policy: see SharedTier.
    Raises:   InvalidRequest, also without the package mooncake; ConnectionError if the master cannot be reached
    """

    kind = "mooncake"

    def __init__(
        self, master: str, size: str | int, *, host: str = "127.0.0.1", lend: str | int = 0,
        buffer: str | int = "256MiB", protocol: str = "tcp", devices: str = "", **options: Any,
    ) -> None:  # fmt: skip
        memory = (0 if lend == 0 else parse_bytes(lend)), parse_bytes(buffer)
        super().__init__(MooncakeClient(master, host, memory, protocol, devices), size, **options)


class MooncakeClient:
    """Records in a Mooncake store. See Client. memory: bytes that are lent, and bytes for transfers."""

    def __init__(self, master: str, host: str, memory: tuple[int, int], protocol: str, devices: str) -> None:
        if "@" in str(master):  # Mooncake's own log would show it
            wrong = f"master is {shown(str(master))!r}, and Mooncake has no passwords"
            raise InvalidRequest(f"{wrong}; give HOST:PORT, such as 127.0.0.1:50051")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise InvalidRequest(
                f"a tier in Mooncake needs its package ({error}): pip install 'pagedkv[mooncake]', and libibverbs"
            ) from None
        self._store = MooncakeDistributedStore()
        code = self._store.setup(host, "P2PHANDSHAKE", *memory, protocol, devices, master)
        if code:
            raise ConnectionError(f"the Mooncake master at {master} was not reached from {host} (its number is {code})")

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """See Client.find."""
        answers = self._store.batch_is_exist([_key(name) for name in names])
        _refuse(answers)
        return [answer == 1 for answer in answers]

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        """See Client.get."""
        return [record or None for record in self._store.get_batch([_key(name) for name in names])]

    def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
        """See Client.put."""
        pairs = zip(names, records, strict=True)
        codes = [self._store.put_parts(_key(name), header, content.data) for name, (header, content) in pairs]
        return [FULL if code == NO_SPACE else f"failed: Mooncake's number {code}" if code else "" for code in codes]

    def delete(self, names: Sequence[bytes]) -> None:
        """See Client.delete."""
        for name in names:
            self._store.remove(_key(name))

    def close(self) -> None:
        """See Client.close."""
        self._store.close()


def _refuse(codes: Sequence[int]) -> None:
    """Raise ConnectionError if the master has not answered."""
    if failed := [code for code in codes if code < 0]:
        raise ConnectionError(f"Mooncake's master does not answer (Mooncake's number {failed[0]})")


def _key(name: bytes) -> str:
    return PREFIX + name.hex()
