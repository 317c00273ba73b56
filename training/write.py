"""What a target writes itself: the text that its drafters learn from best.

    python training/write.py --target smollm2 --data questions.jsonl --out written.jsonl
    python train.py glide edd --target smollm2 --data written.jsonl

The prompts are the first questions of chats, or the first halves of other texts.  train.py reads
the prompts and learns the answers.  A row of --out is

    {"source": kind of text, "temperature": T, "prompt": [ids], "answer": [ids]}

Rows are written as they are finished, and the same command goes on with the prompts that --out does
not hold.  Many texts are decoded together by transformers' generate(): no drafter is there yet.
"""
import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from tqdm import tqdm

from runtime import chats, load, text
from runtime.errors import UserError
from runtime.program import program
from runtime.prompts import questions_of
from runtime.targets import context_of
from training.documents import Report

# ---------------------------------------------------------------- prompts
def prompts_in(paths, tokenizer, template, limit):
    """The prompts of documents to learn from, each once -> [(kind of text, ids)].

    Prompts of more than `limit` tokens are left out.  What is left out is printed with its reason.
    """
    report, found = Report(), {}
    for document in text.documents(paths):
        try:
            if document.held_out:
                raise text.LeftOut("it is held out")
            turns = questions_of(document)[0]
            ids = chats.prompt_ids(turns, tokenizer, template, document.row.get("tools"))
            if all(turn.learned for turn in turns):
                ids = ids[:len(ids) // 2]                # a text without a prompt
            if not 0 < len(ids) <= limit:
                raise text.LeftOut(f"a prompt has no token, or more than {limit}")
            if tuple(ids) in found:
                raise text.LeftOut("a prompt comes once more")
            found[tuple(ids)] = document.kind
        except text.LeftOut as why:
            report.add(f"left out: {why}", document)
    if not found:
        raise UserError(f"--data holds no prompt to ask: {report}")
    if report.counts:
        print(*report.lines(), sep="\n")
    return [(kind, list(ids)) for ids, kind in found.items()]

# ---------------------------------------------------------------- texts
@torch.no_grad()
def write(target, prompts, length, batch, temperature=0.0):
    """Let the target continue prompts, lists of ids, until a text ends or has `length` tokens.

    Yields (number of the prompt, the new ids), a batch after the other.  temperature: of sampling;
    0: greedy.
    """
    # Prompts of similar sizes share a batch, which is padded.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    stop = target.generation_config.eos_token_id
    stop = set(stop) if isinstance(stop, list) else {stop}
    how = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    for start in range(0, len(order), batch):
        numbers = order[start:start + batch]
        # Padded on the left, so that all answers begin in one column.  The mask hides the padding,
        # and generate() derives the positions from it.
        longest = max(len(prompts[i]) for i in numbers)
        padding = [longest - len(prompts[i]) for i in numbers]
        ids = [[0] * size + prompts[i] for size, i in zip(padding, numbers)]
        mask = [[0] * size + [1] * len(prompts[i]) for size, i in zip(padding, numbers)]
        out = target.generate(
            torch.tensor(ids, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            max_new_tokens=length - len(prompts[numbers[0]]), pad_token_id=0, **how)
        for i, answer in zip(numbers, out[:, longest:].tolist()):
            answer = answer[:length - len(prompts[i])]
            end = next((n for n, token in enumerate(answer, 1) if token in stop), len(answer))
            yield i, answer[:end]

# ---------------------------------------------------------------- rows
def kept_rows(path):
    """The rows of --out so far, or [].  A last line that was cut off is removed."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[:data.rfind(b"\n") + 1]
    rows = [json.loads(line) for line in whole.splitlines()]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return rows

def append(path, target, prompts, length, batch, temperatures):
    """Append the target's answers to prompts, [(kind of text, ids)], to a file as rows.

    Prompts of which the file has rows already are left out.  length: of a prompt and its answer.
    temperatures: of the prompts in turn.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {tuple(row["prompt"]) for row in kept_rows(path)}
    for turn, temperature in enumerate(temperatures):
        given = [(kind, ids) for kind, ids in prompts[turn::len(temperatures)]
                 if tuple(ids) not in done]
        answers = write(target, [ids for _, ids in given], length, batch, temperature)
        bar = tqdm(answers, f"temperature {temperature:g}", len(given), unit="text", disable=None)
        with open(path, "a") as file:
            for number, answer in bar:
                kind, prompt = given[number]
                row = {"source": kind, "temperature": temperature, "prompt": prompt,
                       "answer": answer}
                file.write(json.dumps(row) + "\n")
                file.flush()
    print(f"saved {path}")

# ---------------------------------------------------------------- command line
@program
def main(argv):
    p = argparse.ArgumentParser(description="Let a target write text for its drafters.")
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN), help="folder or hub name of the target")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--data", nargs="+", required=True, help="files of questions, chats or other text")
    flag("--template", help="chat format, as for train.py")
    flag("--out", required=True, help="file to write, JSON lines")
    flag("--temperature", type=float, nargs="+", default=[0.0],
         help="0: greedy; else sampled.  Of several the prompts take one in turn")
    flag("--length", type=int, default=512, help="tokens of a prompt and its answer, at most")
    flag("--batch", type=int, default=64, help="texts that are decoded together")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32",
         help="of the target on a CPU; bfloat16 is faster where the CPU has AMX")
    flag("--seed", type=int, default=0, help="of sampling")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    a = p.parse_args(argv)
    dtype = "auto" if a.device.startswith("cuda") else a.dtype
    target, tokenizer = load.load_target(a.target, dtype, a.device, trust=a.trust_remote_code)
    capacity = context_of(target.config.get_text_config())
    if a.length > capacity:
        raise UserError(f"--length {a.length} is more than the target's context of {capacity}")
    template = chats.template_of(a.template, tokenizer)
    prompts = prompts_in(a.data, tokenizer, template, a.length * 3 // 4)
    torch.manual_seed(a.seed)
    append(Path(a.out), target, prompts, a.length, a.batch, a.temperature)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
