"""A short list of words to draft: fewer products, the same output, and no word beyond the list."""
import copy
import json
import shutil

import pytest
import torch
from conftest import VOCAB, plain, random_drafter, shared
from test_bench import args, check_mistake, rows_of, small  # noqa: F401

import bench
import glide
import pct
import verify
from beyond.longspec import LongSpec
from beyond.words import shorten
from training import smollm2
from runtime import load

PROMPT, NEW = [3, 1, 4, 1, 5], 8
WORDS = [7, 2, 5, 3]

@pytest.mark.parametrize("name", ["glide", "edd", "eagle", "medusa", "longspec"])
def test_words_alone_are_drafted_and_the_output_stays(name):
    model = shared("llama")
    text = plain(model, PROMPT, NEW)
    alone = name == "longspec"                         # as it stands in a project of its own
    drafter = glide.Drafter(LongSpec.beside(model, LongSpec.config_class.for_target(model), 64).double()) if alone else random_drafter(model, name)
    whole = copy.deepcopy(drafter)
    head_rows = sum(p.shape[0] == VOCAB for p in drafter.model.parameters())
    shorten(drafter.model, WORDS)
    assert sum(p.shape[0] == VOCAB for p in drafter.model.parameters()) < max(head_rows, 1)
    seen = []

    def compared(tokens, parents):
        """Of the words as before, of all others -inf."""
        logits, before = expand(tokens, parents), whole.expand(tokens, parents)
        others = [token for token in range(VOCAB) if token not in WORDS]
        torch.testing.assert_close(logits[:, WORDS], before[:, WORDS])
        assert logits[:, others].isneginf().all()
        seen.append(len(parents))
        return logits

    begin, keep, reset, expand = drafter.begin, drafter.keep, drafter.reset, drafter.expand
    drafter.begin = lambda view: (begin(view), whole.begin(view))
    drafter.keep = lambda path: (keep(path), whole.keep(path))
    drafter.reset = lambda: (reset(), whole.reset())
    drafter.expand = compared
    out = verify.generate(verify.Target(model), drafter, pct.pct, PROMPT, NEW)
    assert out.tokens == text and seen
    for a_round in out.rounds:
        assert set(a_round.tokens[1:]) <= set(WORDS)

# ---------------------------------------------------------------- the command line
def test_glide_of_so_many_words(small, tmp_path, capsys):  # noqa: F811
    """The list is counted from text, answers alone of what was written; then it is named by its length."""
    shutil.copytree(small / "drafters", tmp_path / "drafters")
    path = tmp_path / "drafters" / "words.json"
    rows = [{"prompt": [9] * 9, "answer": [5, 5, 5, 7]}, {"ids": [7, 8]}, {"ids": [11] * 5, "held_out": True}]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["words", "--data", str(tmp_path / "text.jsonl"), "--target", str(small / "model"), "--out", str(path), "--most", "40"]
    assert smollm2.main(command) == 0
    _, tokenizer = load.load_target(small / "model", "float32", "cpu")
    words = json.loads(path.read_text())["words"]
    assert words[:4] == [tokenizer.eos_token_id, 5, 7, 8] and len(set(words)) == 40

    argv = args(small, "--checkpoint", str(tmp_path / "drafters"))
    few = ["--tree", "cape", "--limit", "1", "--max-new-tokens", "4"]
    assert bench.main([*argv, *few, "--drafter", "glide(words=30)", "--json", str(tmp_path / "rows.jsonl")]) == 0
    capsys.readouterr()
    drafted = [row for row in rows_of(tmp_path / "rows.jsonl") if row["tree"]]
    assert {row["drafter"] for row in drafted} == {"glide(words=30)"} and all(row["lossless"] for row in drafted)
    for given, words in (("41", "has 40 words"), ("-1", "give how many")):
        check_mistake([*argv, "--drafter", f"glide(words={given})"], words, capsys)
    its = load.vocabulary_fingerprint(tokenizer)
    for text, words in (("[]", "holds no list"), ('{"vocabulary": "0", "words": [1]}', "of another vocabulary"),
                        (json.dumps({"vocabulary": its, "words": ["a"]}), "holds no list"), (json.dumps({"vocabulary": its, "words": [999]}), "and no 999")):
        path.write_text(text)
        check_mistake([*argv, "--drafter", "glide(words=1)"], words, capsys)
    path.unlink()
    check_mistake([*argv, "--drafter", "glide(words=1)"], "there is no", capsys)

def test_so_many_questions_of_each_file(tmp_path):
    files = {"mt": [{"turns": ["a", "b"]}, {"turns": ["c", "d"]}, {"turns": ["e", "f"]}], "news": [{"turns": [x], "held_out": x in "hj"} for x in "ghijk"]}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["prompts", "--data", *map(str, tmp_path.iterdir()), "--out", str(tmp_path / "out"), "--most"]
    for more, expected in ((["3"], ["ab", "cd", "g", "i", "k"]), (["1", "--held-out"], ["ab", "h"])):
        assert smollm2.main([*command, *more]) == 0
        assert sorted("".join(row["turns"]) for row in map(json.loads, (tmp_path / "out").read_text().splitlines())) == expected
