"""figures/probe.py against counts by hand."""
import json

import probe
import pytest

from verify import Round

def test_calibration_by_hand():
    pairs = [(0.95, True), (0.91, True), (0.99, False), (0.15, False), (0.2, True)]
    found = probe.calibration_of(pairs)
    assert (found["bin 90"], found["bin 10"], found["bin 50"]) == (pytest.approx(2 / 3), 0.5, None)
    assert found["ece"] == pytest.approx(3 / 5 * abs(2 / 3 - 0.95) + 2 / 5 * abs(0.5 - 0.175))

def test_positions_by_hand():
    """Chains of 3: two accepted, none, and one that ended within its accepted tokens."""
    chain = [-1, 0, 1, 2]
    rounds = [Round([5, 6, 9], [0, 1, 2], [1, 5, 6, 7], chain),
              Round([8], [0], [9, 1, 2, 3], chain),
              Round([4], [0, 1, 2], [8, 4, 5, 6], chain)]
    assert probe.positions_of(rounds) == {"position 1": 2 / 3, "position 2": 1 / 2,
                                          "position 3": 0 / 2}

@pytest.mark.parametrize("words", [
    ["calibration", "--drafter", "glide"], ["positions", "--drafter", "maxgram"], ["costs"]])
def test_it_prints_a_table_and_writes_its_rows(tmp_path, capsys, words):
    path = tmp_path / "rows.jsonl"
    flags = ["--limit", "1", "--max-new-tokens", "12", "--json", str(path)]
    assert probe.main([*words, *flags]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(capsys.readouterr().out.splitlines())
    assert all(row["commit"] and row["command"].startswith("python figures/") for row in rows)
