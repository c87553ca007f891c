"""An error crosses processes with its sentence and its numbers: replicas raise them far from their callers."""

from __future__ import annotations

import copy
import pickle

import pytest

from pagedkv import errors

RAISED = [
    errors.PagedKVError("it failed"),
    errors.InvalidRequest("it makes no sense"),
    errors.StaleHandle("space 3 was released"),
    errors.DoubleRelease("space 3 was released twice"),
    errors.PlanConflict("a plan is outstanding"),
    errors.EngineStopped("it was closed"),
    errors.ConcurrentUse("another thread is in"),
    errors.CheckpointError("config.json is missing"),
    errors.OutOfFrames(7, 1, 2, 3),
    errors.QuotaExceeded(b"acme", 7, 6, 5, 4),
    errors.QueueFull(9, 8),
    errors.EventsLost(3, 5),
    errors.KernelUnavailable("cuda", {"cuda": ["no GPU"]}),
    errors.InvariantViolation("frame 3", law="I1", frame=3),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_whole(error: errors.PagedKVError) -> None:
    error.add_note("in replica 3")
    for again in (*(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
        with pytest.raises(type(error)):
            raise again


def test_each_kind_of_error_is_tried() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds == {type(error) for error in RAISED}
