"""The numba backend, seen from Python: kernels for machines without a compiler.

This file knows what the kernels refuse, and turns a call into one int64 array. It knows nothing of the arithmetic:
attention.py and write.py hold the loops and the layouts of the array. They are imported at the first call,
with numba. They are compiled then, which takes some ten seconds once; the machine code is kept on disk
(machine_code.py).

The number of threads is torch's (`torch.set_num_threads`) or PAGEDKV_NUM_THREADS. The threads are torch's too: the
OpenMP runtime of this process runs the compiled function on its team (GOMP_parallel), so there is one team, and no
thread of another team competes with it for the cores. Without such a runtime, and in a fork of the process that has the
team, Python threads run the function: it does not hold the interpreter's lock.
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

from pagedkv.kernels import checks, quant, reference
from pagedkv.kernels.layout import bounds
from pagedkv.kernels.threads import is_forked, num_threads

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall, WriteCall
    from pagedkv.kernels.case import Case

Words = np.ndarray[Any, np.dtype[np.int64]]
"""A call, as the loops read it."""

ROWS_AT_ONCE: Final = 64
"""The most rows (queries times G) of one kv head in a unit of work, unless G is larger; of all its heads twice that."""
WRITE_ALONE: Final = 16
"""Tokens of a write for which it is not worth waking another thread."""


def objections(case: Case) -> list[str]:
    """Return the reasons why these kernels cannot serve `case`."""
    if find_spec("numba") is None:
        return ["numba is not installed: pip install numba"]
    return [] if case.op in ("merge_states", "copy_frames", "gather_kv") else case.not_a_float()


def paged_attention(call: AttentionCall) -> None:
    """Attend. Modifies: call.out, call.lse. Raises: InvalidRequest for tables that name what is not there."""
    from pagedkv.kernels.numba import attention

    threads = num_threads()
    (_, H, D), K, Dv, S = call.q.shape, call.k.shape[2], call.out.shape[2], call.k.shape[1]
    queries = max(1, min(call.max_seqlen_q, ROWS_AT_ONCE * K // H))
    heads = min(K, max(1, 2 * ROWS_AT_ONCE * K // (queries * H)))
    words = np.zeros(attention.WORDS, np.int64)
    pool = (call.k, call.v, call.k_scale, call.v_scale)
    tables = (call.block_table, call.rows, call.seq_lens, call.cu_seqlens_q)
    options = (call.sinks, call.alibi_slopes, call.tree_mask, call.causal_of)
    _put_tensors(words, (call.q, *pool, *tables, *options, call.out, call.lse, call.calibration))
    words[attention.H : attention.S + 1] = (H, K, D, Dv, S)
    scales = (0 if scale is None else quant.number_of(scale) for scale in pool[2:])
    kinds = (quant.number_of(call.q), quant.number_of(call.k), quant.number_of(call.v, True), *scales)
    words[attention.Q_KIND : attention.V_SCALE_KIND + 1] = kinds
    words[attention.CAUSAL : attention.SPLIT_TOKENS + 1] = (
        call.causal,
        *bounds(call.window, call.right),
        call.split_tokens or 0,
    )
    words.view(np.float64)[attention.SCALE : attention.SOFTCAP + 1] = (call.scale, call.softcap)
    words[attention.B : attention.UNIT_HEADS + 1] = (call.seq_lens.shape[0], threads, queries, heads)
    ends = (call.q.shape[0], call.k.shape[0], *call.block_table.shape, call.max_seqlen_q, call.max_seqlen_k)
    words[attention.NUM_TOKENS : attention.MOST_KEYS + 1] = ends
    if not attention.is_in_bounds(words):
        checks.table_values(call)
    units, groups, num_floats = attention.partition(words)
    threads = max(1, min(threads, len(units)))
    scratch = np.empty((threads, attention.scratch_words(queries * heads * (H // K), D, Dv)), np.int64)
    partials = np.empty(num_floats, np.float32)
    memory = (groups.ctypes.data, partials.ctypes.data, scratch.ctypes.data, scratch.strides[0])
    words[attention.UNITS : attention.SCRATCH_BYTES + 1] = (units.ctypes.data, len(units), *memory)
    _run(attention.attend, words, threads)


def write_kv(call: WriteCall) -> None:
    """Store each new token's K and V at its slot. Modifies: call.k, call.v, and scales per (token, head).

    Raises: InvalidRequest for slots and positions that are not there
    """
    from pagedkv.kernels.numba import write

    T = call.k_new.shape[0]
    threads = min(num_threads(), -(-T // WRITE_ALONE)) or 1
    keys = (call.k_new, call.k, call.k_scale, call.calibration, call.cos)
    values = (call.v_new, call.v, call.v_scale, None, None)
    num_slots = call.k.shape[0] * call.k.shape[1]
    for new, pool, scale, calibration, cos in (keys, values) if call.v_new.shape[2] else (keys,):
        words = np.zeros(write.WORDS, np.int64)
        rope = () if cos is None else (cos, call.sin, call.positions)
        _put_tensors(words, (new, pool, scale, call.slots, calibration, *rope))
        words[write.T : write.S + 1] = (T, *new.shape[1:], pool.shape[1])
        is_per_token = scale is not None and scale.dim() == 3
        kinds = quant.number_of(new), quant.number_of(pool, pool is call.v)
        words[write.NEW_KIND : write.ROTATED + 1] = (*kinds, is_per_token, quant.is_rotated(call.v))
        words[write.ROTARY : write.INTERLEAVED + 1] = (0 if cos is None else cos.shape[1], call.interleaved)
        scratch = np.empty((threads, new.shape[2]), np.float32)
        words[write.SCRATCH : write.RUN + 1] = (scratch.ctypes.data, max(WRITE_ALONE, T // (4 * threads)))
        words[write.NUM_SLOTS : write.NUM_ANGLES + 1] = (num_slots, 0 if cos is None else cos.shape[0])
        if new is call.k_new and not write.is_in_bounds(words):
            checks.slot_values(call)
        _run(write.write, words, threads)


gather_kv: Final = reference.gather_kv  # torch's indexing copies whole rows already
merge_states: Final = reference.merge_states  # torch's operations cost little beside attention
copy_frames: Final = reference.copy_frames


def _put_tensors(words: Words, tensors: tuple[Tensor | None, ...]) -> None:
    """Put each tensor into four words: its address, and the strides in bytes of its first three dims.

    The words of None, and of dims that a tensor lacks, stay 0. Modifies: words.
    """
    for i, x in enumerate(tensors):
        if x is not None:
            size, words[4 * i] = x.element_size(), x.data_ptr()
            strides = x.stride()[:3]
            words[4 * i + 1 : 4 * i + 1 + len(strides)] = [stride * size for stride in strides]


def _run(function: Any, words: Words, threads: int) -> None:
    """Call `function` with the address of `words` on `threads` threads at once, and wait for all of them."""
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
    """Return the GOMP_parallel that torch calls, else that of any OpenMP runtime in this process, or None.

    LLVM's and Intel's runtimes offer GOMP_parallel too. The loader binds torch's calls to the first runtime with global
    symbols (RTLD_GLOBAL); if there is none, to the runtime that torch was linked with.
    """
    if not sys.platform.startswith("linux"):
        return None
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    # A look-up in libtorch_cpu also searches the libraries that libtorch_cpu was linked with.
    names = ("libtorch_cpu", "libgomp", "libomp", "libiomp5")
    found = [path for name in names for path in sorted(libraries) if Path(path).name.startswith(name)]
    for path in (None, *found):  # None: the global symbols of this process
        parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return parallel
    return None
