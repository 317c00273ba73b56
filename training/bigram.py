"""Max-Gram's bigram for a tokenizer and a text, and how far its predictions can be trusted.

    python training/bigram.py count --data written.jsonl --tokenizer smollm2 --out b.json
    python training/bigram.py agreement --drafter edd glide --data written.jsonl --target smollm2 \\
        --checkpoint my-drafters

`count` writes the most frequent follower of each token, and the confidence: how often the first
proposed token is right, by length of match, on documents that were not counted.

`agreement` fits the three numbers of beyond/graft.py's mixture, for each drafter, into
CHECKPOINT/bigram.json.  The target writes by itself after held-out prompts.  In each round it
verifies the chain that Max-Gram suggests, and the drafter reads the same chain.  So for each
suggested token, up to the first wrong one, there are the length of its match, the drafter's
probability of it, and whether it was right.  A logistic regression says how likely that is:

    rho = sigmoid(a + b length + c logit(p_draft))
"""
import json
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm

import maxgram
from beyond.graft import LEAST, Mixture
from runtime import chats, load
from runtime.errors import UserError
from runtime.program import Parser, program, write_atomically
from training.documents import encoded, plain_ids, prompts_in
from training.reading import Report
from verify import Tree, generate

LONGEST = 384             # tokens of a prompt, at most
NEW = 64                  # tokens that the target writes after each

# ---------------------------------------------------------------- count
def measure_confidence(texts, bigram, lengths=maxgram.LENGTHS):
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

def count(a):
    """`bigram.py count`"""
    tokenizer = load.load_tokenizer(a.tokenizer, revision=a.revision, trust=a.trust_remote_code)
    vocab = max(tokenizer.get_vocab().values()) + 1
    template = chats.template_of(a.template, tokenizer)
    learned, held_out, report = [], [], Report()
    for document, parts in encoded(a.data, tokenizer, template, vocab, report):
        split = held_out if document.held_out else learned
        split.append(plain_ids(parts[-1]))               # the whole chat, where there are several
    print(*report.lines(), sep="\n")
    if not learned:
        raise UserError("--data holds no text to count: all of it is held out")
    bigram = maxgram.build_bigram(learned, vocab)
    found = {
        "bigram": bigram,
        "confidence": measure_confidence(tqdm(held_out, disable=None), bigram),
        "fingerprint": load.vocabulary_fingerprint(tokenizer),
        "command": a.command,
        "date": time.strftime("%Y-%m-%d"),
    }
    write_atomically(Path(a.out), lambda part: part.write_text(json.dumps(found) + "\n"))
    print(f"{a.out}: followers of {sum(map(bool, bigram))} of {vocab} tokens, from {len(learned)} "
          f"documents; confidence by length of match: {found['confidence']}")

# ---------------------------------------------------------------- agreement
class Unmixed(Mixture):
    """A drafter and Max-Gram together, without Eq. 1: expand gives the drafter's own p_draft."""

    def mixture(self, p_draft, predicted, lengths):
        return p_draft

def suggestions(target, drafter, gram, prompts, new, stop=()):
    """Max-Gram's suggestions along the target's own greedy text -> [(length, p_draft, right)].

    In a round these are the tokens of the chain up to the first wrong one.  Left out is what the
    drafter cannot predict, for example since it is not in its list of words: there p_draft is 0.
    """
    both, rounds, found = Unmixed(drafter, gram), [], []

    def build(expand, root):
        """The chain that Max-Gram suggests after the root, read by one forward of the drafter."""
        tokens, lengths = gram.propose([both.root], min(maxgram.N, expand.remaining))
        n = next((i for i, length in enumerate(lengths) if length < LEAST), len(lengths))
        nodes = root.new_tensor([both.root, *tokens[:n]])
        parents = list(range(-1, n))
        rounds.append((tokens[:n], lengths, expand(nodes, parents)))
        return Tree(nodes, root.new_tensor(parents), expand_index=torch.arange(n + 1).to(root))

    for ids in prompts:
        rounds.clear()
        out = generate(target, both, build, ids, new, stop=stop)
        for (tokens, lengths, p_draft), chosen in zip(rounds, out.rounds):
            # The new tokens of a round end with the target's own, after the first wrong one.
            for token, length, row, right in zip(tokens, lengths, p_draft, chosen.new):
                p = row[token].item()
                if p > 0:
                    found.append((length, p, token == right))
    return found

def fit(found):
    """suggestions() -> {"weights": [a, b, c] of rho above, "words": how many suggestions}"""
    lengths, p, y = torch.tensor(found, dtype=torch.float64).T                 # (n,) each
    lengths = lengths.clamp(max=maxgram.LENGTHS)
    logit = torch.logit(p.clamp(1e-6, 1 - 1e-6))
    x = torch.stack((torch.ones_like(p), lengths, logit), 1)                   # (n, 3)
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        ridge = 1e-3 / len(y) * weights.square().sum()   # finite, even where all are right
        mean = F.binary_cross_entropy_with_logits(x @ weights, y) + ridge
        mean.backward()
        return mean
    optimizer.step(loss)
    return {"weights": [round(weight, 4) for weight in weights.tolist()], "words": len(y)}

def agreement(a):
    """`bigram.py agreement`"""
    setup = load.Loaded(a.target, a.checkpoint, "float32", a.device)
    path = Path(a.checkpoint) / "bigram.json"
    written = json.loads(path.read_text())
    prompts, kinds = [], Counter()
    for kind, ids in prompts_in(a.data, setup.tokenizer, a.template, LONGEST, held_out=True):
        kinds[kind] += 1
        if kinds[kind] <= a.prompts:
            prompts.append(ids)
    stop = [] if setup.eos is None else [transformers.EosTokenCriteria(setup.eos)]
    for name in a.drafter:
        mixture = load.load_mixture(setup, name, "maxgram")
        bar = tqdm(prompts, disable=None)
        found = suggestions(setup.target, mixture.drafter, mixture.gram, bar, NEW, stop)
        if not found:
            raise UserError("--data: Max-Gram suggests nothing in these texts")
        fitted = fit(found)
        print(f"{name}: {json.dumps(fitted)}")
        fitted["made"] = {"command": a.command, "date": time.strftime("%Y-%m-%d")}
        written.setdefault("agreement", {})[name] = fitted
    write_atomically(path, lambda part: part.write_text(json.dumps(written) + "\n"))

# ---------------------------------------------------------------- command line
def parser():
    p = Parser(description="Max-Gram's bigram, and how far it can be trusted.")
    commands = p.add_subparsers(dest="made", required=True)
    c = commands.add_parser("count", help="followers of each token, and the confidence")
    c.add_argument("--tokenizer", required=True, help="folder or hub name: the target's; smollm2")
    c.add_argument("--revision", help="of the tokenizer on the hub")
    c.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's own code")
    c.add_argument("--out", required=True, help="JSON file to write")
    g = commands.add_parser("agreement", help="trust where a drafter agrees, or not")
    g.add_argument("--target", default=str(load.STAND_IN), help="folder or hub name")
    g.add_argument("--checkpoint", default=str(load.CHECKPOINTS), help="drafters, bigram.json")
    g.add_argument("--drafter", nargs="+", default=["edd"], help="drafters of --checkpoint")
    g.add_argument("--device", default="cpu", help="cpu or cuda")
    g.add_argument("--prompts", type=int, default=24, help="prompts of each kind of text")
    for command in (c, g):
        command.add_argument("--data", nargs="+", required=True, help="as of train.py")
        command.add_argument("--template", help="chat format, as of train.py")
    return p

@program
def main(argv):
    a = parser().parse_args(argv)
    a.command = "python training/bigram.py " + shlex.join(argv)
    if a.made == "count":
        count(a)
    else:
        agreement(a)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
