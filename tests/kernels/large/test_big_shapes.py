"""On a real GPU, shapes that small cases do not have: deep pipelines with several pieces, 32k keys, peaked softmax.

`python -m pagedkv.bench.gpu.race` is the same as a stage of `make gpu`, in one process and with one line for each cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv.bench.gpu import timing

if TYPE_CHECKING:
    from pagedkv.bench.gpu import race

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def stage() -> object:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    from pagedkv.bench.gpu import race

    return race


@pytest.mark.parametrize("cell", range(12))
@pytest.mark.parametrize("peak", [1.0, 5.0])
def test_no_bit_moves_beside_a_busy_stream_and_errors_are_those_of_the_contract(
    stage: race, cell: int, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 replays of a captured call give the bits of the first; the variants of `cuda` give equal bits."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")  # checks of values read them back, which a capture forbids
    assert len(stage.CELLS) == 12
    backends = sorted(timing.served(), key=lambda name: (name != "cuda", name))
    pool = stage.GpuPool(stage.CELLS[cell])
    verdicts = list(stage.judge(pool, backends, peak))
    torch.cuda.empty_cache()
    assert all(verdict.is_good for verdict in verdicts), "\n".join(map(str, verdicts))
    assert any(not verdict.why for verdict in verdicts)
