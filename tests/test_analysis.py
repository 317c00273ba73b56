"""figures/probe.py against counts by hand."""
import probe
import pytest
from helpers import rows_of

def test_calibration_by_hand():
    pairs = [(0.95, True), (0.91, True), (0.99, False), (0.15, False), (0.2, True)]
    found = probe.calibration_of(pairs)
    assert (found["bin 90"], found["bin 10"], found["bin 50"]) == (pytest.approx(2 / 3), 0.5, None)
    assert found["ece"] == pytest.approx(3 / 5 * abs(2 / 3 - 0.95) + 2 / 5 * abs(0.5 - 0.175))

@pytest.mark.parametrize("words", ["calibration --drafter glide", "costs"])
def test_it_writes_its_rows(tmp_path, monkeypatch, words):
    monkeypatch.setattr(probe, "REPEATS", 1)
    flags = f"{words} --limit 1 --max-new-tokens 12 --json {tmp_path}/rows.jsonl"
    assert probe.main(flags.split()) == 0
    assert all(row["drafter"] and row["commit"] for row in rows_of(tmp_path / "rows.jsonl"))
