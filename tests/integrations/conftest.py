"""transformers and torch import triton, and test_triton.py needs a triton that was imported to be interpreted."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import torch

if not torch.cuda.is_available():
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), contextlib.suppress(ImportError):
        import triton.language  # noqa: F401
