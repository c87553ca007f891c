"""The kernels for machines without a compiler: numba's, seen from Python. What they cannot do, and a call as one array of integers.

This file knows the layout of that array and nothing of how it is computed (attend_loops.py, write_loops.py). The loops are compiled at
the first call, some ten seconds once, and kept on disk beside them, or in numba's cache directory where that cannot be written.

Threads are as many as torch's (`torch.set_num_threads`) or PAGEDKV_NUM_THREADS, and they are torch's: the team of the OpenMP runtime in
this process is asked to run the compiled function (GOMP_parallel), so there is one team and none waits for another. Where no such runtime
is found, and in a fork of the process that has the team, Python threads run it: it does not hold the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor

from pagedkv.kernels import quant, reference
from pagedkv.kernels.threads import is_forked, num_threads

if TYPE_CHECKING:
    from types import ModuleType

    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.case import Case

Words = np.ndarray[Any, np.dtype[np.int64]]

KINDS: Final = {name: kind for kind, name in enumerate(quant.DTYPES)}
ROWS_AT_ONCE: Final = 64
"""Query rows of a kv head in a unit of work, unless its group alone has more. Twice as many rows of all its heads together."""
WRITE_ALONE: Final = 16
"""Tokens that one thread writes rather than wake others."""


def objections(case: Case) -> list[str]:
    """Why these kernels cannot serve `case`."""
    if find_spec("numba") is None:
        return ["numba is not installed: pip install numba"]
    if case.op in ("merge_states", "copy_frames"):
        return []
    if case.dtype not in (None, *quant.FLOATS):
        return [f"{'q' if case.op == 'paged_attention' else 'k'} is {case.dtype}; it takes {', '.join(quant.FLOATS)}"]
    return []


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse."""
    loops, threads = _attend_loops(), num_threads()
    (_, H, D), K, Dv, S = call.q.shape, call.k.shape[2], call.out.shape[2], call.k.shape[1]
    kinds = KINDS[quant.NAMES[call.q.dtype]], KINDS[quant.NAMES[call.k.dtype]]
    queries = max(1, min(call.max_seqlen_q, ROWS_AT_ONCE * K // H))
    heads = min(K, max(1, 2 * ROWS_AT_ONCE * K // (queries * H)))
    words = np.zeros(loops.WORDS, np.int64)
    pools = (
        call.q,
        call.k,
        call.v,
        call.k_scale,
        call.v_scale,
        call.block_table,
        call.rows,
        call.seq_lens,
        call.cu_seqlens_q,
    )
    _place(words, (*pools, call.sinks, call.alibi_slopes, call.tree_mask, call.out, call.lse))
    rules = (int(call.causal), call.window or 0, call.split_tokens or 0)
    words[loops.H : loops.SCALE] = (H, K, D, Dv, S, *kinds, *rules)
    words.view(np.float64)[loops.SCALE : loops.SOFTCAP + 1] = (call.scale, call.softcap)
    words[loops.B : loops.UNITS] = (call.seq_lens.shape[0], threads, queries, heads)
    units, groups, floats = loops.plan(words)
    rows = queries * heads * (H // K)
    room = 4 * (rows * (2 * (Dv + 2) + D + loops.TILE) + loops.TILE * max(D, Dv)) + 8 * 3 * loops.TILE + 64
    threads = max(1, min(threads, len(units)))
    scratch, partials = np.empty(threads * (room // 8 + 1), np.int64), np.empty(floats, np.float32)
    ends = (
        units.ctypes.data,
        len(units),
        groups.ctypes.data,
        partials.ctypes.data,
        scratch.ctypes.data,
        (room // 8 + 1) * 8,
    )
    words[loops.UNITS : loops.NEXT_UNIT] = ends
    _run(loops.attend, words, threads)


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and per-(token, head) scales."""
    loops = _write_loops()
    T, threads = call.k_new.shape[0], num_threads()
    threads = min(threads, -(-T // WRITE_ALONE)) or 1
    for new, pool, scale, angles in (
        (call.k_new, call.k, call.k_scale, call.cos),
        (call.v_new, call.v, call.v_scale, None),
    ):
        words, per_token = np.zeros(loops.WORDS, np.int64), int(scale is not None and scale.dim() == 3)
        turns = () if angles is None else (angles, call.sin, call.positions)
        _place(words, (new, pool, scale, call.slots, *turns))
        rotary = 0 if angles is None else angles.shape[1]
        kinds = KINDS[quant.NAMES[new.dtype]], KINDS[quant.NAMES[pool.dtype]]
        room = np.empty(threads * new.shape[2], np.float32)
        words[loops.W_T : loops.W_NEXT] = (
            T,
            *new.shape[1:],
            call.k.shape[1],
            *kinds,
            per_token,
            rotary,
            call.interleaved,
            room.ctypes.data,
        )
        words[loops.W_RUN] = max(WRITE_ALONE, T // (4 * threads))
        _run(loops.write, words, threads)


merge_states: Final = reference.merge_states  # torch's operations: little beside attention
copy_frames: Final = reference.copy_frames  # torch's indexing is a copy of whole rows; there is nothing to compile


def _place(words: Words, tensors: tuple[Tensor | None, ...]) -> None:
    """Four words for each tensor: its address (0: there is none) and strides in bytes; a tensor of no dims has strides 0."""
    for i, x in enumerate(tensors):
        if x is not None:
            size, words[4 * i] = x.element_size(), x.data_ptr()
            strides = x.stride()[:3]
            words[4 * i + 1 : 4 * i + 1 + len(strides)] = [stride * size for stride in strides]


def _attend_loops() -> ModuleType:
    from pagedkv.kernels.numba import attention  # numba: compiles, or loads what it compiled

    return attention


def _write_loops() -> ModuleType:
    from pagedkv.kernels.numba import write

    return write


def _run(function: Any, words: Words, threads: int) -> None:
    """`function` on `threads` threads at once, each with the same words."""
    data = ctypes.c_void_p(words.ctypes.data)
    if threads == 1:
        function.ctypes(data)
    elif not is_forked() and (parallel := _openmp()) is not None:
        parallel(ctypes.c_void_p(function.address), data, threads, 0)
    else:
        others = [threading.Thread(target=function.ctypes, args=(data,)) for _ in range(threads - 1)]
        for other in others:
            other.start()
        function.ctypes(data)
        for other in others:
            other.join()


@cache
def _openmp() -> Any:
    """GOMP_parallel (LLVM's and Intel's runtimes offer it too) where torch's calls of it go, else of any runtime in this process, or None.

    The loader binds torch's calls to the first runtime that was loaded for all to see, and only else to the one that it was linked with.
    """
    if not sys.platform.startswith("linux"):
        return None
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    names = (
        "libtorch_cpu",
        "libgomp",
        "libomp",
        "libiomp5",
    )  # a symbol is looked for in those that a library was linked with, too
    found = [path for name in names for path in sorted(libraries) if Path(path).name.startswith(name)]
    for path in (None, *found):  # None: what all see
        parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return parallel
    return None
