"""`pagedkv bench attention --device cuda` without a GPU fails with a remedy."""

from __future__ import annotations

import pytest
import torch

from pagedkv.cli.app import main


@pytest.mark.parametrize(
    ("device", "text"), [("cuda", "torch finds no GPU on this machine"), ("tpu", "'tpu' is neither cpu nor cuda")]
)
def test_a_device_that_is_not_there_is_refused_with_the_remedy(
    device: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", device])
    assert ended.value.code
    assert text in capsys.readouterr().err


def test_an_axis_that_gpu_cells_lack_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", "cuda", "--head-dim", "64", "--json"])
    assert ended.value.code
    err = capsys.readouterr().err
    assert "leave out --head-dim, --json" in " ".join(err.replace("│", " ").split())
