"""What test_sanitizers.py runs in a process of its own: `python -m tests.kernels.sanitized EXTENSION grid|break`.

`grid`: cases of every feature through each instruction set, on one and on three threads, writes and copies; results are compared with the
reference, so that a build which computes nothing does not pass. `break`: one call that reads past a tensor.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

from tests.cases import GRID, SMALL, Case, empty_layer


def load(path: str) -> None:
    """Put the sanitized extension where the installed one would be looked for."""
    spec = importlib.util.spec_from_file_location("pagedkv.kernels._cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pagedkv.kernels._cpu"] = module
    import pagedkv.kernels

    pagedkv.kernels._cpu = module  # type: ignore[attr-defined]


def grid() -> None:
    from pagedkv import copy_frames, paged_attention, write_kv
    from pagedkv.kernels import cpu
    from tests.cases import AXES
    from tests.kernels.test_write import SLOTS, batch_of

    assert cpu._cpu is not None
    assert cpu._cpu.__file__ == sys.argv[1]
    count = 0
    for isa in cpu._cpu.sets():
        os.environ["PAGEDKV_CPU_ISA"] = isa
        for i, case in enumerate([*SMALL, *GRID[::4]]):
            os.environ["PAGEDKV_NUM_THREADS"] = "3" if i % 3 == 0 else "1"
            built = case.build()
            out, lse = paged_attention(built.q, built.layer, built.batch, backend="cpu", return_lse=True, **built.options)
            rows = sum(case.q_lens)
            assert not out[:rows].isnan().any(), case
            if i % 8 == 0:
                want = paged_attention(built.q, built.layer, built.batch, backend="reference", **built.options)
                difference = (out[:rows].float() - want[:rows].float()).abs()
                assert not difference.numel() or difference.max() < 0.05 * (1 + want[:rows].float().abs().max()), case
            count += lse.numel() > 0
        for kv in AXES["kv"]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                layer = empty_layer(Case(kv=kv, layout="HND", dims=(66, 80)), 4)
                if kv.endswith("/tensor"):
                    layer.k_scale.fill_(0.5), layer.v_scale.fill_(0.75)  # type: ignore[union-attr]
                k, v = torch.randn(7, 2, 66).to(dtype), torch.randn(7, 2, 80).to(dtype)
                write_kv(k, v, layer, batch_of(SLOTS), backend="cpu")
                count += 1
        storage = torch.arange(8).repeat_interleave(37).view(8, 37).to(torch.uint8)
        copy_frames(storage, torch.tensor([[1, 2], [2, 3], [3, 1], [5, 0]], dtype=torch.int32), backend="cpu")
        assert storage[:, 0].tolist() == [5, 3, 1, 2, 4, 5, 6, 7]
    print(f"{count} calls, all of them clean")


def broken() -> None:
    from pagedkv import paged_attention

    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    os.environ["PAGEDKV_DEBUG"] = "0"
    paged_attention(built.q[:1].clone(), built.layer, built.batch, backend="cpu")  # the second sequence has no query
    print("nothing was found")


if __name__ == "__main__":
    load(sys.argv[1])
    {"grid": grid, "break": broken}[sys.argv[2]]()
