"""The gate of KV kinds on models that other people trained, with outliers planted in their keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.kv_quality import calibration_of, kv_quality
from pagedkv.kv_gate import CALIBRATED, Gate
from tests.models.outliers import plant
from tests.models.test_models import STUDY, folder, loaded  # noqa: F401


@pytest.mark.models
def test_planted_outliers_cost_three_times_with_a_calibration_and_are_refused_without(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, model = loaded(folder)
    plant(model)
    model.save_pretrained(tmp_path)
    del model
    decoder, gate = Decoder.load(tmp_path, dtype="float32"), Gate()
    ids, others = gate.token_ids(Tokenizer.load(folder).encode, 1 << 20, None)
    plain, calibrated = (
        kv_quality(decoder, ids, CALIBRATED, given) for given in (None, calibration_of(decoder, others))
    )
    with capsys.disabled():
        print(f"\n{folder.name}, planted\n{gate.table(plain)}\ncalibrated\n{gate.table(calibrated)}")
    assert gate.choose(plain) is None
    for kind in CALIBRATED:
        assert calibrated[kind].kl <= 3 * STUDY[folder.name][kind]
    assert gate.choose(calibrated) in CALIBRATED
