"""The stand-in's text: retellings change what they say they change, what is held out stays out."""
import json

import pytest

from checkpoints import make
from checkpoints import stories as stories_of
from data import corpus, files, read

def dump(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

CHILD = ("Once upon a time, a boy named {} had a red ball. {} liked the ball. He took it to the park and "
         "threw it up.\nA girl named Anna saw it. Anna said, \"Give me the ball, please!\" {} said, \"Here it "
         "is, Anna.\"\nThey played all day. Then they went home. They were good friends, number {}.")

@pytest.fixture
def made_up(tmp_path):
    """Flags that name files of made-up stories, sampled ones and problems."""
    names = [name for name in corpus.NAMES["boy"] if name != "Sam"]
    stories = [{"text": CHILD.format(*[names[i % 40]] * 3, i)} for i in range(100)]
    problems = [{"question": f"q{i}", "answer": "2 + 2 = <<2+2=4>>4"} for i in range(300)]
    flags = []
    for flag, rows in (("stories", stories), ("sampled", stories[::-1]), ("math", problems)):
        flags += [f"--{flag}", str(dump(tmp_path / f"{flag}.jsonl", rows))]
    return flags

def test_the_corpus_on_disk(made_up, tmp_path):
    """Both parts; the last fiftieth is held out, retellings with their stories; shares as in the table."""
    out = tmp_path / "corpus"
    assert make.main(["corpus", "--out", str(out), *made_up]) == 0
    for folder, name in ((out, "stories"), (tmp_path / "corpus-first", "sampled")):
        assert {p.stem for p in folder.iterdir()} == {name, "retell", "math"}
        stories, retell, math = (read.read_rows(folder / f"{x}.jsonl") for x in (name, "retell", "math"))
        assert [row["held_out"] for row in math] == [False] * 294 + [True] * 6
        assert math[7]["text"] == "Question: q7\nAnswer: 2 + 2 = 4"
        held = {row["text"] for row in stories if row["held_out"]}
        assert len(held) == 2 and {row["text"].split("\n\n")[0] in held for row in retell} == {True, False}
        assert all((row["text"].split("\n\n")[0] in held) == row["held_out"] for row in retell)
        assert all(row["times"] == 1 for row in stories + retell + math if row["held_out"])
        assert {row["form"] for row in retell} == set(corpus.FORMS)
        for row in retell:
            story, wish, answer = row["text"].split("\n\n")
            assert "\n" not in wish and answer != story

def test_stories_of_a_text_file_are_whole(tmp_path, monkeypatch):
    """Wherever it is read in pieces, TinyStories' own file gives what rows give."""
    stories = [CHILD.format("Tim", "Tim", "Tim", i) for i in range(9)]
    (tmp_path / "stories.txt").write_text(f"\n{corpus.EOS}\n".join(stories) + "\n")
    monkeypatch.setattr(files, "PIECE", 700)
    assert stories_of.read_stories([tmp_path / "stories.txt"]) == (stories, 9)

class First:
    """Draws that are always the first."""

    def random(self):
        return 0.0

    def choice(self, found):
        return found[0]

def test_exchanges():
    """Names with pronouns, articles, capitals, plurals; None where it is not sure who is meant."""
    tom = "Tom ran. Tom was glad, and he took his hat. His hat is his. Give it to him!"
    assert corpus.to_girl(tom) == "Tom ran. Tom was glad, and she took her hat. Her hat is hers. Give it to her!"
    back = corpus.to_boy("She took her hat. Her hat is hers. Give it to her! I saw it by her and ran.")
    assert back == "He took his hat. His hat is his. Give it to him! I saw it by him and ran."
    assert corpus.to_boy("She was glad. They gave her apples.") is None
    assert corpus.other_gender(tom, "Tom") == corpus.to_girl(tom)
    for other in (" The man waved.", " Ben waved.", " A dog barked.", " She waved."):
        assert corpus.other_gender(tom + other, "Tom") is None, other
    text = "An apple fell. Two apples! The Apple was red, not an old apple."
    assert corpus.exchange_word(corpus.exchange_word(text, "apple", "pear"), "apples", "pears") == (
        "A pear fell. Two pears! The Pear was red, not an old pear.")
    assert corpus.exchange_thing("She ate a cookie. The cookies are good.", First()) == (
        "an apple instead of the cookie", "She ate an apple. The apples are good.")

def test_who_said_what():
    text = ('Here are Mia and Tom. Mia said, "Hello, Tom." Tom smiled and said, "Hi!" His mom said, "Come."\n'
            '"We go," said Tom. "It is late." "Yes!" Mia cried.')
    assert corpus.quotes(text) == [("Mia", "Hello, Tom."), ("Tom", "Hi!"), ("other", "Come."),
                                 ("Tom", "We go,"), ("Tom", "It is late."), ("Mia", "Yes!")]
    assert corpus.only_said(text, First()) == ("Mia", '"Hello, Tom."\n"Yes!"')
