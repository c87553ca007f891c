"""An error crosses processes with its sentence and its numbers: replicas raise them far from their callers."""

from __future__ import annotations

import pickle

import pytest

from pagedkv import errors

RAISED = [
    errors.InvalidRequest("it makes no sense"),
    errors.OutOfFrames(7, 1, 2, 3),
    errors.QuotaExceeded(b"acme", 7, 6, 5, 4),
    errors.QueueFull(9, 8),
    errors.EventsLost(3, 5),
    errors.KernelUnavailable("cuda", {"cuda": ["no GPU"]}),
    errors.InvariantViolation("frame 3", law="I1", frame=3),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_whole(error: errors.PagedKVError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    with pytest.raises(type(error)):
        raise again
