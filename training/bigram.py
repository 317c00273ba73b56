"""Max-Gram's bigram for a tokenizer and a text, and how far its predictions can be trusted.

    python training/bigram.py --data written.jsonl --tokenizer smollm2 --out my-drafters/bigram.json

The file holds the most frequent follower of each token, and the confidence: how often the first
proposed token is right, by length of match, on documents that were not counted.  By it
beyond/graft.py mixes Max-Gram with a drafter.
"""
import argparse
import json
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import numpy as np
from tqdm import tqdm

import maxgram
from runtime import chats, load
from runtime.program import program
from training.documents import encoded, lines_of, plain_ids

def measure_confidence(texts, bigram, lengths=len(maxgram.CONFIDENCE) - 1):
    """How often the first proposed token is right, by length of match -> list (lengths + 1,).

    texts: lists of ids on which the bigram was not counted; each is replayed token by token.  A
    length that never occurs gets the value of the nearest one that does.  None: nothing was
    proposed.
    """
    seen, right = Counter(), Counter()                   # by length
    for ids in texts:
        gram = maxgram.MaxGram(bigram)
        for token, following in zip(ids, ids[1:]):
            gram.commit([token])
            proposed, matched = gram.propose((), 1)
            if proposed:
                length = min(matched[0], lengths)
                seen[length] += 1
                right[length] += proposed[0] == following
    if not seen:
        return None
    # A match grows token by token, so no length between the first and the last is missing.
    nearest = np.arange(lengths + 1).clip(min(seen), max(seen)).tolist()
    return [round(right[length] / seen[length], 4) for length in nearest]

@program
def main(argv):
    p = argparse.ArgumentParser(description="Max-Gram's bigram, and how far it can be trusted.")
    flag = p.add_argument
    flag("--data", nargs="+", required=True, help="as of train.py")
    flag("--tokenizer", required=True, help="folder or hub name: the target's; smollm2")
    flag("--trust-remote-code", action="store_true", help="run the tokenizer's own code")
    flag("--template", help="chat format, as of train.py")
    flag("--out", required=True, help="JSON file to write")
    a = p.parse_args(argv)
    tokenizer = load.load_tokenizer(a.tokenizer, trust=a.trust_remote_code)
    template = chats.template_of(a.template, tokenizer)
    learned, held_out, report = [], [], defaultdict(list)
    for document, parts in encoded(a.data, tokenizer, template, report):
        split = held_out if document.held_out else learned
        split.append(plain_ids(parts[-1]))               # the whole chat, where there are several
    print(*lines_of(report), sep="\n")
    vocab = max(tokenizer.get_vocab().values()) + 1
    bigram = maxgram.build_bigram(learned, vocab)
    found = {
        "bigram": bigram,
        "confidence": measure_confidence(tqdm(held_out, disable=None), bigram),
        "fingerprint": load.vocabulary_fingerprint(tokenizer),
        "command": "python training/bigram.py " + shlex.join(argv),
    }
    Path(a.out).write_text(json.dumps(found) + "\n")
    confidence = found["confidence"] or "not measured, no row that is held out shows it"
    print(f"{a.out}: followers of {sum(map(bool, bigram))} of {vocab} tokens, from {len(learned)} "
          f"documents; confidence by length of match: {confidence}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
