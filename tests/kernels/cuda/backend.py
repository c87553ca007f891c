"""The backend `cuda` on the emulator, as a module of the registry: csrc/cuda runs on the host, behind the Python code
of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.kernels import registry
from pagedkv.kernels.args import AttentionCall, WriteCall
from pagedkv.kernels.cuda import backend
from tests.kernels.cuda.emulator import Emulator

if TYPE_CHECKING:
    from torch import Tensor

machine = Emulator()
KERNEL = registry.Kernel("cuda-emulated", ("cpu",), __name__, backend.case_objections)


def paged_attention(call: AttentionCall) -> None:
    machine.attend(call)


def write_kv(call: WriteCall) -> None:
    machine.write_kv(call)


gather_kv = backend.gather_kv


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return machine.merge_states(out_a, lse_a, out_b, lse_b)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    machine.copy_frames(storage, copies)
