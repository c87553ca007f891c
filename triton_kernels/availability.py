"""The reasons why the Triton kernels cannot be imported on this machine. This file imports no Triton."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagedkv.kernels.case import Case


def objections(case: Case) -> list[str]:
    """Return all reasons why these kernels cannot serve `case`.

    The reasons are those of the machine; if the machine has everything, those of backend.py.
    """
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed: pip install 'pagedkv[triton]' (Linux)"]
    if case.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ["it runs on GPUs; on the CPU only Triton's interpreter can run it, for tests: set TRITON_INTERPRET=1"]
    if case.device == "cuda" and not torch.cuda.is_available():
        return ["torch finds no GPU on this machine"]
    return list(importlib.import_module("pagedkv.kernels.triton.backend").objections(case))
