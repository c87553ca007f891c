"""An interrupt at any instruction of a call leaves a frame pool that `recover` makes whole: no leak, no broken law."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest

from pagedkv.core import FramePool
from tests.core.frame_pool.oracle import key
from tests.interrupts import Interrupter, count_instructions

pytestmark = pytest.mark.many_steps


def life(pool: FramePool) -> None:
    """Make each call that changes the pool."""
    taken = pool.take(3).tolist()
    pool.publish(taken, [key(number) for number in range(3)])
    pool.share([taken[0]])
    pool.set_quota(b"acme", hard=4)
    pool.drop([pool.take_one(tenant=b"acme")], last=True)
    pool.drop(taken[:2])
    pool.retire(3)
    pool.advance(3)
    pool.victims(2)
    pool.evict(1)
    pool.forget()


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_instruction_of_a_call_is_a_wrong_place_for_an_interrupt(step: int) -> None:
    life(FramePool(8, key_bytes=8))  # compiles what is not compiled yet
    total = count_instructions(lambda: life(FramePool(8, key_bytes=8)))
    for at in range(1, total + 1, step):
        pool = FramePool(8, key_bytes=8)
        try:
            Interrupter(at).run(lambda pool=pool: life(pool))
        except KeyboardInterrupt as why:
            where = str(why)
        try:
            pool.check()
            pool.recover(np.zeros(8, np.int64))
            pool.retire(9)
            pool.advance(9)
            pool.forget()
            pool.set_quota(b"acme", hard=8)
            pool.check()
            assert pool.take(8, tenant=b"acme").shape == (8,)
        except Exception as error:
            raise AssertionError(f"after an interrupt at {where}: {error}") from error


def test_compiled_calls_run_no_python() -> None:
    """A signal handler runs between two instructions of Python: inside of such a call there is none."""
    ran: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, arg: object) -> None:
        caller = frame.f_back
        if event == "call" and "numba" in frame.f_code.co_filename and caller and _is_ours(caller):
            ran.add((caller.f_code.co_name, frame.f_code.co_name))

    life(FramePool(8, key_bytes=8))
    pool = FramePool(8, key_bytes=8)
    pool.set_quota(b"acme", hard=4)  # the first quota packs a new State, which changes nothing yet
    sys.setprofile(look)
    try:
        life(pool)
    finally:
        sys.setprofile(None)
    assert not ran


def _is_ours(frame: FrameType) -> bool:
    return "numba" not in frame.f_code.co_filename
