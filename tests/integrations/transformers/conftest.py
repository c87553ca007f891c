"""transformers imports triton, and test_triton.py needs a triton that was imported to be interpreted."""

from __future__ import annotations

import contextlib
import os
from unittest.mock import patch

import torch

if not torch.cuda.is_available():
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), contextlib.suppress(ImportError):
        import triton.language  # noqa: F401
