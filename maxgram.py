"""Max-Gram: drafting by the longest match between the end of a text and an earlier part of it.

Cascade Speculative Drafting (arXiv 2312.11462), section 3.3 and Appendix A (Listing 1).

The idea.  A model often repeats phrases of its input and of its own output.  So find the longest
suffix of the generation that occurs earlier, and propose the tokens that followed it there; where
nothing matches, propose the bigram's next token.  No neural network runs.

The *query* is the committed generation, then the draft (what models of a cascade have drafted in
this round, if any), then what is proposed so far.  A *match* is a suffix of the query, one token or
longer, that occurs in the source or in the committed generation with at least one token after it.
The longest match is taken.  Where it occurs more than once, the leftmost occurrence is taken, and
one in the source rather than one in the generation.  The tokens after it are the *chunk*: n of
them, or as many as there are.  A short chunk becomes part of the query, and matching starts again.
Where nothing matches, the bigram gives one token; where it knows none, the proposal ends.

max_gram_tensor, at the end, is Listing 1 with the corrections below.  It compares every position of
the text with the query, once for each length of match, and each comparison ends with a
device-to-host sync.  MaxGram proposes the same tokens as max_gram_tensor without a tensor: its text
is a Python string with one character for each token, and Python's own search finds the match.  That
takes some tens of microseconds in a natural text of 4000 tokens, and about a millisecond in one
that repeats a single token 4000 times.

    paper              shape      name here
    encoder_ids        (s,)       source: the encoder's input, where there is one
    input_ids          (q,)       query: the committed generation, then the draft, then the proposal
    matches            (T - 1,)   matches[j]: a match ends at position j of a text (T,)
    n                  int        n: tokens proposed at once (10, section 5.2)
    bigram             (V,)       bigram: list, each token's most frequent follower, 0 where unknown

Differences from the paper:
 1. Section 3.3 matches "the initial input (or existing generation)"; Listing 1 searches the
    encoder's input alone.  Here both are searched.  A decoder-only model's prompt is the beginning
    of its generation.
 2. Listing 1 also counts a match that ends at the end of the text, and then returns an empty chunk.
    Here only a match with a token after it counts.
 3. Listing 1 leaves a short chunk short, and returns None where nothing matches.  Here a short
    chunk joins the query, and matching goes on.  So propose(n=10) gives the same tokens as ten
    calls of propose(n=1), where each token is appended to the draft.
 4. Draft tokens are part of the query only.  They may be wrong, so they are not searched.
 5. No match extends from the source into the generation.
 6. Each proposed token has a confidence: how often a token after a match of the same length was
    right on held-out text.  The match before the first token of a chunk has the length m, before
    its second token m + 1, and so on.  Tree builders read the confidence as a probability; the
    paper's chain does not need it.
 7. The paper's bigram comes from Wikipedia; build_bigram() counts any corpus.
 8. The paper proposes ten tokens everywhere, and so does this file.  Where few matches are right
    that may be slower than no proposal; beyond/priced.py chooses a length by confidence and price.
 9. Listing 1's last torch.tensor() names no device, so on a GPU it fails where the whole query
    matches.  Here all tensors are on the query's device.

To use this file alone, with a list of token ids `text`:

    gram = maxgram.MaxGram()
    gram.commit(text)
    tokens, lengths = gram.propose(n=10)         # what may come after the text
    tokens, lengths = gram.propose([7, 3], 10)   # what may come after the text, then 7 and 3

In verify.generate it is the last stage of a cascade (cascade.py), or the only one:

    drafter = cascade.Cascade([], gram=maxgram.MaxGram(bigram), vocab=V)
    verify.generate(target, drafter, drafter.chain, ids)

    python maxgram.py   # the demo: a proposal that needs source, generation and bigram
"""
from collections import Counter

import torch

N = 10                           # tokens proposed at once (section 5.2)
# How often the token after a match is right, by length of match; 0 is the bigram.  This table is
# used where none is stored beside the bigram.  Measured on held-out Python source and GSM8K.
CONFIDENCE = (0.15, 0.15, 0.45, 0.55, 0.6, 0.65, 0.65, 0.75, 0.8)
LENGTHS = len(CONFIDENCE) - 1    # 8: the last entry is for matches of 8 or longer

NOTHING_TO_CONTINUE = "there is nothing to continue: commit at least one token, or give a draft"

def ints(tokens):
    """A list, or a tensor of any shape, of token ids -> list of ints."""
    if torch.is_tensor(tokens):
        return tokens.flatten().tolist()
    return list(tokens)

# ---------------------------------------------------------------- the bigram
def build_bigram(sequences, vocab):
    """The most frequent follower of each token -> list (vocab,), 0 where none was seen.

    sequences: iterable of lists of ids, one for each document; pairs across documents are not
    counted.  Of equally frequent followers the lowest id is taken.  0 means "unknown" in the
    published files, too, so a token whose most frequent follower is token 0 has none.
    Raises ValueError where an id is outside the vocabulary.
    """
    counts = Counter()
    for ids in sequences:
        wrong = [x for x in ids if x < 0 or x >= vocab]
        if wrong:
            raise ValueError(f"the corpus contains token id {wrong[0]}, but the vocabulary has "
                             f"{vocab} tokens: give the tokenizer that the ids were made with")
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
    """Token ids (list or tensor) -> a str with one character for each: the one of that number."""
    return "".join(map(chr, ints(tokens)))

def longest_match(query, text):
    """The longest match: the longest suffix of `query` that occurs in `text` before a token.

    query, text: strings, made by as_string().  -> (position of the token after the leftmost
    occurrence, length of the match).  Length 0: nothing matches.
    """
    searched = text[:-1]                         # a match must have a token after it

    def matches(length):
        return length <= len(query) and query[-length:] in searched

    # If a suffix of some length matches, then so do all shorter ones.  So double the length until
    # it is too long, then bisect.
    longest, too_long = 0, 1
    while matches(too_long):
        longest, too_long = too_long, 2 * too_long
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if matches(middle):
            longest = middle
        else:
            too_long = middle
    suffix = query[len(query) - longest:]        # without a match it is "", found at 0: (0, 0)
    return searched.find(suffix) + longest, longest

# ---------------------------------------------------------------- section 3.3
class MaxGram:
    """Proposals for a growing text: commit() what is final, propose() what comes after a draft.

    bigram: list, each token's most frequent follower, 0 where unknown.
    confidence: a list.  confidence[m] is for a match of length m, confidence[0] for the bigram; the
    last entry is for longer matches, too.
    matching: False proposes by the bigram alone, an ablation (figures/tables.py).
    """

    def __init__(self, bigram=None, confidence=None, matching=True):
        self.matching = matching
        self.bigram = [] if bigram is None else ints(bigram)
        self.confidence = list(confidence or CONFIDENCE)
        self.reset()

    def reset(self):
        """Forget source and generation."""
        self.source = ""
        self.generation = ""

    def commit_source(self, tokens):
        """Append to the source, the encoder's input: it is searched, but not part of the query."""
        assert not self.generation, "the source comes before the first commit()"
        self.source += as_string(tokens)

    def commit(self, tokens):
        """Append to the generation, which begins with a decoder-only model's prompt."""
        self.generation += as_string(tokens)

    def confidence_of(self, length):
        """How often the token after a match of this length is right (0: the bigram's token)."""
        return self.confidence[min(length, len(self.confidence) - 1)]

    def chunk(self, query, most):
        """What follows the longest match -> (up to `most` tokens as a string, length of the match).

        Without a match it is the bigram's token, of length 0, or "".
        """
        if self.matching:
            text = self.source
            position, length = longest_match(query, text)
            # The generation's match only where it is longer than the source's
            other_position, other_length = longest_match(query, self.generation)
            if other_length > length:
                text, position, length = self.generation, other_position, other_length
            if length > 0:
                return text[position:position + most], length
        # "In cases where there is no match, we resort to a bigram model".
        last = ord(query[-1])
        follower = self.bigram[last] if last < len(self.bigram) else 0
        token = chr(follower) if follower > 0 else ""
        return token, 0

    def propose(self, draft=(), n=N):
        """What comes after the generation and `draft` (ids) -> (up to n ids, lengths): lists.

        lengths: for each id the length of its match, for confidence_of(); 0: the bigram gave it.
        Both are empty where there is no prediction.  Nothing is committed.  Raises ValueError where
        there is neither a generation nor a draft.
        """
        assert n >= 0, f"n is {n}: it must not be negative"
        before = self.generation + as_string(draft)
        if not before:
            raise ValueError(NOTHING_TO_CONTINUE)
        proposal, lengths = "", []
        while len(proposal) < n:
            chunk, length = self.chunk(before + proposal, n - len(proposal))
            if not chunk:
                break
            proposal += chunk
            # Each token of the chunk extends the match by one.
            lengths += range(length, length + len(chunk))
        return list(map(ord, proposal)), lengths

# ---------------------------------------------------------------- Appendix A, for comparison
def longest_match_tensor(query, text):
    """Listing 1, lines 6 to 22: the longest suffix of `query` that occurs in `text` before a token.

    query (q,), text (T,).  The text may be several texts, joined by -1, which no query holds and
    which may not follow a match.
    -> (position of the token after the leftmost occurrence, length of the match), or None.
    One device-to-host sync for each length.
    """
    # Line 6: matches of one token.  Entry j: a match ends at position j, and a token follows.
    matches = (text[:-1] == query[-1]) & (text[1:] >= 0)                     # (T - 1,)
    if not matches.any():
        return None
    length = 1
    while length < min(len(query), len(matches)):
        # Line 10: does the match go on to the left?  If the query ends with 5 8 and length is 1,
        # matches marks each j where 8 stands, new_matches each j where 5 stands at j - 1.
        new_matches = torch.zeros_like(matches)                              # (T - 1,)
        new_matches[length:] = text[:len(matches) - length] == query[-1 - length]
        # Line 11: a match is one token longer where both hold.
        combined_matches = matches & new_matches
        if not combined_matches.any():
            break
        matches = combined_matches
        length += 1
    # Lines 13 to 19, torch_index: the leftmost; argmax gives the first of equals.
    leftmost = int(matches.int().argmax())
    return leftmost + 1, length

def max_gram_tensor(generation, n=N, draft=None, source=None, bigram=None):
    """Listing 1, the "GPU-friendly version", with differences 1 to 6 and 9.  MaxGram replaces it.

    generation (t,), draft (d,), source (s,), bigram (V,): tensors on one device.
    -> (tokens (up to n,), lengths of their matches: list), the same as MaxGram.propose.  Raises
    ValueError where there is neither a generation nor a draft.  Its time grows with the text and
    with the length of the match.
    """
    empty = generation.new_empty(0)
    draft = empty if draft is None else draft
    source = empty if source is None else source
    # Both texts in one
    between = source.new_full((1,), -1)
    text = torch.cat((source, between, generation))                          # (s + 1 + t,)
    query = torch.cat((generation, draft))                                   # (t + d,)
    if not len(query):
        raise ValueError(NOTHING_TO_CONTINUE)
    tokens, lengths = empty, []
    while len(tokens) < n:
        match = longest_match_tensor(query, text)
        last = query[-1:]
        if match is not None:
            position, length = match
            # Line 20: the tokens after the match, up to the end of its text
            end = len(source) if position < len(source) else len(text)
            chunk = text[position:end]
            chunk = chunk[:n - len(tokens)]
        # Section 3.3: in cases where there is no match, the bigram.
        elif bigram is not None and last < len(bigram) and bigram[last] > 0:
            chunk = bigram[last]                                             # (1,)
            length = 0
        else:
            break
        tokens = torch.cat((tokens, chunk))
        query = torch.cat((query, chunk))
        lengths += range(length, length + len(chunk))
    return tokens, lengths

# ---------------------------------------------------------------- demo
def main():
    """A proposal that needs generation, source and bigram."""
    assert longest_match("abab", "abab") == (2, 2), "after abab: what came after the first ab"

    words = ["", *"the quick brown fox jumps over a lazy dog and then it sleeps : i saw".split()]
    ids = {word: i for i, word in enumerate(words)}
    source = [ids[word] for word in "the quick brown fox jumps".split()]
    generation = [ids[word] for word in "i saw : i saw the quick".split()]
    draft = [ids["brown"]]
    bigram = [0] * len(words)
    bigram[ids["jumps"]] = ids["over"]
    bigram[ids["over"]] = ids["i"]
    max_gram = MaxGram(bigram)
    max_gram.commit_source(source)
    max_gram.commit(generation)
    tokens, lengths = max_gram.propose(draft, 10)
    assert " ".join(words[i] for i in tokens) == "fox jumps over i saw : i saw the quick"
    # "the quick brown" is in the source, and its match grows with "fox".  After "jumps" and "over"
    # there is the bigram alone.  Then "i" is in the generation.
    assert lengths == [3, 4, 0, 0, 1, 2, 3, 4, 5, 6]

    given = [torch.tensor(x) for x in (draft, source, bigram)]
    tensor_tokens, tensor_lengths = max_gram_tensor(torch.tensor(generation), 10, *given)
    assert tensor_tokens.tolist() == tokens, "Listing 1, corrected, gives the same"
    assert tensor_lengths == lengths
    shown = [f"{words[i]}({length})" for i, length in zip(tokens, lengths)]
    print("the quick brown |", *shown)

if __name__ == "__main__":
    main()
