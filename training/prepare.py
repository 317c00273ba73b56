"""Encode text, chats or token ids into a folder that train.py reads, or show what it will learn.

    python training/prepare.py chats.jsonl --tokenizer smollm2 --show 3     # writes nothing
    python training/prepare.py chats.jsonl --tokenizer smollm2 --out data/chats
    python train.py glide --target smollm2 --data data/chats

train.py encodes files by itself.  Encoded ahead of time, they serve several runs and machines.
"""
import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

from runtime import chats
from runtime.errors import UserError
from runtime.load import load_tokenizer
from runtime.program import program
from training.documents import Report, encoded, form_of, marked, prepare, read

def show(paths, tokenizer, template, vocab, limit):
    """Print the first `limit` rows of each kind as they are learned, then the counts."""
    report, shown = Report(), Counter()
    for document, parts in encoded(paths, tokenizer, template, vocab, report):
        shown[form_of(document)] += 1
        if shown[form_of(document)] <= limit:
            print(f"--- {document.place}, read as {form_of(document)}")
            print(*[marked(ids, tokenizer) for ids in parts], sep="\n")
    print("---", *report.lines(), sep="\n")

@program
def main(argv):
    p = argparse.ArgumentParser(description="Encode files for train.py.")
    p.add_argument("files", nargs="+", help="files or folders of text, chats or token ids")
    p.add_argument("--tokenizer", required=True, help="folder or hub name: the target's; smollm2")
    p.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's own code")
    p.add_argument("--template", help="format of chats: a Jinja file (default: the tokenizer's)")
    p.add_argument("--out", help="folder to write")
    p.add_argument("--show", type=int, metavar="N",
                   help="print the first N rows of each kind as they are learned")
    a = p.parse_args(argv)
    if (a.out is None) == (a.show is None):
        raise UserError("give --out, a folder to write, or --show, a number of documents to print")
    tokenizer = load_tokenizer(a.tokenizer, trust=a.trust_remote_code)
    template = chats.template_of(a.template, tokenizer)
    vocab = max(tokenizer.get_vocab().values()) + 1
    if a.show is not None:
        return show(a.files, tokenizer, template, vocab, a.show)
    prepare(a.files, tokenizer, template, vocab, a.out)
    print(*read(a.out, tokenizer).report, sep="\n")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
