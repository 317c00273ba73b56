"""Max-Gram: drafting by the longest match between the end of the generation and what was read or written before.

Cascade Speculative Drafting (arXiv 2312.11462), section 3.3 and Appendix A (Listing 1).

The idea.  A model often repeats phrases of its input and of its own output.  So find the longest suffix of the generation that
occurs earlier, and propose what followed it there; where nothing matches, propose the bigram's next token.  No neural network
runs.  Appendix A compares every position of the text with the query, once for each length of match, and asks the device each time
whether any is left.  Here the committed text is kept in a suffix automaton (Blumer et al. 1985), whose states are the sets of
substrings that end at the same places: a proposal walks through a few states, however long the context is.

    paper                  shape        name here
    encoder_ids            (s,)         source: the encoder's input, where there is one
    input_ids              (t + d,)     query: the committed generation, then the draft's tokens, then the chunk so far
    matches                (T - i,)     start, of longest_match(): where a match of length i that a token follows begins
    n                      int          n: tokens proposed (10, the last column of Table 2's matrices)
    bigram                 (V,)         bigram: list, the next token of each token, 0 where unknown

A match is a suffix of the query, one token or longer, that occurs in the committed text with at least one token after it: the
longest suffix, and of its occurrences the leftmost, the source before the generation.  The tokens after it are the chunk.  A
chunk that meets the end of its text is filled by matching again, with the chunk as part of the query, and by the bigram wherever
nothing matches; where the bigram knows nothing either, the proposal ends.

Differences from the paper:
 1. Section 3.3 matches "the initial input (or existing generation)"; the listing searches the encoder's input alone.  Here both are
    searched.  A decoder-only model's prompt is the beginning of its generation.
 2. The listing returns what follows the longest match even if nothing follows it; here a match has a following token.
 3. How a short chunk is filled, and whether matching is tried again after a token of the bigram, is not said.  Here each token
    depends on the tokens before it alone: a proposal of n tokens is n proposals of one, each appended to the draft.
 4. Only committed tokens are searched: what a draft repeats of itself is no evidence.
 5. Source and generation have an automaton each, which is one text with a token between them that nothing equals.
 6. The confidence of a token is how often matches of its length were right on held-out text, for tree builders that read
    probabilities.  The paper's chain has no use for it.
 7. The paper's bigram comes from Wikipedia; build_bigram() counts any corpus (`maxgram.py bigram`, see --help), and the flat JSON
    arrays that the authors published are read as well.

    python maxgram.py         # the demo: one proposal out of a source, a generation and a bigram; time against context
    python maxgram.py bigram --corpus FILES-OR-FOLDERS --tokenizer T --out bigram.json

In the decoding loop Max-Gram is the last stage of a cascade, or the only one: cascade.py's Cascade([], gram=MaxGram()).
"""
import argparse
import json
import os
import sys
import time
from array import array
from collections import Counter
from datetime import date
from itertools import groupby
from pathlib import Path

import torch

N = 10                           # tokens proposed (Table 2)
LENGTHS = 8                      # the confidence table has lengths 0 to 8, the last for "that or longer"
# How often the first proposed token is right, by length of match; 0 is the bigram.  Used where no table is stored beside the bigram:
# `maxgram.py bigram` measures one.  This one is from held-out Python source and GSM8K in the stand-in's vocabulary, rounded to steps of 0.05.
CONFIDENCE = (0.15, 0.15, 0.45, 0.55, 0.6, 0.65, 0.65, 0.75, 0.8)


class UserError(ValueError):
    """A user's mistake: one sentence that says what is wrong and what to do."""


def ints(tokens):
    """A list, or a tensor of any shape, of token ids -> list of ints."""
    return tokens.flatten().tolist() if torch.is_tensor(tokens) else list(tokens)


# ---------------------------------------------------------------- Appendix A, on tensors
def longest_match(query, text):
    """The longest suffix of `query` that occurs in `text` with a token after it, leftmost -> (place of that token, length) or None.

    query (q,), text (T,), where a token below 0 matches nothing and follows nothing.  Reads the device once for each length.
    """
    # start_1[j] = [text_j = query_q and a token follows];  start_{i+1}[j] = [text_j = query_{q-i} and start_i[j+1]]
    start, length = (text[:-1] == query[-1:]) & (text[1:] >= 0), 0                      # (T - 1,)
    while start.any():
        found, length = start, length + 1
        if length == len(query):
            break
        start = (text[:len(start) - 1] == query[-1 - length]) & start[1:]               # (T - 1 - length,)
    return (int(found.int().argmax()) + length, length) if length else None             # argmax: the first of equals


def max_gram_tensor(generation, n=N, draft=None, source=None, bigram=None):
    """Listing 1, the "GPU-friendly version", corrected and completed: the same proposal as MaxGram's, to be read beside the paper.

    generation (t,), draft (d,), source (s,), bigram (V,) tensors on one device -> (tokens (up to n,), lengths: list).

    What is wrong with the printed listing: its last torch.tensor() names no device, so on a GPU the call fails whenever the whole
    query matches; a longest match at the end of encoder_ids returns an empty chunk, even if a shorter one has a following token
    (given the prompt as encoder_ids, that is every first step of a decoder-only model); the generation is never searched, though
    section 3.3 says so; a short chunk stays short, and without a match None is returned: the bigram is not there.  Its time, as this
    one's, grows with the text and with the length of the match.
    """
    empty = generation.new_empty(0)
    draft, source = (empty if x is None else x for x in (draft, source))
    text = torch.cat((source, source.new_full((1,), -1), generation))                    # (T,)
    query, tokens, lengths = torch.cat((generation, draft)), empty, []
    if not len(query):
        raise UserError("there is nothing to continue: commit at least one token, or give a draft")
    while len(tokens) < n:
        if match := longest_match(query, text):
            at, length = match
            end = len(source) if at < len(source) else len(text)                         # a chunk stays inside its text
            chunk = text[at:min(end, at + n - len(tokens))]
        elif bigram is not None and query[-1] < len(bigram) and bigram[query[-1]] > 0:
            chunk, length = bigram[query[-1:]], 0
        else:
            break
        tokens, query = torch.cat((tokens, chunk)), torch.cat((query, chunk))
        lengths += [length] * len(chunk)
    return tokens, lengths


# ---------------------------------------------------------------- the bigram
def build_bigram(sequences, vocab):
    """The most frequent follower of each token, ties to the lower id -> list (vocab,), 0 where none was seen.

    sequences: iterable of lists of ids, one a document: the last token of one is not followed by the first of the next.  0 means
    "unknown" in the published files, so a token whose best follower is token 0 has none.
    """
    counts = Counter()
    for ids in sequences:
        if ids and not (0 <= min(ids) and max(ids) < vocab):
            raise UserError(f"the corpus holds token id {max(ids) if max(ids) >= vocab else min(ids)}, but the vocabulary has {vocab} tokens: "
                            "give the tokenizer that the ids were made with")
        counts.update(a * vocab + b for a, b in zip(ids, ids[1:]))
    bigram, best = [0] * vocab, [0] * vocab
    for pair, count in counts.items():
        a, b = divmod(pair, vocab)
        if (count, -b) > (best[a], -bigram[a]):
            best[a], bigram[a] = count, b
    return bigram


def read_bigram(path, vocab):
    """Read a bigram file for a vocabulary of `vocab` tokens -> (bigram: list (vocab,), confidence: list or None).

    Either what `maxgram.py bigram` writes, {"bigram": [...], "confidence": [...] or null}, or a flat JSON array indexed by token id
    as published with the paper, which may be shorter than a padded vocabulary.
    """
    again = "make one with `maxgram.py bigram`, or name another file"
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"the bigram file {path} does not exist: {again}") from None
    except (OSError, ValueError, RecursionError) as why:
        raise UserError(f"the bigram file {path} cannot be read ({type(why).__name__}: {str(why).splitlines()[0][:100]}): {again}") from None
    bigram, confidence = (read.get("bigram"), read.get("confidence")) if isinstance(read, dict) else (read, None)
    if not isinstance(bigram, list) or not all(type(x) is int for x in bigram):
        raise UserError(f"the bigram file {path} is damaged, it holds no array of token ids: {again}")
    if len(bigram) > vocab or any(not 0 <= x < vocab for x in bigram):
        what = f"{len(bigram)} entries" if len(bigram) > vocab else f"token id {next(x for x in bigram if not 0 <= x < vocab)}"
        raise UserError(f"{path} is a bigram of another vocabulary ({what}, where the vocabulary has {vocab} tokens): make one with this "
                        "model's tokenizer, `maxgram.py bigram --tokenizer`")
    if confidence is not None and not (isinstance(confidence, list) and confidence
                                       and all(type(x) in (int, float) and 0 <= x <= 1 for x in confidence)):
        raise UserError(f"the bigram file {path} is damaged, its confidence is no array of numbers from 0 to 1: {again}")
    return bigram + [0] * (vocab - len(bigram)), confidence


# ---------------------------------------------------------------- the index
class Index:
    """A suffix automaton of one growing text.  Each state is a set of substrings that end at the same places of the text.

    text: the tokens.  Of state s: next[s] {token: state}; length[s] of its longest substring; link[s], the state of the longest
    suffix that ends at more places; first[s], the leftmost place where it ends.  State 0 is the empty string.

    extend() costs amortised O(1) a token.  A proposal costs O(1) a token plus the suffixes it lets go of; that is a few in text, and
    the length of the repetition in the worst case, a text of one token over and over.
    """

    def __init__(self):
        self.text, self.next, self.length, self.link, self.first, self.last = [], [{}], [0], [-1], [-1], 0

    def new_state(self, *state):
        for column, value in zip((self.next, self.length, self.link, self.first), state):
            column.append(value)
        return len(self.next) - 1

    def extend(self, tokens):
        """Append committed tokens."""
        for token in ints(tokens):
            here = self.new_state({}, len(self.text) + 1, 0, len(self.text))
            p = self.last
            while p >= 0 and token not in self.next[p]:
                self.next[p][token] = here
                p = self.link[p]
            if p >= 0:
                q = self.next[p][token]
                if self.length[q] > self.length[p] + 1:        # the shorter substrings of q now end here too: they part from it
                    clone = self.new_state(dict(self.next[q]), self.length[p] + 1, self.link[q], self.first[q])
                    while p >= 0 and self.next[p].get(token) == q:
                        self.next[p][token] = clone
                        p = self.link[p]
                    self.link[q] = clone
                    q = clone
                self.link[here] = q
            self.last = here
            self.text.append(token)

    def advance(self, state, length, token):
        """The longest suffix of (the substring of `length` in `state`, then token) that the text holds -> (state, length)."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        return (self.next[state][token], length + 1) if token in self.next[state] else (0, 0)

    def match(self, state, length):
        """The longest suffix of the substring that a token follows -> (place of that token, length), or None.

        A state whose first end is the text's end occurs nowhere else; its link ends at one place more, so that is an earlier one.
        """
        if self.first[state] == len(self.text) - 1:
            state = self.link[state]
            length = self.length[state] if state > 0 else 0
        return (self.first[state] + 1, length) if length else None


class MaxGram:
    """Proposals for a sequence that grows: commit() what is settled, propose() what comes after a draft.

    bigram: list, the next token of each token, 0 where unknown.  confidence: list by length of match, the last for "or longer".
    """

    def __init__(self, bigram=None, confidence=None):
        self.bigram, self.confidence = ints(bigram) if bigram is not None else [], list(confidence or CONFIDENCE)
        self.reset()

    def reset(self):
        """Forget source and generation."""
        self.source, self.generation, self.in_source = Index(), Index(), (0, 0)

    def commit_source(self, tokens):
        """The encoder's input.  Its tokens are searched, and never part of the query."""
        assert not self.generation.text, "the source comes before the first commit()"
        self.source.extend(tokens)

    def commit(self, tokens):
        """Append tokens to the generation, a decoder-only model's prompt included."""
        tokens = ints(tokens)
        self.generation.extend(tokens)
        for token in tokens:
            self.in_source = self.source.advance(*self.in_source, token)

    def confidence_of(self, length):
        """How likely a token is right that comes from a match of this length (0: from the bigram)."""
        return self.confidence[min(length, len(self.confidence) - 1)]

    def propose(self, draft=(), n=N):
        """What comes after the committed generation and `draft` (list of ids) -> (tokens: list of up to n, lengths: list).

        lengths[i]: the length of the suffix whose match gave token i, the same for all tokens of a chunk; 0 for the bigram's.
        """
        draft, indexes = ints(draft), (self.source, self.generation)
        assert n >= 0, f"n is {n}: it must not be negative"
        if not draft and not self.generation.text:
            raise UserError("there is nothing to continue: commit at least one token, or give a draft")
        states = [self.in_source, (self.generation.last, len(self.generation.text))]

        def read(tokens):
            for i, index in enumerate(indexes):
                for token in tokens:
                    states[i] = index.advance(*states[i], token)

        read(draft)
        tokens, lengths, last = [], [], draft[-1] if draft else self.generation.text[-1]
        while len(tokens) < n:
            matches = [(index.match(*state), index.text) for index, state in zip(indexes, states)]
            match, text = max(matches, key=lambda m: m[0][1] if m[0] else 0)             # the first of equals: the source
            if match:
                at, length = match
                chunk = text[at:at + n - len(tokens)]
            elif last < len(self.bigram) and self.bigram[last]:
                chunk, length = [self.bigram[last]], 0
            else:
                break
            tokens += chunk
            lengths += [length] * len(chunk)
            last = chunk[-1]
            read(chunk)
        return tokens, lengths


def measure_confidence(texts, bigram=None, lengths=LENGTHS):
    """How often the first proposed token is the next one, by length of match -> list (lengths + 1,), or None if nothing was proposed.

    texts: iterable of lists of ids that the bigram was not counted on, replayed token by token, each on its own.  A length that was
    never seen gets the value of the nearest one that was (the shorter of two).
    """
    right, seen = [0] * (lengths + 1), [0] * (lengths + 1)
    for ids in texts:
        max_gram = MaxGram(bigram)
        for token, after in zip(ids, ids[1:]):
            max_gram.commit([token])
            proposed, matched = max_gram.propose((), 1)
            if proposed:
                seen[min(matched[0], lengths)] += 1
                right[min(matched[0], lengths)] += proposed[0] == after
    known = [i for i in range(lengths + 1) if seen[i]]
    nearest = [min(known, key=lambda k: (abs(k - i), k), default=None) for i in range(lengths + 1)]
    return [right[k] / seen[k] for k in nearest] if known else None


# ---------------------------------------------------------------- command line
def documents(paths):
    """Yield the documents of files and folders: text, or lists of token ids out of a .bin file."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from documents(sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")))
        elif not path.exists():
            raise UserError(f"--corpus: {path} does not exist")
        elif path.suffix == ".bin":
            data, ids = path.read_bytes(), array("H")
            if len(data) % 2:
                raise UserError(f"--corpus: {path} is no file of uint16 token ids, it has an odd number of bytes: leave it out")
            ids.frombytes(data)
            if sys.byteorder == "big":
                ids.byteswap()
            yield from (list(run) for is_text, run in groupby(ids, bool) if is_text)
        else:
            try:
                with open(path, encoding="utf-8") as f:
                    for row in f if path.suffix == ".jsonl" else [f.read()]:
                        if path.suffix == ".jsonl" and row.strip():
                            row = json.loads(row)["text"]
                        if row.strip():
                            yield row
            except UnicodeDecodeError:
                raise UserError(f"--corpus: {path} is not UTF-8 text: convert it, or leave it out") from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f'--corpus: a row of {path} is no JSON object with the field "text": write it so, or leave the file out') from None


def load_tokenizer(name):
    """What transformers' AutoTokenizer makes of a folder or a hub name; anything that goes wrong is one sentence."""
    from transformers import AutoTokenizer
    from transformers.utils import logging
    logging.set_verbosity_error()
    give = "give the folder or the hub name of the target's tokenizer"
    if not Path(name).exists() and (Path(name).is_absolute() or name.count("/") > 1):
        raise UserError(f"--tokenizer: {name} does not exist: {give}")
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as why:
        raise UserError(f"--tokenizer: {name} cannot be loaded ({type(why).__name__}: {(str(why).splitlines() or [''])[0][:150]}): {give}") from None


def write_bigram(a):
    """`maxgram.py bigram`: count the corpus, measure the confidence on its last documents, write one JSON file."""
    from tqdm import tqdm
    out = Path(a.out)
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder: name a file")
    tokenizer = load_tokenizer(a.tokenizer)
    vocab, total, tokens = len(tokenizer), sum(1 for _ in documents(a.corpus)), 0
    if not total:
        raise UserError("--corpus holds no text: give files or folders that do")
    every, held = min(50, total), []                         # every fiftieth document is held out, or the last of fewer

    def encoded():
        nonlocal tokens
        for i, text in enumerate(tqdm(documents(a.corpus), total=total, unit="document", dynamic_ncols=True, disable=None), 1):
            ids = text if isinstance(text, list) else tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens += len(ids)
            if i % every == 0 and total > 1:
                held.append(ids)
            else:
                yield ids

    bigram = build_bigram(encoded(), vocab)
    confidence = measure_confidence(tqdm(held, unit="document", dynamic_ncols=True, disable=None), bigram)
    about = {"tokenizer": a.tokenizer, "corpus": a.corpus, "documents": total, "held_out": len(held), "tokens": tokens, "date": str(date.today())}
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps({"bigram": bigram, "confidence": confidence and [round(c, 4) for c in confidence], "about": about}) + "\n")
    os.replace(part, out)                    # a killed write leaves the old file whole
    print(f"{out}: followers of {sum(map(bool, bigram))} of {vocab} tokens, from {total} documents, {len(held)} of them held out; confidence by "
          f"length of match: {' '.join(f'{c:.2f}' for c in confidence) if confidence else 'not measured, the defaults hold'}")


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one sentence, as all mistakes are here."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parser():
    p = Parser(description="Max-Gram (arXiv 2312.11462): without a command, a demo.")
    b = p.add_subparsers(dest="command", required=True).add_parser(
        "bigram", help="count a bigram and measure the confidence of matches",
        description="Count the most frequent follower of each token of a corpus, and measure on every fiftieth of its documents (the "
                    "last, if there are fewer) how often proposals are right.")
    b.add_argument("--corpus", nargs="+", required=True, metavar="PATH",
                   help="files, or folders of them: plain text, one document a file; .jsonl with a \"text\" field, one document a row; .bin of "
                        "uint16 token ids (little-endian), of the same tokenizer, where token 0 separates documents")
    b.add_argument("--tokenizer", required=True, metavar="T", help="folder or hub name, for transformers.AutoTokenizer")
    b.add_argument("--out", required=True, metavar="FILE", help="JSON file to write: bigram, confidence, and how they were made")
    return p


def main(argv=None):
    """Exit status: 0, or 2 after one sentence about a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv:
            write_bigram(parser().parse_args(argv))
        else:
            demo()
    except (UserError, OSError) as why:
        print(f"maxgram.py: {why}", file=sys.stderr)
        return 2
    return 0


def demo():
    """A proposal that needs all three: the generation's own words, the source's, the bigram's.  Then time against context."""
    words = ["", *sorted(set("the quick brown fox jumps over a lazy dog and then it sleeps : i saw".split()))]
    ids = {w: i for i, w in enumerate(words)}
    source, generation, draft = ([ids[w] for w in text.split()] for text in ("the quick brown fox jumps", "i saw : i saw the quick", "brown"))
    bigram = [0] * len(words)
    bigram[ids["jumps"]], bigram[ids["over"]] = ids["over"], ids["i"]
    max_gram = MaxGram(bigram)
    max_gram.commit_source(source)
    max_gram.commit(generation)
    tokens, lengths = max_gram.propose(draft, 10)
    assert " ".join(words[i] for i in tokens) == "fox jumps over i saw : i saw the quick"
    assert lengths == [3, 3, 0, 0, 1, 1, 1, 1, 1, 1]
    slow, same = max_gram_tensor(torch.tensor(generation), 10, *map(torch.tensor, (draft, source, bigram)))
    assert (slow.tolist(), same) == (tokens, lengths)
    print("the quick brown |", " ".join(f"{words[i]}({length})" for i, length in zip(tokens, lengths)))

    print("context    index        tensors   (one proposal of 10 tokens)")
    for size in (1_000, 10_000, 100_000):
        text = torch.randint(2000, (size,), generator=torch.Generator().manual_seed(0))
        text[-20:] = text[size // 2:size // 2 + 20]
        max_gram, spans = MaxGram(), []
        max_gram.commit(text)
        for propose in (lambda m=max_gram: m.propose((), 10)[0], lambda t=text: max_gram_tensor(t, 10)[0].tolist()):
            times = []
            for _ in range(20):
                begun = time.perf_counter()
                out = propose()
                times.append(time.perf_counter() - begun)
            assert out == text[size // 2 + 20:size // 2 + 30].tolist()
            spans.append(sorted(times)[10] * 1e6)
        print(f"{size:7d} {spans[0]:8.1f} us {spans[1]:10.1f} us")


if __name__ == "__main__":
    sys.exit(main())
