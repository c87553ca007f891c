"""Whether the Triton kernels can be imported on this machine at all. The registry asks here first; this file imports no Triton."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagedkv.kernels.case import Case


def objections(case: Case) -> list[str]:
    """Return all reasons why these kernels cannot serve `case`: what the machine lacks, or else what backend.py objects to."""
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed: pip install 'pagedkv[triton]' (Linux)"]
    if case.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ["it runs on GPUs; on the CPU only Triton's interpreter can, for tests: TRITON_INTERPRET=1"]
    if case.device == "cuda" and not torch.cuda.is_available():
        return ["torch finds no GPU on this machine"]
    return list(importlib.import_module("pagedkv.kernels.triton.backend").objections(case))
