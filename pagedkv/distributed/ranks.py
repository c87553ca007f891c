"""Ranks: the group of processes that compute one model, over torch.distributed. It knows tensors and no tokens.

    data      sums and gathered logits      NCCL on GPUs, else gloo
    control   messages from rank 0 to all   gloo, so that a follower that waits for a step uses no GPU
    store     where the ranks meet; beats, and the reason of an end (watch.py)

A message is one broadcast of FIRST words, with its number of words in front, and a second one for the rest of a longer
message. All ranks call the same collectives in the same order. If a rank fails between two of them, the group is lost:
every later call raises RankLost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pagedkv import debug
from pagedkv.core.state import I32
from pagedkv.distributed import interface, wire
from pagedkv.distributed.launch import Place
from pagedkv.distributed.watch import BEAT_S, JOINING, LEFT, LOST, Watch, briefly, cause, end_of, tell_end
from pagedkv.errors import InvalidRequest, PagedKVError, RankLost, described

FIRST: Final = 512
"""Words of the first broadcast of a message: 2 KiB, a decode step of 120 sequences."""

FOREVER: Final = timedelta(days=365)
"""The timeout of collectives: a follower may wait as long for the next step. The watch has the deadline."""

REFUSED: Final = 2
"""The exit status of the others if one rank refuses its input."""


class Ranks:
    """One process of the group, joined. In a `with` block the others are told when, and why, it ends.

    messages, message_bytes: sent by rank 0 to each of the others so far.
    session: on rank 0, the number of the session that the others follow, from 1; 0 between two sessions.
    """

    def __init__(self, place: Place, device: str = "cpu") -> None:
        """Meet the other ranks. device: "cpu", or the GPU of this rank.

        Raises: InvalidRequest if there is no such GPU; RankLost if the others do not come
        """
        self.rank: int = place.rank
        self.size: int = place.size
        self.device: torch.device = _device(device)
        self.messages: int = 0
        self.message_bytes: int = 0
        self.session: int = 0
        self._sessions = 0
        self._place, self._is_whole = place, True
        try:
            self._store = self._connected(hosts=place.rank == 0 and not place.agent_hosts)
        except RuntimeError as error:
            raise self._not_met(error) from None
        self._watch = Watch(self._connected, self.rank, self.size, debug.rank_timeout())
        self._watch.start()
        try:
            self._control = self._join()
        except RuntimeError as error:
            self._watch.claim()
            self.fail(lost := self._not_met(error))
            raise lost from None

    def _connected(self, *, hosts: bool = False) -> Any:
        """Return a connection of its own to the store of this attempt."""
        at, patience = self._place, timedelta(seconds=JOINING * debug.rank_timeout() / 2)  # torch tries twice
        torch_stores: Any = dist  # which does not say so to mypy
        store = torch_stores.TCPStore(at.host, at.port, is_master=hosts, timeout=patience, wait_for_workers=False)
        return torch_stores.PrefixStore(f"pagedkv/{at.attempt}", store)

    def _join(self) -> dist.ProcessGroup | None:
        """Make the group for data, which is torch's default group, and return that for messages; None if it is one."""
        interface.choose(self._store, self.rank, self.size, self._place.host, self._place.port)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=FOREVER)
        return None if backend == "gloo" else dist.new_group(backend="gloo", timeout=FOREVER)

    def _not_met(self, error: RuntimeError) -> RankLost:
        at = self._place
        return RankLost(
            f"rank {self.rank} of {self.size} cannot meet the others at {at.host}:{at.port}: {cause(error)}; start "
            "torchrun on all machines with the same options, and let each of them connect to the others"
        )

    # -- data ----------------------------------------------------------------------------------------------------------

    def add(self, x: Tensor) -> None:
        """Replace x by its sum over all ranks. Raises: RankLost"""
        self._call(dist.all_reduce, x)

    def gathered(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of all ranks side by side on rank 0, in `out` if given; on the others, `logits`.

        Shapes: logits float32 [N, V / size]; returns float32 [N, V] on rank 0
        Raises: RankLost
        """
        if not len(logits):  # all ranks know that
            return logits.new_empty(0, logits.shape[1] * self.size)
        parts = [torch.empty_like(logits) for _ in range(self.size)] if self.rank == 0 else None
        self._call(dist.gather, logits, parts, dst=0)
        return logits if parts is None else torch.cat(parts, dim=1, out=out)

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, words: I32) -> None:
        """Send a message, whose first word is its number of words, to all other ranks. Raises: RankLost"""
        first = np.zeros(FIRST, np.int32)
        first[: len(words)] = words[:FIRST]
        self._broadcast(first)
        if len(words) > FIRST:
            self._broadcast(words[FIRST:])
        self.messages += 1
        self.message_bytes += 4 * max(FIRST, len(words))

    def receive(self) -> I32:
        """Wait for the next message of rank 0 and return its words. Raises: RankLost"""
        first = np.zeros(FIRST, np.int32)
        self._broadcast(first)
        words = np.zeros(int(first[0]), np.int32)
        words[:FIRST] = first[: len(words)]
        if len(words) > FIRST:
            self._broadcast(words[FIRST:])
        return words

    def _broadcast(self, words: I32) -> None:
        self._call(dist.broadcast, torch.from_numpy(words), src=0, group=self._control)

    # -- the end -------------------------------------------------------------------------------------------------------

    def begin(self, values: dict[str, Any]) -> None:
        """Begin a session: tell the followers the pool. Raises: RankLost; InvalidRequest during another session"""
        if self.session:
            raise InvalidRequest("the ranks have an engine already; call Ranks.stop() before you load another one")
        with self.together():
            self.send(wire.packed_session(values))
            self._sessions += 1
            self.session = self._sessions

    def stop(self) -> None:
        """End the session of the followers, if there is one. Call it on rank 0. Raises: RankLost"""
        if self.session:
            with self.together():
                self.send(wire.packed_stop())
                self.session = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that all ranks run to its end; if it raises, the group is lost.

        Raises: RankLost if the group is lost already
        """
        if not self._is_whole:
            raise RankLost(
                f"an earlier step of the {self.size} ranks did not end, so their KV may differ; start all of them again"
            )
        self._is_whole = False
        yield
        self._is_whole = True

    def _call(self, collective: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            collective(*arguments, **options)
        except RuntimeError as error:
            self._is_whole = False
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> RankLost:
        """Return the error of a collective that failed, with the reason that a rank gave for its end."""
        self._watch.claim()
        ended = briefly(BEAT_S, lambda: end_of(self._store))
        reason = ended["reason"] if ended else f"the connection broke ({cause(error)})"
        return RankLost(f"rank {self.rank} has lost another rank: {reason}; all ranks end. Start them again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
            return
        try:
            self.close()
        except RankLost as lost:
            self.fail(lost)
            raise

    def close(self) -> None:
        """Leave the group, on all ranks. Rank 0 ends the session, and waits until no other rank watches it any more.

        Raises: RankLost if a step did not end, or a rank has ended
        """
        if self.rank == 0:
            self.stop()
        self._watch.stop()
        patience = debug.rank_timeout()
        briefly(patience, self._wait_for_others if self.rank == 0 else lambda: self._store.add(LEFT, 1))
        dist.destroy_process_group()

    def fail(self, error: BaseException) -> None:
        """Tell all others to end, because of `error`. If this is rank 0, they do so in silence."""
        self._watch.stop()
        status = REFUSED if isinstance(error, PagedKVError) and not isinstance(error, RankLost) else LOST
        reason = str(error) if isinstance(error, PagedKVError) else described(error)

        def tell() -> None:
            tell_end(self._store, f"rank {self.rank}: {reason}", status, said=self.rank == 0)
            if self.rank == 0:
                self._wait_for_others(dead=int(isinstance(error, RankLost)))

        briefly(4 * BEAT_S, tell)

    def _wait_for_others(self, *, dead: int = 0) -> None:
        """Wait until all followers but the dead have left."""
        while self._store.add(LEFT, 0) < self.size - 1 - dead:
            time.sleep(0.01)


def _device(name: str) -> torch.device:
    """Return a device and make it that of this process. Raises: InvalidRequest for a GPU that is not there"""
    found = torch.device(name)
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise InvalidRequest(
                f"a rank needs the GPU {name}, and torch finds {count} GPUs here; start as many ranks as there are GPUs"
            )
        torch.cuda.set_device(found)
    return found
