"""FramePool: the door to the frames below address spaces. It checks arguments and raises errors.

The engine holds the page tables, and counts on the pool for the rest: which frames are free, which are referenced, what
a key finds, and which frame is evicted next. The compiled functions are those of MemoryManager (pool/, prefix/), called
in batches (batches.py). This file must not know spaces, plans, tokens or tensors.

The compiled functions have one form for each argument: numba would compile them anew for a read-only array, or one with
gaps. An array that has the form is passed on as it is, without a copy.

Each change of the pool is one compiled call, in which neither a signal handler nor another thread runs. So the methods
that an engine calls for each step take no part in the guard of threads: they look whether a guarded method runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any, Final, NoReturn, cast

import numpy as np
import numpy.typing as npt

from pagedkv import debug
from pagedkv.core import state as st
from pagedkv.core import tenants
from pagedkv.core.arguments import flag, tenant_name, whole
from pagedkv.core.check.laws import check_frame_pool
from pagedkv.core.frame_pool import batches
from pagedkv.core.frame_pool.packed import pack
from pagedkv.core.observe.stats import PoolStats, gather_pool, usages_of
from pagedkv.core.policies import Policy, chosen, install
from pagedkv.core.pool import epochs
from pagedkv.core.state import I32, I64, U8
from pagedkv.core.tables import steps
from pagedkv.core.tables.forget import forget_pages
from pagedkv.core.tables.layer_groups import Group, group_rows
from pagedkv.core.tables.step_errors import refuse_plan
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest

Frames = int | Sequence[int] | npt.NDArray[np.integer]
Keys = Sequence[bytes] | npt.NDArray[Any]

_INT32: Final = np.dtype(np.int32)
_UINT8: Final = np.dtype(np.uint8)


class FramePool(ThreadGuard):
    """A pool of frames for an engine with page tables of its own: references, keys, eviction.

    A frame that is taken has one reference. Without a reference, a frame that has a key stays cached: `find` finds it
    until it is evicted. Any other frame is free.

    key_bytes:  the length of a key. Keys are opaque, and compared byte for byte.
    policy:     the order in which cached frames are evicted, see MemoryManager.
    twins:      whether several frames may have one key. If not, `publish` says which frame has it.
    Raises:     InvalidRequest for sizes or options that make no sense.
    """

    def __init__(
        self, num_frames: int, *, key_bytes: int = 32, policy: str | Policy = "lru", twins: bool = False
    ) -> None:
        self.num_frames: int = whole(num_frames, "num_frames", 1, 2**31)
        self.key_bytes: int = whole(key_bytes, "key_bytes", 1, 4097)
        self.policy: Policy = chosen(policy)
        self.twins: bool = flag(twins, "twins")
        words = -(-self.key_bytes // 4)
        try:
            state = st.new_state(self.num_frames, group_rows((Group(),)), block_size=words, publishing=True)
        except (MemoryError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} frames with keys of {key_bytes} bytes: no memory for them ({error})"
            ) from None
        install(self.policy, state.reg)
        self._accounts: dict[bytes, int] = {}
        self._proves = debug.level() >= 3
        self._held = state, pack(state)
        self._begin_guard()
        self._last_callers = None  # they know address spaces

    @property
    def state(self) -> st.State:
        """State: the arrays, private to core."""
        return self._held[0]

    @state.setter
    def state(self, state: st.State) -> None:
        self._held = state, pack(state)

    # -- references ----------------------------------------------------------------------------------------------------

    def take(self, wanted: Frames, *, after: int = -1, tenant: bytes = b"") -> I32:
        """Take frames, each with one reference: `wanted` is how many, or a row of free frames to be taken by number.

        Cached frames are evicted in the policy's order if too few are free, each with its key.
        after:   a frame; the new frames follow it if these are free, so that the frames of a sequence form runs.
        tenant:  charged for the frames until they are free again, if it has a quota.
        Returns: int32 [n], the frames
        Raises:  OutOfFrames, QuotaExceeded; InvalidRequest for a frame that is not free. Nothing was changed then.
        """
        if self._calls or self._owner:
            self._enter("take")
        account = self._account(tenant) if tenant or self._accounts else 0
        if type(wanted) is not int:
            if not isinstance(wanted, np.integer | bool):
                return self._take_these(wanted, account)
            wanted = whole(wanted, "wanted")
        if type(after) is not int:
            after = whole(after, "after", -1, self.num_frames)
        if not 0 <= wanted <= self.num_frames or not -1 <= after < self.num_frames:
            self._refuse_count(wanted, after)
        taken = np.empty(wanted, np.int32)
        code = batches.take(self._held[1], taken, after, account)
        if code != steps.OK:
            self._refuse_take(code, wanted, account)
        if self._proves:
            self.check()
        return taken

    def take_one(self, *, after: int = -1, tenant: bytes = b"") -> int:
        """Take one frame, and return its number. The same as `take(1)` in half the time."""
        if self._calls or self._owner:
            self._enter("take_one")
        account = self._account(tenant) if tenant or self._accounts else 0
        if type(after) is not int:
            after = whole(after, "after", -1, self.num_frames)
        if not -1 <= after < self.num_frames:
            self._refuse_count(1, after)
        frame = batches.take_one(self._held[1], after, account)
        if frame < 0:
            self._refuse_take(frame + batches.MOST_FRAMES, 1, account)
        if self._proves:
            self.check()
        return frame

    def share(self, frames: Frames) -> None:
        """Add a reference to each of `frames`, which are referenced or cached, and count the use for the policy.

        A frame that is named twice gets two references.
        Raises: InvalidRequest for a free frame. Nothing was changed then.
        """
        if self._calls or self._owner:
            self._enter("share")
        row = _frame_numbers(frames)
        at = batches.share(self._held[1], row)
        if at != batches.ALL:
            self._refuse(row, at, "share", "is free; take it, or share a frame that has references or a key")
        if self._proves:
            self.check()

    def drop(
        self, frames: Frames, *, last: bool = False, positions: Sequence[int] | npt.NDArray[np.integer] | None = None
    ) -> None:
        """Remove a reference from each of `frames`. Frames dropped first are evicted first: give tails before prefixes.

        last:      keep a frame without a key, too, until the policy evicts it: its contents may still be read.
        positions: the position of the first token of each frame, for the policy "cost".
        Raises:    InvalidRequest for a frame without so many references. Nothing was changed then.
        """
        if self._calls or self._owner:
            self._enter("drop")
        keep = batches.KEEP_ALL if last else batches.KEEP_NAMED
        if type(frames) is int and positions is None and -1 <= frames < self.num_frames:
            at, row = batches.drop_one(self._held[1], frames, keep), None
        else:
            row = _frame_numbers(frames)
            places = _NO_POSITIONS if positions is None else _token_positions(positions, len(row))
            at = batches.drop(self._held[1], row, keep, places)
        if at != batches.ALL:
            row = _frame_numbers(frames) if row is None else row
            self._refuse(row, at, "drop", "has no such reference; drop each reference once")
        if self._proves:
            self.check()

    def references(self) -> I32:
        """int32 [F]: the references of each frame. A copy. O(frames)."""
        return self.state.frames["refs"].astype(np.int32)

    def recover(self, references: npt.NDArray[np.integer]) -> int:
        """Drop the references that no page table holds, as after an interrupt that lost what `take` returned.

        references: int [F], how many references of each frame your page tables hold.
        Returns: how many references were dropped
        Raises:  InvalidRequest if a frame has fewer references. Nothing was changed then.
        """
        self._enter("recover")
        counts = _frame_numbers(references)
        if len(counts) != self.num_frames:
            raise InvalidRequest(
                f"recover got the references of {len(counts)} frames; give one number for each of {self.num_frames}"
            )
        frame, dropped = batches.settle(self._held[1], counts)
        if frame != batches.ALL:
            raise InvalidRequest(
                f"recover: your tables hold {counts[frame]} references of frame {frame}, which has "
                f"{self.state.frames['refs'][frame]}; a reference was dropped twice"
            )
        if self._proves:
            self.check()
        return dropped

    # -- keys ----------------------------------------------------------------------------------------------------------

    def publish(self, frames: Frames, keys: Keys) -> I32:
        """Give each of `frames` its key, so that `find` finds the frame. Its contents must be computed.

        keys:    bytes, `key_bytes` each: an array of rows, such as uint8 [n, key_bytes], or a list of bytes objects.
        Returns: int32 [n], the frame that has each key. Without `twins`, that is another one if the key was published
                 before: yours got no key; you may share that one and drop yours.
        Raises:  InvalidRequest for a frame without references, or with another key. Nothing was changed then.
        """
        if self._calls or self._owner:
            self._enter("publish")
        row, named = _frame_numbers(frames), _key_row(keys, self.key_bytes)
        if len(row) != len(keys):
            raise InvalidRequest(f"publish got {len(row)} frames and {len(keys)} keys; give one key for each frame")
        held = np.empty(len(row), np.int32)
        at = batches.publish(self._held[1], row, named, held, self.twins)
        if at != batches.ALL:
            self._refuse_name(row, at)
        if self._proves:
            self.check()
        return held

    def unpublish(self, frames: Frames) -> None:
        """Take the keys of `frames` away. A frame without references is free then. Frames without a key stay as is."""
        if self._calls or self._owner:
            self._enter("unpublish")
        row = _frame_numbers(frames)
        at = batches.unpublish(self._held[1], row)
        if at != batches.ALL:
            self._refuse(row, at, "unpublish", "")
        if self._proves:
            self.check()

    def find(self, keys: Keys) -> I32:
        """int32 [n]: the frame that has each key, or -1. Nothing is changed: `share` the frames that you will use.

        Of twins, the one published last is found.
        """
        if self._calls or self._owner:
            self._enter("find")
        row = _key_row(keys, self.key_bytes)
        found = np.empty(len(keys), np.int32)
        batches.find(self._held[1], row, found)
        return found

    def names(self, frames: Frames) -> list[bytes | None]:
        """Return the key of each of `frames`, or None."""
        row = _frame_numbers(frames)
        beyond = np.flatnonzero((row < 0) | (row >= self.num_frames))
        if len(beyond):
            self._refuse(row, int(beyond[0]), "names", "")
        named, words = self.state.frames["published"][row].tolist(), self.state.tokens[row]
        return [
            key.tobytes()[: self.key_bytes] if has_name else None for key, has_name in zip(words, named, strict=True)
        ]

    # -- eviction ------------------------------------------------------------------------------------------------------

    def victims(self, count: int) -> I32:
        """int32 [at most count]: the frames that `evict(count)` would free, in this order. O(count)."""
        self._enter("victims")
        found = np.empty(min(whole(count, "count"), int(self.state.reg[st.NUM_EVICTABLE])), np.int32)
        registers = self.state.reg.copy()
        return found[: batches.victims(self._held[1], found, registers)]

    @exclusive
    def evict(self, count: int) -> int:
        """Free up to `count` cached frames, in the policy's order. Return how many were freed."""
        evicted = int(steps.evict_frames(self.state, whole(count, "count")))
        if self._proves:
            self.check()
        return evicted

    @exclusive
    def forget(self) -> int:
        """Take all keys away, as after an update of the weights. Return how many cached frames are free now. O(frames).

        A frame that an open epoch may still read is free when the epoch has passed.
        """
        freed = int(forget_pages(self.state))
        if self._proves:
            self.check()
        return freed

    # -- epochs -----------------------------------------------------------------------------------------------------

    @exclusive
    def retire(self, epoch: int) -> None:
        """Open `epoch`: work was launched that may read any frame referenced now.

        A frame that is dropped later waits for `advance(epoch)`. Epochs grow, see MemoryManager.retire.
        Raises: InvalidRequest unless `epoch` is newer than the last one
        """
        self.state.reg[[st.EPOCH, st.PASSED]] = epochs.opening(self.state.reg, epoch)

    @exclusive
    def advance(self, epoch: int) -> int:
        """Make the frames available that waited for `epoch` or an older one, and return how many waited.

        Raises: InvalidRequest for an epoch that was not opened
        """
        passed = epochs.advance(self.state, epoch)
        if self._proves:
            self.check()
        return passed

    # -- tenants -------------------------------------------------------------------------------------------------------

    @exclusive
    def set_quota(self, tenant: bytes, *, hard: int | None = None, soft: int | None = None, protected: int = 0) -> None:
        """Limit the frames that are charged to `tenant`, or change its limits. See MemoryManager.set_quota.

        Frames that were taken before the first quota of a tenant are not charged to it.
        """
        limits = tenants.Limits.of(self.state, self._accounts, tenant, (hard, soft, protected))
        if tenant not in self._accounts:
            self.state = tenants.with_account(self.state, self._accounts)
            self._accounts[tenant] = len(self._accounts) + 1
        limits.set(self.state, self._accounts[tenant])

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """int, frames: how many `take` could give now, free or evictable. Quotas may leave fewer to a tenant."""
        return tenants.available(self.state)

    def available_to(self, tenant: bytes = b"") -> int:
        """Return how many frames `take` could give to `tenant` now. See MemoryManager.available_to."""
        return max(0, min(tenants.headroom(self.state, self._account(tenant))))

    def stats(self) -> PoolStats:
        """Return the counters of the pool. O(1), or O(frames) if a tenant has a quota."""
        return gather_pool(self.state, usages_of(self.state, self._accounts, tenants.NONE) if self._accounts else {})

    def check(self, level: int = 3) -> None:
        """Check the invariants. O(frames). Compare `references()` with your page tables for I2.

        level: 1 checks the counters, 2 also every frame, 3 also every list and index entry.
        Raises: InvariantViolation that names the law and the first frame that breaks it
        """
        check_frame_pool(self.state, level, self.policy, twins=self.twins)

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"FramePool({self.num_frames} frames, keys of {self.key_bytes} bytes: "
            f"{now.free} free, {now.mapped} referenced, {now.cached} cached)"
        )

    # -- private -------------------------------------------------------------------------------------------------------

    def _enter(self, verb: str) -> None:
        """Refuse a second owner, and a call during a guarded call of another thread. Raises: ConcurrentUse."""
        if self._owner and self._owner != get_ident():
            self._own_or_refuse(verb)
        if self._calls:
            self._succeed([get_ident()], verb)
            self._calls.pop(0, None)

    def _account(self, tenant: bytes) -> int:
        return self._accounts.get(tenant_name(tenant), 0)

    def _take_these(self, wanted: Frames, account: int) -> I32:
        row = _frame_numbers(wanted)
        code, at = batches.take_these(self._held[1], row, account)
        if code != steps.OK:
            self._refuse_take(code, len(row), account)
        if at != batches.ALL:
            self._refuse(row, at, "take", "is not free; share it, or take any frames by their count")
        if self._proves:
            self.check()
        return row.copy()

    def _refuse_count(self, wanted: int, after: int) -> NoReturn:
        whole(wanted, "wanted", 0, self.num_frames + 1)
        raise InvalidRequest(f"after is {after}; give a frame, 0 to {self.num_frames - 1}, or -1 for none")

    def _refuse_take(self, code: int, wanted: int, account: int) -> NoReturn:
        where = account if code == steps.OVER_QUOTA else wanted
        refuse_plan(self.state, (code, where), _NO_FRAMES, _NO_POSITIONS, self._accounts)

    def _refuse(self, row: I32, at: int, verb: str, why: str) -> NoReturn:
        frame = int(row[at])
        if not 0 <= frame < self.num_frames:
            why = f"is no frame of this pool; give 0 to {self.num_frames - 1}"
        elif self.state.frames["refs"][frame] == batches.MOST_REFERENCES and verb == "share":
            why = f"has {batches.MOST_REFERENCES} references, the most that a frame can have; drop some first"
        raise InvalidRequest(f"{verb} of frame {frame}, number {at} of {len(row)}: it {why}")

    def _refuse_name(self, row: I32, at: int) -> NoReturn:
        frame = int(row[at])
        why = "has no references; take it, compute its contents, then publish it"
        if 0 <= frame < self.num_frames and self.state.frames["status"][frame] == st.MAPPED:
            why = "has another key; unpublish it first"
            if frame in row[:at]:
                why = "was named before in this call; publish it once"
        self._refuse(row, at, "publish", why)


_NO_POSITIONS: I64 = np.empty(0, np.int64)
_NO_FRAMES: I32 = np.empty(0, np.int32)


def _frame_numbers(frames: Frames) -> I32:
    """int32 [n]: the frame numbers; the caller's own array if it has this form already."""
    if type(frames) is np.ndarray and frames.dtype is _INT32 and frames.ndim == 1 and frames.flags.carray:
        return cast(I32, frames)
    try:
        numbers = np.atleast_1d(np.asarray(frames))
    except ValueError:
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise InvalidRequest(f"frames are {frames!r:.60}; give a frame number, or one row of frame numbers")
    if len(numbers) and not -(2**31) <= numbers.min() <= numbers.max() < 2**31:
        raise InvalidRequest(f"a frame number is {numbers.max()}; give numbers of frames of this pool")
    return np.require(numbers, np.int32, ("C", "A", "W"))


def _token_positions(positions: Sequence[int] | npt.NDArray[np.integer], count: int) -> I64:
    """int64 [count]: the positions."""
    row = np.asarray(positions)
    if row.shape != (count,) or (count and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= 2**62)):
        raise InvalidRequest(
            f"positions of shape {list(row.shape)} and dtype {row.dtype}; give one for each of the {count} frames, "
            "0 or more"
        )
    return np.require(row, np.int64, ("C", "A", "W"))


def _key_row(keys: Keys, key_bytes: int) -> U8:
    """uint8 [n * words * 4]: the keys one after another, each filled up with zeros to whole words of 4 bytes."""
    if type(keys) is np.ndarray:
        if keys.dtype is _UINT8 and keys.ndim == 2 and keys.shape[1] == key_bytes and keys.flags.carray:
            return _filled(keys.reshape(-1), key_bytes)
        return _filled(_bytes_of(keys, key_bytes), key_bytes)
    try:
        joined, count, lengths = bytearray().join(keys), len(keys), set(map(len, keys))
        if lengths != {key_bytes} or len(joined) != count * key_bytes:  # len() may count items of several bytes
            lengths = {memoryview(key).nbytes for key in keys}
    except (TypeError, BufferError):
        raise InvalidRequest(
            f"keys are {keys!r:.60}; give a list of bytes, or an array uint8 [n, {key_bytes}]"
        ) from None
    if (count and lengths != {key_bytes}) or len(joined) != count * key_bytes:
        raise InvalidRequest(
            f"keys are of {sorted(lengths)} bytes; give keys of {key_bytes} bytes, "
            "or make the pool with another key_bytes"
        )
    return _filled(np.frombuffer(joined, np.uint8) if count else np.empty(0, np.uint8), key_bytes)


def _bytes_of(keys: npt.NDArray[Any], key_bytes: int) -> U8:
    """uint8 [n * key_bytes]: the memory of an array whose rows have so many bytes."""
    if keys.ndim not in (1, 2) or keys.dtype.kind not in "iuS" or keys.nbytes != len(keys) * key_bytes:
        raise InvalidRequest(
            f"keys of shape {list(keys.shape)} and dtype {keys.dtype}; give rows of {key_bytes} bytes, "
            f"such as uint8 [n, {key_bytes}], or a list of bytes"
        )
    return np.require(keys, requirements=("C", "A", "W")).view(np.uint8).reshape(-1)


def _filled(row: U8, key_bytes: int) -> U8:
    if key_bytes % 4 == 0:
        return row
    filled = np.zeros((len(row) // key_bytes, key_bytes + -key_bytes % 4), np.uint8)
    filled[:, :key_bytes] = row.reshape(-1, key_bytes)
    return filled.reshape(-1)
