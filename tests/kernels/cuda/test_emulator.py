"""The emulator computes what a GPU computes, and faults where CUDA leaves behaviour undefined. A kernel of a few lines
tests each promise of csrc/simt/simt.hpp."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.kernels.cuda.emulator import COMPILER, FLAGS, compiled, runtime, texts

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")

# Small kernels, compiled once, as one translation unit. `in` and `out` are arrays of floats, `lane` is the thread.
KERNELS = {
    "reverse": """ptx::shared_write(4 * lane, p->in[lane]); ptx::sync_block();
        ptx::write(p->out + lane, ptx::shared_read<float>(4 * (63 - lane)));""",
    "no_barrier": """ptx::shared_write(4 * lane, p->in[lane]);
        ptx::write(p->out + lane, ptx::shared_read<float>(4 * (63 - lane)));""",
    "warp_barrier_for_block": """ptx::shared_write(4 * lane, 1.0f); ptx::sync_warp();
        ptx::shared_read<float>(4 * (63 - lane));""",
    "write_after_read": """ptx::shared_write(4 * lane, 1.0f); ptx::sync_block();
        ptx::shared_read<float>(4 * (63 - lane)); ptx::shared_write(4 * lane, 2.0f);""",
    "write_after_write": "ptx::shared_write(0, 1.0f);",
    "never_written": "ptx::shared_read<float>(4 * lane);",
    "past_the_end": "ptx::shared_write(4 * (lane + 1000), 1.0f);",
    "odd_address": "ptx::shared_write(4 * lane + 2, 1.0f);",
    "one_thread_leaves": "if (lane < 63) ptx::sync_block();",
    "half_a_warp_shuffles": "if (lane % 2) ptx::shuffle(1.0f, 0);",
    "lanes_disagree": "if (lane % 2) ptx::shuffle(1.0f, 0); else ptx::ballot(true);",
    "wild_read": "ptx::read(p->in + 64 + lane);",
    "wild_write": "ptx::write(p->out - 1 - static_cast<int>(lane), 0.0f);",
    "copies": """ptx::copy_async<4>(4 * lane, p->in + lane, lane % 3 != 0); ptx::copy_commit(); ptx::copy_wait<0>();
        ptx::sync_block();
        ptx::write(p->out + lane, ptx::shared_read<float>(4 * (63 - lane)));""",
    "copy_not_waited_for": """ptx::copy_async<4>(4 * lane, p->in + lane, true); ptx::copy_commit();
        ptx::shared_read<float>(4 * lane);""",
    "copy_waits_for_too_few": """ptx::copy_async<4>(4 * lane, p->in + lane, true); ptx::copy_commit();
        ptx::copy_wait<1>(); ptx::shared_read<float>(4 * lane);""",
    "copy_of_another": """ptx::copy_async<4>(4 * lane, p->in + lane, true); ptx::copy_commit(); ptx::copy_wait<0>();
        ptx::shared_read<float>(4 * (lane ^ 1));""",
    "copy_from_nowhere": "ptx::copy_async<4>(4 * lane, p->in + 64, true);",
    "copy_of_nothing_reads_nothing": """ptx::copy_async<4>(4 * lane, p->in + 9999, false); ptx::copy_commit();
        ptx::copy_wait<0>(); ptx::write(p->out + lane, ptx::shared_read<float>(4 * lane));""",
    "copy_left_behind": "ptx::copy_async<4>(4 * lane, p->in + lane, true); ptx::copy_commit();",
    "shuffles": """const float x = p->in[lane];
        ptx::write(p->out + lane, ptx::shuffle_xor(x, 5) + ptx::shuffle(x, 3) + ptx::shuffle_up(x, 1));""",
    "votes": "ptx::write(p->out + lane, static_cast<float>(ptx::ballot(p->in[lane] > 0.0f) & 0xffffffu));",
    "teams": """ptx::shared_write(4 * lane, p->in[lane]); ptx::sync_team(1 + lane / 32, 32);
        ptx::write(p->out + lane, ptx::shared_read<float>(4 * (lane ^ 31)));""",
    "counts": """const u64 count = ptx::count_up(reinterpret_cast<u64*>(p->out) + 32, 1000) - 1001;
        ptx::write(p->out + lane, static_cast<float>(count));""",
    "matrices": """u32 m[4], t[4]; for (int i = 0; i < 4;
            ++i) ptx::shared_write(16 * lane + 4 * i, lane * 8u + 2 * i | (lane * 8u + 2 * i + 1) << 16);
        ptx::sync_warp(); ptx::load_matrices(m, 16 * lane); ptx::load_matrices_transposed(t, 16 * lane);
        for (int i = 0; i < 4; ++i) {
            ptx::write(p->out + lane * 4 + i, static_cast<float>(m[i] & 0xffff));
            ptx::write(p->out + 256 + lane * 4 + i, static_cast<float>(t[i] >> 16));
        }""",
    "product": """float d[4] = {1, 2, 3, 4}; u32 a[4], b[2]; const auto* x = reinterpret_cast<const u32*>(p->in);
        for (int i = 0; i < 4; ++i) a[i] = x[(lane / 4 + 8 * (i % 2)) * 8 + lane % 4 + 4 * (i / 2)];
        for (int i = 0; i < 2; ++i) b[i] = x[128 + lane / 4 * 8 + lane % 4 + 4 * i];
        ptx::multiply_add<HALF>(d, a, b[0], b[1]);
        for (int i = 0; i < 4; ++i) p->out[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = d[i];""",
}
FAULTS = {
    "no_barrier": "that no thread has written|without a barrier after the write",
    "warp_barrier_for_block": "that no thread has written|without a barrier after the write",
    "write_after_read": "without a barrier after the (read|write) by",
    "write_after_write": "writes without a barrier after the write by",
    "never_written": "reads shared memory that no thread has written",
    "past_the_end": "shared memory at .*; the block has 1024 bytes",
    "odd_address": "no multiple",
    "one_thread_leaves": "no thread can run: thread .* waits for barrier 0.* 1 threads have ended",
    "half_a_warp_shuffles": "not in the mask|no thread can run: .*waits for shuffle",
    "lanes_disagree": "while other lanes of its warp are at",
    "wild_read": "reads 4 bytes of global memory outside of every allocation",
    "wild_write": "writes 4 bytes of global memory outside of every allocation",
    "copy_not_waited_for": "asynchronous copy that has not landed",
    "copy_waits_for_too_few": "asynchronous copy that has not landed",
    "copy_of_another": "that has not landed|without a barrier after the write by|that no thread has written",
    "copy_from_nowhere": "copies 4 bytes of global memory outside",
    "copy_left_behind": "ends with asynchronous copies that it has not waited for",
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    bodies = "".join(
        f"""
        extern "C" void {name}(const void* given) {{
            [[maybe_unused]] const auto* p = static_cast<const Arrays*>(given);
            [[maybe_unused]] const u32 lane = ptx::thread_index();
            {body}
        }}"""
        for name, body in KERNELS.items()
        if name != "product"
    )
    for half in (0, 1):
        body = KERNELS["product"].replace("HALF", str(half))
        bodies += (
            f'extern "C" void product{half}(const void* given) {{ const auto* p = static_cast<const Arrays*>(given);'
        )
        bodies += f"const u32 lane = ptx::thread_index() % 32; if (ptx::thread_index() < 32) {{ {body} }} }}\n"
    text = f'#include "ptx.cuh"\nstruct Arrays {{ float* in; float* out; }};{bodies}'
    sources = texts("simt", ".hpp") | {"ptx.cuh": texts("cuda", ".cuh")["ptx.cuh"], "probes.cpp": text}
    flags = (*FLAGS, "-Wno-parentheses", "-Wno-unused-value", "-DSIMT_HOST", "-shared")
    library = ctypes.CDLL(str(compiled("probes", sources, flags, runtime())))
    library.simt_launch.restype = ctypes.c_char_p
    library.simt_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint32] * 3, ctypes.c_uint64]
    library.simt_allow.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library


class Arrays(ctypes.Structure):
    _fields_ = (("given", ctypes.c_void_p), ("out", ctypes.c_void_p))


def run(
    library: ctypes.CDLL, name: str, given: torch.Tensor, out: torch.Tensor, seed: int = 1, blocks: int = 1
) -> str | None:
    library.simt_forbid_all()
    for tensor in (given, out):
        library.simt_allow(tensor.data_ptr(), tensor.nbytes)
    arrays = Arrays(given.data_ptr(), out.data_ptr())
    kernel = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    fault = library.simt_launch(kernel, ctypes.byref(arrays), blocks, 64, 1024, seed)
    return fault.decode() if fault else None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_undefined_behaviour_is_a_fault_in_any_order_of_threads(name: str, seed: int, library: ctypes.CDLL) -> None:
    fault = run(library, name, torch.ones(64), torch.zeros(64), seed)
    assert fault is not None
    with pytest.raises(AssertionError, match=FAULTS[name]):
        raise AssertionError(fault)


def test_a_fault_leaves_the_emulator_usable(library: ctypes.CDLL) -> None:
    given, out = torch.arange(64.0), torch.zeros(64)
    assert run(library, "no_barrier", given, out)
    assert run(library, "reverse", given, out) is None
    assert out.equal(given.flip(0))


def test_copies_land_and_absent_ones_bring_zeros(library: ctypes.CDLL) -> None:
    given, out = torch.arange(64.0) + 1, torch.zeros(64)
    assert run(library, "copies", given, out) is None
    assert out.flip(0).equal(torch.where(torch.arange(64) % 3 == 0, 0.0, given))
    assert run(library, "copy_of_nothing_reads_nothing", given, out) is None
    assert not out.any()


def test_lanes_exchange_as_the_manual_says(library: ctypes.CDLL) -> None:
    given, out, lane = torch.randn(64), torch.zeros(64), torch.arange(64)
    assert run(library, "shuffles", given, out) is None
    left = torch.where(lane % 32 == 0, given, given[(lane - 1) % 64])
    assert out.equal(given[lane // 32 * 32 + (lane % 32 ^ 5)] + given[lane // 32 * 32 + 3] + left)
    assert run(library, "votes", given, out) is None
    votes = [sum(int(given[32 * w + i] > 0) << i for i in range(24)) for w in range(2)]
    assert out.tolist() == [float(v) for v in votes for _ in range(32)]
    assert run(library, "teams", given, out) is None
    assert out.equal(given[lane ^ 31])


def test_every_block_counts_once_and_orders_differ(library: ctypes.CDLL) -> None:
    orders = set()
    for seed in range(4):
        out = torch.zeros(66)
        assert run(library, "counts", torch.zeros(1), out, seed, blocks=3) is None
        assert out[64:].view(torch.int64).item() == 1000 + 192
        orders.add(tuple(out[:64].tolist()))
    assert len(orders) == 4


def test_matrices_are_distributed_to_lanes_as_the_manual_says(library: ctypes.CDLL) -> None:
    out = torch.zeros(512)
    assert run(library, "matrices", torch.zeros(1), out) is None
    for warp in range(2):
        for lane in range(32):
            for matrix in range(4):
                row, column = 32 * warp + 8 * matrix + lane // 4, 2 * (lane % 4)
                assert out[(32 * warp + lane) * 4 + matrix] == row * 8 + column
                row, column = 32 * warp + 8 * matrix + 2 * (lane % 4) + 1, lane // 4
                assert out[256 + (32 * warp + lane) * 4 + matrix] == row * 8 + column


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_fragments_is_the_product_of_matrices(dtype: torch.dtype, library: ctypes.CDLL) -> None:
    a, b, out = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.zeros(16, 8)
    given = torch.cat([a.flatten(), b.T.flatten()])  # a row by row, b column by column: pairs along k are words
    assert run(library, f"product{int(dtype == torch.float16)}", given, out) is None
    lane = torch.arange(32)
    start = torch.zeros(16, 8)
    for i in range(4):
        start[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = float(i + 1)
    np.testing.assert_allclose(out, a.float() @ b.float() + start, rtol=1e-5, atol=1e-5)
