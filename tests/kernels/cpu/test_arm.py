"""Instructions of the inner loops for Arm, as a cross compiler makes them: no Arm processor is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("aarch64-linux-gnu-g++")
SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"
FLAGS = "-O3 -std=c++17 -ffp-contract=fast -fno-math-errno -w -S -x c++ - -o - -DPAGEDKV_NEON"
BFDOT = "-march=armv8.2-a+dotprod+bf16 -DPAGEDKV_NEON_BF16"
HEAD = """
#include "call.hpp"
#include <arm_neon.h>
namespace pagedkv { namespace {
#include "isa/vectors.inc"
#include "elements.inc"
#include "ahead.inc"
#include "modes.inc"
#include "linear/grouped.inc"
#include "linear/kinds.inc"
}
"""
KEYS = """void loop(const u16* q, int64_t n, const u16* const* at, const char* const* later, int64_t stride, float* s) {
    dot_products<Brain, 4, true>(q, n, Rows<u16>{at, later, stride, true}, s, 128);
}"""
VALUES = """void loop(
    float* o, const float* p, const u16* const* at, const char* const* later, int64_t stride, int64_t n) {
    Brain::add<4, Brain::steps_at_once(4), true>(o, 128, p, 128, Rows<u16>{at, later, stride, true}, 0, n);
}"""
LINEAR = """void loop(const char* w, int64_t stride, const float* x, int64_t x_stride, int64_t n, float* y) {
    vf sums[8] = {};
    for (int64_t k = 0; k < n; k++, w += 64, x += 32)
        unroll<4>(EACH(i) {
            add_step<EvenOddProducts<Dtype::bf16>, 4, 2>(w + 16 * i, stride, x + 8 * i, x_stride, sums);
        });
    totals<8>(sums, y);
}"""


def longest_loop(source: str, flags: str) -> list[str]:
    """Return the mnemonics of the innermost loop with the most instructions."""
    command = [str(COMPILER), *FLAGS.split(), *flags.split(), f"-I{SOURCES}"]
    text = subprocess.run(command, input=HEAD + source + "}", stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.strip() for line in text.splitlines()]
    places = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\d+:", line)}
    loops = []
    for i, line in enumerate(lines):
        target = re.fullmatch(r"(?:b\.?\w*|cbn?z|tbn?z)\s.*?(\.L\d+)", line)
        if target and places[target[1]] < i:
            body = lines[places[target[1]] + 1 : i + 1]
            if not any(re.fullmatch(r"\.L\d+:", inner) for inner in body):
                loops.append([inner.split()[0] for inner in body if not inner.startswith(".")])
    return max(loops, key=len)


@pytest.mark.skipif(not COMPILER, reason="no aarch64-linux-gnu-g++ here: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.parametrize(
    ("source", "flags", "product", "limit"),
    [
        pytest.param(KEYS, BFDOT, "bfdot", 20, id="8 dims, 2 keys, 4 rows"),
        pytest.param(VALUES, BFDOT, "bfdot", 26, id="8 dims, 2 values, 4 rows"),
        pytest.param(LINEAR, "", "fmla", 38, id="8 columns, 4 rows, 2 tokens, without BFDOT"),
    ],
)
def test_loops_over_bfloat16_have_few_instructions(source: str, flags: str, product: str, limit: int) -> None:
    """A limit is for 64 products: 8 BFDOT of 8, or 16 FMLA of 4."""
    loop = longest_loop(source, flags)
    products = loop.count(product) * (8 if product == "bfdot" else 4)
    assert products >= 64
    assert len(loop) / (products / 64) <= limit, loop
