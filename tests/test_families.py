"""Decoding with every kind of architecture of transformers: what is served is exact, the rest refused in a sentence."""
import re
from functools import lru_cache

import families
import pytest
import transformers
from conftest import ROOT

DOCS = ROOT / "docs" / "families.md"
SERVED = ("plain", "chain", "tree")
row = lru_cache(maxsize=None)(families.row)


def documented():
    """{name: [cells]} of the table, and the release that it was made with."""
    text = DOCS.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells[1:]}, re.search(r"transformers ([\d.]+\d)", text).group(1)


@pytest.mark.parametrize("name", families.default())
def test_a_family_is_decoded_exactly_or_refused_in_a_sentence(name):
    cells = row(name)
    bad = {column: says for column, says in cells.items() if says != "yes" and not says.startswith("refused: ")}
    assert not bad
    for says in cells.values():
        assert "\n" not in says and len(says) < 400


def test_forty_families_are_served():
    served = [name for name in families.default() if all(row(name).get(column) == "yes" for column in SERVED)]
    assert len(served) >= 40
    assert sum(row(name)["GLIDE"] == "yes" for name in served) >= 40
    assert sum(row(name)["EDD"] == "yes" for name in served) >= 25


def test_the_table_is_true():
    """Of the release that it was made with, it names every class; its cells are those found here."""
    table, release = documented()
    if release != transformers.__version__:
        pytest.skip(f"made with transformers {release}")
    assert {name.partition(" ")[0] for name in table} == set(families.classes())
    for name in families.default():
        found = ["yes" if says == "yes" else "no" for says in row(name).values()]
        stated = ["yes" if says == "yes" else "no" for says in table[name]]
        assert found == stated, name
    every = [says for cells in table.values() for says in cells]
    assert all(re.fullmatch(r"yes|–|no \[\d+\]", says) for says in every)
