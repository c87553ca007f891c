"""`pagedkv bench attention --device cuda`: refusals, and where its lines and its JSON go."""

from __future__ import annotations

import pytest
import torch

from pagedkv.cli.app import main


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--device", "cuda"), "torch finds no GPU on this machine"),
        (("--device", "tpu"), "--device is 'tpu'; give cpu or cuda"),
        (("--device", "cuda", "--head-dim", "64", "--batch", "2"), "leave out --head-dim, --batch"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_remedy(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if options == ("--device", "cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", *options])
    assert ended.value.code
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())
