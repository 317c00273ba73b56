"""Max-Gram: drafting by the longest match between the end of a text and an earlier part of it.

Cascade Speculative Drafting (arXiv 2312.11462), section 3.3 and Appendix A (Listing 1).

The idea.  A model often repeats phrases of its input and of its own output.  So find the longest
suffix of the generation that occurs earlier, and propose the tokens that followed it there; where
nothing matches, propose the bigram's next token.  No neural network runs.

Listing 1 (max_gram_tensor) compares every position of the text with the query, once for each length
of match, and each comparison ends with a device-to-host sync.  MaxGram proposes the same tokens
from a suffix automaton of the committed text (Blumer et al. 1985; class Index shows one).  In
ordinary text a proposal visits a few of its states, however long the text is.

    paper              shape      name here
    encoder_ids        (s,)       source: the encoder's input, where there is one
    input_ids          (q,)       query: the committed generation, the draft, the proposal so far
    matches            (T - 1,)   matches: True where a match ends in a text (T,), before a token
    n                  int        n: tokens proposed at once (10, section 5.2)
    bigram             (V,)       bigram: list, each token's most frequent follower, 0 where unknown

A *match* is a suffix of the query, one token or longer, that occurs in the committed text with at
least one token after it.  The longest match is taken.  Where it occurs more than once, the leftmost
occurrence is taken, and one in the source rather than one in the generation.  The tokens after it
are the *chunk*: n of them, or as many as there are.  A short chunk becomes part of the query, and
matching starts again.  Where nothing matches, the bigram gives one token; where it knows none, the
proposal ends.

Differences from the paper:
 1. Section 3.3 matches "the initial input (or existing generation)"; Listing 1 searches the
    encoder's input alone.  Here both are searched.  A decoder-only model's prompt is the beginning
    of its generation.
 2. Listing 1 also counts a match that ends at the end of the text, and then returns an empty chunk.
    Here only a match with a token after it counts.
 3. Listing 1 leaves a short chunk short and returns None where nothing matches.  Here proposing n
    tokens equals proposing one token n times and appending each to the draft.
 4. Draft tokens are part of the query only.  They may be wrong, so they are not searched.
 5. No match extends from the source into the generation.
 6. Each proposed token has a confidence: how often the token after a match of that length was right
    on held-out text.  Where a chunk's first token follows a match of length m, its second token
    follows one of length m + 1, and so on.  Tree builders read the confidence as a probability; the
    paper's chain does not need it.
 7. The paper's bigram comes from Wikipedia; build_bigram() counts any corpus.
 8. The paper proposes ten tokens everywhere, and so does this file.  Where few matches are right
    that may be slower than no proposal; beyond/priced.py chooses a length by confidence and price.
 9. Listing 1's last torch.tensor() names no device, so on a GPU it fails where the whole query
    matches.  Here all tensors are on the query's device.

To use this file alone, with a causal LM `target` and a list of token ids `text`.  The last token,
which the target has not read yet, is not committed: it goes in as the draft.

    gram = maxgram.MaxGram()
    gram.commit(text[:-1])
    while len(text) < 60:
        draft, _ = gram.propose(text[-1:], 10)
        logits = target(torch.tensor([text + draft])).logits[0]
        # one token after the text, and one after each token of the draft
        choice = logits[len(text) - 1:].argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == choice[accepted]:
            accepted += 1
        gram.commit(text[-1:] + draft[:accepted])
        text += choice[:accepted + 1]

In verify.generate it is the last stage of a cascade (cascade.py), or the only one:

    cascade.Cascade([], gram=MaxGram(bigram), vocab=V)

    python maxgram.py   # the demo: the index on "abab"; a proposal of source, generation, bigram
"""
from collections import Counter, namedtuple

import torch

N = 10                           # tokens proposed at once (section 5.2)
LENGTHS = 8                      # the confidence table is by length 0 to 8; 8 is "8 or longer"
# How often the token after a match is right, by length of match; 0 is the bigram.  This table is
# used where none is stored beside the bigram.  Measured on held-out Python source and GSM8K.
CONFIDENCE = (0.15, 0.15, 0.45, 0.55, 0.6, 0.65, 0.65, 0.75, 0.8)

NOTHING_TO_CONTINUE = "there is nothing to continue: commit at least one token, or give a draft"

def ints(tokens):
    """A list, or a tensor of any shape, of token ids -> list of ints."""
    if torch.is_tensor(tokens):
        return tokens.flatten().tolist()
    return list(tokens)

# ---------------------------------------------------------------- Appendix A, on tensors
def longest_match(query, text):
    """Listing 1, lines 6 to 22: the longest suffix of `query` that occurs in `text` before a token.

    query (q,), text (T,).  A token below 0 in the text is a separator: it matches no token of
    the query, and a match that ends before it has no following token.
    -> (position of the token after the leftmost occurrence, length of the match), or None.
    One device-to-host sync for each length.
    """
    # Line 6: matches of one token.  Entry j: a match ends at position j, and a token follows.
    matches = (text[:-1] == query[-1]) & (text[1:] >= 0)                     # (T - 1,)
    if not matches.any():
        return None
    length = 1
    while length < min(len(query), len(matches)):
        # Line 10: is the token before a match of this length the query's, too?  For a match that
        # ends at j it is text[j - length].
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
    """Listing 1, the "GPU-friendly version", with differences 1 to 6 and 9.

    generation (t,), draft (d,), source (s,), bigram (V,): tensors on one device.
    -> (tokens (up to n,), lengths of their matches: list), the same as MaxGram.propose.  Raises
    ValueError where there is neither a generation nor a draft.  Its time grows with the text and
    with the length of the match.
    """
    empty = generation.new_empty(0)
    draft = empty if draft is None else draft
    source = empty if source is None else source
    # Both texts in one; the -1 between them equals no token.
    between = source.new_full((1,), -1)
    text = torch.cat((source, between, generation))                          # (s + 1 + t,)
    query = torch.cat((generation, draft))                                   # (t + d,)
    if not len(query):
        raise ValueError(NOTHING_TO_CONTINUE)
    tokens, lengths = empty, []
    while len(tokens) < n:
        match = longest_match(query, text)
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
            raise ValueError(f"the corpus holds token id {wrong[0]}, but the vocabulary has "
                             f"{vocab} tokens: give the tokenizer that the ids were made with")
        pairs = zip(ids, ids[1:])
        counts.update(pairs)
    bigram = [0] * vocab
    most = [0] * vocab                           # how often each token's follower was seen
    for (a, b), count in counts.items():
        tie = count == most[a] and b < bigram[a]
        if count > most[a] or tie:
            most[a] = count
            bigram[a] = b
    return bigram

# ---------------------------------------------------------------- the index
# A suffix of the query that an Index holds: the automaton's state for it, and its length.
Suffix = namedtuple("Suffix", "state length")
NOTHING = Suffix(0, 0)
# The end of a query: its last token, and its longest Suffix in each of the two indices.
Place = namedtuple("Place", "last in_source in_generation")

class Index:
    """A suffix automaton of one growing text: from state 0, every substring leads to a state.

    Substrings that end at the same positions of the text share a state, since the same tokens
    follow them.  They are suffixes of one another; a state stores the length of the longest.  The
    automaton of "ababb", after each letter (the first letter is position 0):

        text     new state   its substrings         end at   link
        a        1           a                      0        0
        ab       2           ab b                   1        0
        aba      3           aba ba                 2        1
        abab     4           abab bab               3        2
        ababb    5           ababb babb abb bb      4        6
                 6           b                      1 3 4    0

    A letter makes one new state, of all substrings that end here for the first time.  The state's
    *link* leads to the longest suffix that had occurred before.  After "abab" that is "ab", state
    2, which first ended at position 1.  So the proposal after "abab" is what followed that "ab":
    the letters from position 2 on, "a", then "b".

    The second b in a row splits a state.  "ab" and "b" shared state 2, but "b" now ends at
    position 4, and "ab" does not.  So "b" moves to a new state 6, a clone of state 2.

    For each state s: next[s] is {token: state}; length[s] the length of its longest substring;
    link[s] its link; first[s] the leftmost position where its substrings end.  text: the tokens.
    last: the state of the whole text.

    extend() takes amortised O(1) for each token.  advance() takes one step for each link that it
    follows: a few in ordinary text, but in a text that repeats one token up to as many as there are
    repetitions.
    """

    def __init__(self):
        self.text = []
        self.next = []
        self.length = []
        self.link = []
        self.first = []
        self.last = self.new_state({}, length=0, link=-1, first=-1)  # state 0, the empty string

    def new_state(self, next, length, link, first):
        self.next.append(next)
        self.length.append(length)
        self.link.append(link)
        self.first.append(first)
        return len(self.next) - 1

    def extend(self, tokens):
        """Append committed tokens (list or tensor)."""
        for token in ints(tokens):
            position = len(self.text)
            new = self.new_state({}, length=position + 1, link=0, first=position)
            # Suffixes of the text, the longest first: those that `token` had never followed lead
            # to the new state.
            state = self.last
            while state >= 0 and token not in self.next[state]:
                self.next[state][token] = new
                state = self.link[state]
            # `state` is now the longest that `token` had followed before.  With the token appended
            # it is the longest suffix of the new text that had occurred before.
            if state >= 0:
                self.link[new] = self.state_after(state, token)
            self.last = new
            self.text.append(token)

    def state_after(self, state, token):
        """The state whose longest substring is `state`'s longest one with `token` appended."""
        following = self.next[state][token]
        length = self.length[state] + 1
        if self.length[following] == length:
            return following
        # `following` has longer substrings, which do not end here.  Those up to `length` do, so
        # they move to a clone.
        transitions = dict(self.next[following])
        clone = self.new_state(transitions, length, self.link[following], self.first[following])
        self.link[following] = clone
        while state >= 0 and self.next[state].get(token) == following:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def advance(self, suffix, token):
        """Append `token` to the query -> the query's longest Suffix then.

        suffix: the query's longest Suffix before.
        """
        state, length = suffix
        # Drop tokens on the left until the text holds the rest with `token` after it.
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token not in self.next[state]:
            return NOTHING
        return Suffix(self.next[state][token], length + 1)

    def match(self, suffix):
        """The longest match, given the query's longest Suffix -> (position after it, its length).

        Length 0: nothing matches.
        """
        state, length = suffix
        # Where the suffix first ends at the end of the text, no token follows it.  What its link
        # leads to ends earlier, too.
        if self.first[state] == len(self.text) - 1:
            state = max(self.link[state], 0)                         # -1: the text is empty
            length = self.length[state]
        return self.first[state] + 1, length

# ---------------------------------------------------------------- section 3.3
class MaxGram:
    """Proposals for a growing text: commit() what is final, propose() what comes after a draft.

    bigram: list, each token's most frequent follower, 0 where unknown.
    confidence: list by length of match, 0 for the bigram; the last is for "or longer".
    matching: False proposes by the bigram alone, an ablation.
    """

    def __init__(self, bigram=None, confidence=None, matching=True):
        self.matching = matching
        self.bigram = [] if bigram is None else ints(bigram)
        self.confidence = list(confidence or CONFIDENCE)
        self.reset()

    def reset(self):
        """Forget source and generation."""
        self.source = Index()
        self.generation = Index()
        # The generation's longest suffix that the source holds
        self.in_source = NOTHING

    def commit_source(self, tokens):
        """Append to the source, the encoder's input: it is searched, but not part of the query."""
        assert not self.generation.text, "the source comes before the first commit()"
        self.source.extend(tokens)

    def commit(self, tokens):
        """Append to the generation, which begins with a decoder-only model's prompt."""
        tokens = ints(tokens)
        self.generation.extend(tokens)
        for token in tokens:
            self.in_source = self.source.advance(self.in_source, token)

    def confidence_of(self, length):
        """How often the token after a match of this length is right (0: the bigram's token)."""
        return self.confidence[min(length, len(self.confidence) - 1)]

    def here(self):
        """The end of the generation -> Place."""
        text = self.generation.text
        last = text[-1] if text else None
        whole = Suffix(self.generation.last, len(text))
        return Place(last, self.in_source, whole)

    def after(self, place, token):
        """Append a token to the query that ends at `place` -> Place.  Nothing is searched again."""
        in_source = self.source.advance(place.in_source, token)
        in_generation = self.generation.advance(place.in_generation, token)
        return Place(token, in_source, in_generation)

    def chunk(self, place, most):
        """What follows the longest match, or the bigram's token -> (up to `most` tokens, length).

        length: of the match; 0 for the bigram, or where there is no prediction.
        """
        text = self.source.text
        position, length = self.source.match(place.in_source)
        # The generation's match only where it is longer than the source's
        other_position, other_length = self.generation.match(place.in_generation)
        if other_length > length:
            text, position, length = self.generation.text, other_position, other_length
        if self.matching and length > 0:
            return text[position:position + most], length
        # "In cases where there is no match, we resort to a bigram model".
        follower = self.bigram[place.last] if place.last < len(self.bigram) else 0
        known = follower > 0 and most > 0
        return [follower] if known else [], 0

    def propose(self, draft=(), n=N):
        """What comes after the generation and `draft`, a list of ids -> (up to n ids, lengths).

        lengths: for each id the length of its match, for confidence_of(); 0: the bigram gave it.
        Raises ValueError where there is neither a generation nor a draft.
        """
        assert n >= 0, f"n is {n}: it must not be negative"
        place = self.here()
        new = ints(draft)                        # tokens of the query after `place`
        if place.last is None and not new:
            raise ValueError(NOTHING_TO_CONTINUE)
        tokens, lengths = [], []
        while True:
            for token in new:
                place = self.after(place, token)
            # The next pass appends this chunk to the query, as the first pass does with the draft.
            # Once n tokens are proposed the chunk is empty.
            new, length = self.chunk(place, n - len(tokens))
            if not new:
                return tokens, lengths
            tokens += new
            # Each token of the chunk extends the match by one.
            lengths += range(length, length + len(new))

# ---------------------------------------------------------------- demo
def main():
    """The index on "abab"; a proposal that needs generation, source and bigram."""
    index = Index()
    index.extend(map(ord, "abab"))
    at, length = index.match(Suffix(index.last, 4))
    assert (at, length) == (2, 2), "after abab: what came after the first ab"

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
