"""Max-Gram: drafting by the longest match between the end of a text and an earlier part of it.

Cascade Speculative Drafting (arXiv 2312.11462), section 3.3 and Appendix A (Listing 1).

The idea.  A model often repeats phrases of its input and of its own output.  So find the longest
suffix of the generation that occurs earlier, and propose the tokens that followed it there; if
nothing matches, propose the bigram's next token.  No neural network runs.

    paper              shape      name here
    encoder_ids        (s,)       source: the encoder's input, where there is one
    input_ids          (q,)       query: the committed generation, then the draft, then the proposal
    n                  int        n: tokens proposed at once (10, section 5.2)
    bigram             (V,)       bigram: list, each token's most frequent follower, 0 where unknown

A *match* is a suffix of the query, one token or longer, that occurs in the source or in the
committed generation with at least one token after it.  The longest match is taken.  If it occurs
more than once, the leftmost occurrence is taken, and one in the source rather than one in the
generation.  The tokens after it are the *chunk*: n of them, or as many as there are.  A short chunk
becomes part of the query, and matching starts again.

An example.  A model has written "i saw : i saw the quick", and a drafter adds "brown":

    source           the quick brown fox jumps
    match            the quick brown              3 tokens
    chunk            fox jumps                    the source ends here
    bigram           over                         no match: nothing follows the earlier "jumps"
    bigram           i                            no match: there is no earlier "over"
    match            i                            1 token, at the beginning of the generation
    chunk            saw : i saw the quick        ten tokens are proposed

The text is a Python string with one character for each token, so Python's own search finds the
match.  That takes some tens of microseconds in a natural text of 4000 tokens, and about a
millisecond in one that repeats a single token 4000 times.

To use this file alone, with a list of token ids `text`:

    gram = maxgram.MaxGram()
    gram.commit(text)
    tokens, lengths = gram.propose(n=10)         # what may come after the text
    tokens, lengths = gram.propose([7, 3], 10)   # what may come after the text, then 7 and 3

In verify.generate it is the last stage of a cascade (cascade.py), or the only one:

    drafter = cascade.Cascade([], gram=maxgram.MaxGram(bigram), vocab=V)
    verify.generate(target, drafter, drafter.chain, ids)

    python maxgram.py   # the demo: the example above
"""
from collections import Counter

N = 10                           # tokens proposed at once (section 5.2)
# How often the token after a match is right, by length of match; 0 is the bigram, and the last
# entry is for all longer matches.  Measured on held-out Python source and GSM8K.
CONFIDENCE = (0.15, 0.15, 0.45, 0.55, 0.6, 0.65, 0.65, 0.75, 0.8)

# ---------------------------------------------------------------- the bigram
def build_bigram(sequences, vocab):
    """Find the most frequent follower of each token -> list (vocab,), 0 where none was seen.

    sequences: iterable of lists of ids, one for each document; pairs across documents are not
    counted.  Of equally frequent followers the lowest id is taken.  0 means "unknown", as in the
    paper's public files, so a token whose most frequent follower is token 0 has none.
    Raises ValueError if an id is outside the vocabulary.
    """
    # Differs from the paper, whose bigram comes from Wikipedia: this one counts any corpus.
    counts = Counter()
    for ids in sequences:
        if max(ids, default=0) >= vocab:
            raise ValueError(f"the corpus has token id {max(ids)}, but the vocabulary has {vocab} "
                             "tokens: give the tokenizer that the ids were made with")
        pairs = zip(ids, ids[1:])
        counts.update(pairs)
    bigram = [0] * vocab
    seen = [0] * vocab                           # how often each token's follower was seen
    for (a, b), count in counts.items():
        tie = count == seen[a] and b < bigram[a]
        if count > seen[a] or tie:
            seen[a] = count
            bigram[a] = b
    return bigram

# ---------------------------------------------------------------- the search
def as_string(tokens):
    """Token ids -> a str with one character for each: the character of that number."""
    return "".join(map(chr, tokens))

def longest_match(query, text):
    """Find the longest suffix of `query` that occurs in `text` before a token.

    query, text: strings, made by as_string().  Returns the position of the token after the leftmost
    occurrence, and the length of the match; (0, 0) if nothing matches.
    """
    # Differs from the paper: Listing 1 also counts a match that ends the text, and then returns an
    # empty chunk.  Here a token must follow.
    searched = text[:-1]

    def matches(length):
        return length <= len(query) and query[-length:] in searched

    # If a suffix matches, all shorter ones do.  So the length is doubled until it is too long,
    # and then the interval between the last two lengths is halved until one length is left.  For a
    # match of 5 tokens the lengths tried are 1, 2, 4, 8 (too long), 6 (too long), 5.
    longest, too_long = 0, 1
    while matches(too_long):
        longest, too_long = too_long, 2 * too_long
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if matches(middle):
            longest = middle
        else:
            too_long = middle
    suffix = query[len(query) - longest:]
    return searched.find(suffix) + longest, longest

# ---------------------------------------------------------------- section 3.3
class MaxGram:
    """Proposals for a growing text: commit() what is final, propose() what comes after a draft."""

    def __init__(self, bigram=None, confidence=None):
        """bigram: list, each token's most frequent follower, 0 where unknown.

        confidence: list by length of match, as CONFIDENCE; training/bigram.py measures it.
        """
        self.bigram = list(bigram or [])
        self.confidence = list(confidence or CONFIDENCE)
        self.reset()

    def reset(self):
        """Forget source and generation."""
        self.source = ""
        self.generation = ""

    def commit_source(self, tokens):
        """Append to the source, the encoder's input: it is searched, but not part of the query."""
        self.source += as_string(tokens)

    def commit(self, tokens):
        """Append to the generation, which begins with a decoder-only model's prompt."""
        self.generation += as_string(tokens)

    def confidence_of(self, length):
        """How often the token after a match of this length is right (0: the bigram's token)."""
        return self.confidence[min(length, len(self.confidence) - 1)]

    def chunk(self, query, limit):
        """What follows the longest match -> (up to `limit` tokens as a string, the match's length).

        query: a string by as_string().  Without a match: the bigram's token, or "", of length 0.
        """
        # Differs from the paper: section 3.3 matches "the initial input (or existing generation)",
        # and Listing 1 searches the encoder's input alone.  Here both are searched.  The draft may
        # be wrong, so it is part of the query only.
        text = self.source
        position, length = longest_match(query, text)
        other_position, other_length = longest_match(query, self.generation)
        if other_length > length:
            text, position, length = self.generation, other_position, other_length
        if length > 0:
            return text[position:position + limit], length
        if not query:
            return "", 0
        # "In cases where there is no match, we resort to a bigram model".
        last = ord(query[-1])
        follower = self.bigram[last] if last < len(self.bigram) else 0
        token = chr(follower) if follower > 0 else ""
        return token, 0

    def propose(self, draft=(), n=N):
        """Propose what comes after the generation and `draft` (ids) -> (up to n ids, lengths).

        lengths: for each id the length of its match, for confidence_of(); 0: the bigram gave it.
        Both lists are empty if there is no prediction.  Nothing is committed.
        """
        before = self.generation + as_string(draft)
        # Differs from the paper: Listing 1 leaves a short chunk short.  Here it joins the query, so
        # propose(n=10) gives what ten calls of propose(n=1) give, one token after the other.
        proposal, lengths = "", []
        while len(proposal) < n:
            chunk, length = self.chunk(before + proposal, n - len(proposal))
            if not chunk:
                break
            proposal += chunk
            # Each token of the chunk extends the match by one.
            lengths += range(length, length + len(chunk))
        return list(map(ord, proposal)), lengths

# ---------------------------------------------------------------- demo
def main():
    """The example at the top, which needs generation, source and bigram."""
    words = ["", *"the quick brown fox jumps over i saw :".split()]
    ids = {word: i for i, word in enumerate(words)}
    bigram = [0] * len(words)
    bigram[ids["jumps"]] = ids["over"]
    bigram[ids["over"]] = ids["i"]
    gram = MaxGram(bigram)
    gram.commit_source(ids[word] for word in "the quick brown fox jumps".split())
    gram.commit(ids[word] for word in "i saw : i saw the quick".split())
    tokens, lengths = gram.propose([ids["brown"]], 10)
    assert " ".join(words[i] for i in tokens) == "fox jumps over i saw : i saw the quick"
    assert lengths == [3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    shown = [f"{words[i]}({length})" for i, length in zip(tokens, lengths)]
    print("the quick brown |", *shown)

# Differences from the paper, all of them:
#  1. The source and the generation are searched; no match extends from one into the other, and the
#     draft is not searched (MaxGram.chunk).
#  2. Only a match with a token after it counts (longest_match).
#  3. A short chunk joins the query, and matching goes on (MaxGram.propose).
#  4. Each proposed token has a confidence, by the length of its match: tree builders read it as a
#     probability (MaxGram.confidence_of).
#  5. The bigram may come from any corpus (build_bigram).
#  6. The search is Python's own instead of Listing 1's tensors, whose last torch.tensor() names no
#     device, so that it fails on a GPU if the whole query matches.

if __name__ == "__main__":
    main()
