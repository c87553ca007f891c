"""`pagedkv bench attention --device cuda` says what is missing where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from pagedkv.cli.app import main


@pytest.mark.parametrize(
    ("device", "told"), [("cuda", "torch finds no GPU on this machine"), ("tpu", "'tpu' is neither cpu nor cuda")]
)
def test_a_device_that_is_not_there_is_refused_with_the_remedy(
    device: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", device])
    assert ended.value.code
    assert told in capsys.readouterr().err


def test_an_axis_that_a_gpus_cells_do_not_have_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", "cuda", "--head-dim", "64", "--json"])
    assert ended.value.code
    told = capsys.readouterr().err
    assert "leave out --head-dim, --json" in " ".join(told.replace("│", " ").split())
