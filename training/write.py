"""What a target writes itself: the text that its drafters learn from best.

    python training/write.py --target smollm2 --data questions.jsonl --out written.jsonl
    python train.py glide edd --target smollm2 --data written.jsonl

The prompts are the first questions of chats, or the first halves of other texts.  Each row of the
output is {"source": kind of text, "temperature": T, "target": a digest of the target,
"prompt": [ids], "answer": [ids]}.  train.py reads the prompt and learns the answer.

The file is only ever appended to.  --resume goes on with the prompts that it does not hold.
"""
import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from tqdm import tqdm

from runtime import load
from runtime.errors import UserError
from runtime.program import Parser, program
from runtime.targets import context_of
from training.batched import write
from training.documents import prompts_in
from training.state import lock

# ---------------------------------------------------------------- command line
def written(path, settings):
    """The prompts that a file holds -> set of tuples.  A last row that was cut off is removed.

    settings: {field: value} that all of its rows must have.  UserError where they do not.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data[:data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        found = {tuple(row["prompt"]) for row in rows}
        others = [name for name, value in settings.items()
                  if any(row.get(name, value) != value for row in rows)]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"--resume: {path} holds something else than write.py writes: name "
                        "another --out") from None
    if others:
        raise UserError(f"--resume: {path} was written with another {' and '.join(others)}:"
                        " name another --out")
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return found

def parser():
    p = Parser(description="Let a target write text that its drafters can learn from.")
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN), help="folder or hub name of the target")
    flag("--revision", help="of the target on the hub")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--data", nargs="+", required=True, help="files of questions, chats or other text")
    flag("--template", help="chat format, as for train.py")
    flag("--out", required=True, help="file to write, JSON lines")
    flag("--resume", action="store_true", help="go on with --out")
    flag("--overwrite", action="store_true", help="replace --out")
    flag("--temperature", type=float, default=0.0, help="0: greedy; else sampled")
    flag("--length", type=int, default=512, help="tokens of a prompt and its answer, at most")
    flag("--batch", type=int, default=64, help="texts that are decoded together")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32",
         help="of the target on a CPU; bfloat16 is faster where the CPU has AMX")
    flag("--seed", type=int, default=0, help="of sampling")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return p

@program
def main(argv):
    a = parser().parse_args(argv)
    if min(a.batch, a.length) < 1 or a.temperature < 0:
        raise UserError("--batch and --length must be above 0, --temperature 0 or above")
    out = Path(a.out)
    if out.exists() and not (a.resume or a.overwrite):
        raise UserError(f"--out: {out} exists: go on with it by --resume, or give --overwrite")
    dtype = "auto" if a.device.startswith("cuda") else a.dtype
    target, tokenizer = load.load_target(a.target, dtype, a.device, revision=a.revision,
                                         trust=a.trust_remote_code)
    capacity = context_of(target.config.get_text_config())
    if a.length > capacity:
        raise UserError(f"--length {a.length} is more than the target's context of {capacity}")
    prompts = prompts_in(a.data, tokenizer, a.template, a.length * 3 // 4)
    about = json.dumps(load.fingerprint(target, tokenizer), sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()[:8]
    settings = {"temperature": a.temperature, "target": digest}
    if not a.resume:
        out.unlink(missing_ok=True)
    done = written(out, settings)
    prompts = [(kind, ids) for kind, ids in prompts if tuple(ids) not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    texts = write(target, [ids for _, ids in prompts], [a.length] * len(prompts), a.batch,
                  a.temperature)
    with open(out, "a", encoding="utf-8") as file:
        lock(file, out)
        for number, ids in tqdm(texts, total=len(prompts), unit="text", disable=None):
            kind, prompt = prompts[number]
            row = {"source": kind, **settings, "prompt": prompt, "answer": ids[len(prompt):]}
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(f"saved {out}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
