"""A plugin of pytest: the extension at SANITIZED replaces the installed one. `python -m` runs a call that breaks.

SANITIZED=PATH python -m pytest -p tests.kernels.cpu.sanitized FILE...
SANITIZED=PATH python -m tests.kernels.cpu.sanitized      reads past the end of a tensor
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pagedkv.kernels


def load(path: str) -> None:
    """Import the sanitized extension from `path` under the name of the installed one."""
    spec = importlib.util.spec_from_file_location("pagedkv.kernels._cpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pagedkv.kernels._cpu"] = pagedkv.kernels._cpu = module  # type: ignore[attr-defined]


load(os.environ["SANITIZED"])


def pytest_collection_finish() -> None:
    from pagedkv.kernels import cpu

    assert cpu._cpu.__file__ == os.environ["SANITIZED"]


def broken() -> None:
    from pagedkv import paged_attention
    from pagedkv.kernels import checks
    from tests.cases import Case

    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    os.environ["PAGEDKV_DEBUG"] = "0"
    checks._in_memory = lambda *ignored: None  # type: ignore[assignment]  # else it finds the fault before C++ does
    built.q.untyped_storage().resize_(built.q.nbytes // 2)  # the second query has a shape, and no memory
    paged_attention(built.q, built.layer, built.batch, backend="cpu")
    print("no sanitizer stopped this process")


if __name__ == "__main__":
    broken()
