"""`pagedkv bench attention --device cuda`: refusals, and where its lines and its JSON go."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pagedkv.bench.gpu import attention
from pagedkv.cli.app import main


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--device", "cuda"), "torch finds no GPU on this machine"),
        (("--device", "tpu"), "'tpu' is neither cpu nor cuda"),
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


def test_json_is_one_list_and_the_lines_go_to_stderr(command, monkeypatch, tmp_path):
    row = {"case": str(attention.BASE), "who": "triton", "us": 50.0, "GB_per_s": 4000.0, "of_ceiling": 0.9}
    row["cell"] = dataclasses.asdict(attention.BASE)
    monkeypatch.setattr(attention, "require_gpu", lambda: None)
    monkeypatch.setattr(attention, "provenance", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(attention, "QUICK", ((attention.BASE,),))
    monkeypatch.setattr(attention, "measure", lambda *_: [dict(row)])
    options = ("--device", "cuda", "--json", "--record", tmp_path / "rows.jsonl")
    status, out, err = command("bench", "attention", *options)
    assert status == 0, err
    assert json.loads(out) == [row | {"gpu": "a GPU"}]
    assert "triton 50.0 us, 0.90" in err
