"""Encode text, chats or token ids into a folder that train.py reads, or show what it will learn.

    python training/prepare.py chats.jsonl --tokenizer smollm2 --show 3     # writes nothing
    python training/prepare.py chats.jsonl --tokenizer smollm2 --out data/chats
    python train.py glide --target smollm2 --data data/chats

train.py encodes files by itself.  Encoded ahead of time, they serve several runs and machines.
"""
import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

from runtime import chats
from runtime.load import load_tokenizer
from runtime.program import program
from training.documents import encoded, lines_of, marked, prepare

@program
def main(argv):
    p = argparse.ArgumentParser(description="Encode files for train.py.")
    p.add_argument("files", nargs="+", help="files or folders of text, chats or token ids")
    p.add_argument("--tokenizer", required=True, help="folder or hub name: the target's; smollm2")
    p.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's own code")
    p.add_argument("--template",
                   help="format of chats: question, vicuna, a Jinja file (default: its own)")
    p.add_argument("--template-args", help="for the template, as '{\"enable_thinking\": false}'")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder to write")
    what.add_argument("--show", type=int, metavar="N",
                      help="print the first N documents of each form as they are learned")
    a = p.parse_args(argv)
    tokenizer = load_tokenizer(a.tokenizer, trust=a.trust_remote_code)
    template = chats.template_of(a.template, tokenizer, a.template_args)
    if a.out is not None:
        print(*prepare(a.files, tokenizer, template, a.out), sep="\n")
        return
    report, shown = defaultdict(list), Counter()
    for document, parts in encoded(a.files, tokenizer, template, report):
        shown[document.form] += 1
        if shown[document.form] <= a.show:
            print(f"--- {document.place}, read as {document.form}")
            print(*[marked(ids, tokenizer) for ids in parts], sep="\n")
    print("---", *lines_of(report), sep="\n")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
