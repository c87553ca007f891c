"""The devices of these tests: a GPU with `-m gpu`, and the CPU with `-m slow`, on which other tests say the same."""

from __future__ import annotations

import os

import pytest
import torch

import tests.integrations.transformers.conftest  # noqa: F401  (before transformers is imported: see there)
from tests.engine.conftest import checkpoint

__all__ = ["checkpoint"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the models are made here


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device. On a GPU checks of values are off: a capture forbids them."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
        monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    return str(request.param)
