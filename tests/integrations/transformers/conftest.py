"""Models and pools that the tests of the plug-in share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.integrations.transformers import Patched


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
