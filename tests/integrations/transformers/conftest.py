"""transformers imports triton, and test_triton.py needs a triton that was imported to be interpreted."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.integrations.transformers import Patched

if not torch.cuda.is_available():
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), contextlib.suppress(ImportError):
        import triton.language  # noqa: F401


@pytest.fixture(scope="module")
def llama() -> Any:
    """Return a model for all tests of a file. Where tests change it, a fixture of this name makes one for each."""
    from tests.integrations.transformers.families import model_of

    return model_of("llama", num_hidden_layers=2)


@pytest.fixture
def patched(llama: Any) -> Iterator[Patched]:
    """Yield the `llama` of a file, patched while a test runs."""
    from pagedkv.integrations.transformers import patch

    handle = patch(llama, memory="16MiB")
    yield handle
    handle.unpatch()
