"""Max-Gram: drafting by the longest match between the end of a text and what stands earlier in it.

Cascade Speculative Drafting (arXiv 2312.11462), section 3.3 and Appendix A (Listing 1).

The idea.  A model often repeats phrases of its input and of its own output.  So find the longest
suffix of the generation that occurs earlier, and propose what followed it there; where nothing
matches, propose the bigram's next token.  No neural network runs.

Listing 1 compares every position of the text with the query, once for each length of match, and
each time waits for the device to say whether any is left.  Here the committed text is kept in a
suffix automaton (Blumer et al. 1985; class Index shows one).  A proposal visits a few of its
states, however long the context is.

    paper              shape      name here
    encoder_ids        (s,)       source: the encoder's input, where there is one
    input_ids          (t + d,)   query: the committed generation, the draft, the proposal so far
    matches            (T - 1,)   matches, in longest_match(): where one ends and a token follows
    n                  int        n: tokens proposed at once (10, section 5.2)
    bigram             (V,)       bigram: list, the next token of each token, 0 where unknown

A match is a suffix of the query, one token or longer, that occurs in the committed text with at
least one token after it: the longest such suffix, and of its occurrences the leftmost, the source
before the generation.  The tokens after it are the chunk.  A chunk may meet the end of its text
before n tokens.  Then matching starts again, with the chunk as part of the query.  Where nothing
matches and the bigram knows nothing either, the proposal ends.

Differences from the paper:
 1. Section 3.3 matches "the initial input (or existing generation)"; the listing searches the
    encoder's input alone.  Here both are searched.  A decoder-only model's prompt is the beginning
    of its generation.
 2. The listing returns what follows the longest match even if nothing follows it; here a match has
    a following token.
 3. How a short chunk is filled, and whether matching is tried again after a token of the bigram, is
    not said.  Here each token depends on the tokens before it alone: n tokens are n proposals of
    one, each appended to the draft.
 4. Only committed tokens are searched, not the draft: it may be wrong.
 5. Source and generation have an automaton each, as if they were one text with a token between them
    that nothing equals.
 6. The confidence of a token is how often matches of its length were right on held-out text.  Tree
    builders read it as a probability; the paper's chain has no use for it.
 7. The paper's bigram comes from Wikipedia; build_bigram() counts any corpus.
 8. The paper proposes ten tokens everywhere, as this file does.  Where few matches are right that
    may be slower than no proposal; beyond/priced.py chooses a length by confidence and price.

To use this file alone, with a causal LM `target` and a list of token ids `text`.  The last token,
which the target has not read yet, is not committed: it goes in as the draft.

    gram = maxgram.MaxGram()
    gram.commit(text[:-1])
    while len(text) < 60:
        draft, _ = gram.propose(text[-1:], 10)
        logits = target(torch.tensor([text + draft])).logits[0]      # (t + n, V)
        # n + 1 tokens: after the text, and after each token of the draft
        choice = logits[len(text) - 1:].argmax(-1).tolist()
        n = 0
        while n < len(draft) and draft[n] == choice[n]:
            n += 1
        gram.commit(text[-1:] + draft[:n])
        text += choice[:n + 1]

In verify.generate it is the last stage of a cascade (cascade.py), or the only one.

    cascade.Cascade([], gram=MaxGram(bigram), vocab=V)

    python maxgram.py         # the demo: the index on "abab"; one proposal from all three sources
"""
from collections import Counter, namedtuple

import torch

N = 10                           # tokens proposed at once (section 5.2)
LENGTHS = 8                      # the confidence table has lengths 0 to 8, the last for "or longer"
# How often the first proposed token is right, by length of match; 0 is the bigram.  Used where no
# table is stored beside the bigram.  Measured on held-out Python source and GSM8K, rounded.
CONFIDENCE = (0.15, 0.15, 0.45, 0.55, 0.6, 0.65, 0.65, 0.75, 0.8)

NOTHING_TO_CONTINUE = "there is nothing to continue: commit at least one token, or give a draft"

def ints(tokens):
    """A list, or a tensor of any shape, of token ids -> list of ints."""
    if torch.is_tensor(tokens):
        return tokens.flatten().tolist()
    return list(tokens)

# ---------------------------------------------------------------- Appendix A, on tensors
def longest_match(query, text):
    """Listing 1, lines 6 to 22: the longest suffix of `query` that a token follows in `text`.

    Of its occurrences the leftmost.  query (q,), text (T,); a token below 0 matches nothing and
    follows nothing.  One device-to-host sync for each length.
    -> (place of the token after it, length), or None.
    """
    # Line 6: matches of one token, wherever a token follows.  Entry j: a match ends at place j.
    matches = (text[:-1] == query[-1]) & (text[1:] >= 0)                     # (T - 1,)
    if not matches.any():
        return None
    length = 1
    while length < min(len(query), len(matches)):
        # Line 10: is the token before a match of this length the query's, too?
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
    """Listing 1, the "GPU-friendly version", corrected and completed: what MaxGram.propose gives.

    generation (t,), draft (d,), source (s,), bigram (V,): tensors on one device.
    -> (tokens (up to n,), lengths: list).  Raises ValueError where there is nothing to continue.

    What is wrong with the printed listing:
     - its last torch.tensor() names no device: on a GPU the call fails where the whole query
       matches;
     - a longest match at the end of encoder_ids returns an empty chunk, even if a shorter match
       has a following token (where the prompt is encoder_ids, that is a decoder-only model's first
       step);
     - the generation is never searched, though section 3.3 says so;
     - a short chunk stays short; without a match it returns None, and the bigram is missing.
    Its time, as this function's, grows with the text and with the length of the match.
    """
    empty = generation.new_empty(0)
    draft = empty if draft is None else draft
    source = empty if source is None else source
    # One text of both; -1 stands between them, which equals no token.
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
            at, length = match
            # Line 20: what follows the match, which stays inside its text.
            end = len(source) if at < len(source) else len(text)
            chunk = text[at:end]
            chunk = chunk[:n - len(tokens)]
        # Section 3.3: in cases where there is no match, the bigram.
        elif bigram is not None and last < len(bigram) and bigram[last] > 0:
            chunk, length = bigram[last], 0                                  # (1,)
        else:
            break
        tokens = torch.cat((tokens, chunk))
        query = torch.cat((query, chunk))
        lengths += [length] * len(chunk)
    return tokens, lengths

# ---------------------------------------------------------------- the bigram
def build_bigram(sequences, vocab):
    """The most frequent follower of each token -> list (vocab,), 0 where none was seen.

    sequences: iterable of lists of ids, one a document: the last token of a document is not
    followed by the first of the next one.  Of equally frequent followers the lowest id is taken.
    0 means "unknown" in the published files, so a token whose best follower is token 0 has none.
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
    most = [0] * vocab                           # of each token: how often its follower was seen
    for (a, b), count in counts.items():
        tie = count == most[a] and b < bigram[a]
        if count > most[a] or tie:
            most[a] = count
            bigram[a] = b
    return bigram

# ---------------------------------------------------------------- the index
# The longest suffix of a text that an Index holds: the automaton's state, the suffix's length.
Suffix = namedtuple("Suffix", "state length")
NOTHING = Suffix(0, 0)
# The end of a text: its last token, and its longest Suffix in each of the two indices.
Place = namedtuple("Place", "last in_source in_generation")

class Index:
    """A suffix automaton of one growing text: from state 0 every substring leads to a state.

    Substrings that end at the same places of the text share a state: what follows them is the same.
    They are suffixes of one another, so a state stores only the longest one's length.  "ababb",
    letter by letter (place 0 is the first letter):

        text     new state   its substrings         end at   link
        a        1           a                      0        0
        ab       2           ab b                   1        0
        aba      3           aba ba                 2        1
        abab     4           abab bab               3        2
        ababb    5           ababb babb abb bb      4        6
                 6           b                      1 3 4    0

    A letter makes one new state: all substrings that end here for the first time.  A state's *link*
    leads to the longest suffix that was there before.  After "abab" that is "ab", which ends at 1,
    too.  So what comes after "abab"?  The link leads to "ab", which first ended at place 1; after
    it stood "a", then "b": that is the proposal.

    The second b in a row splits a state: "b" ends at 4, and "ab" does not.  So "b" moves from
    state 2 to state 6, its clone.

    Of state s: next[s] {token: state}; length[s] of its longest substring; link[s]; first[s], the
    leftmost place where its substrings end.  last: the state of the whole text.  text: its tokens.

    extend() costs amortised O(1) a token.  A proposal costs O(1) a token, plus a step for each link
    that it follows: a few in text, and the length of the repetition in the worst case, a text of
    one token over and over.
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
            place = len(self.text)
            new = self.new_state({}, length=place + 1, link=0, first=place)
            # From the whole text on to shorter suffixes: each now has `token` after it, up to the
            # first that had it before.
            state = self.last
            while state >= 0 and token not in self.next[state]:
                self.next[state][token] = new
                state = self.link[state]
            # That one, followed by the token, is the longest suffix that was there before.
            if state >= 0:
                self.link[new] = self.state_after(state, token)
            self.last = new
            self.text.append(token)

    def state_after(self, state, token):
        """The state whose longest substring is the state's longest one, followed by `token`."""
        following = self.next[state][token]
        length = self.length[state] + 1
        if self.length[following] == length:
            return following
        # Its longer substrings do not end here.  Those up to `length` move to a clone.
        transitions = dict(self.next[following])
        clone = self.new_state(transitions, length, self.link[following], self.first[following])
        self.link[following] = clone
        while state >= 0 and self.next[state].get(token) == following:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def advance(self, suffix, token):
        """The longest suffix of (suffix, then token) that the text holds -> Suffix."""
        state, length = suffix
        # Drop tokens on the left until the text holds the rest with the token after it.
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token not in self.next[state]:
            return NOTHING
        return Suffix(self.next[state][token], length + 1)

    def match(self, suffix):
        """The longest suffix of `suffix` that a token follows -> (place of that token, length).

        Length 0: there is none.
        """
        state, length = suffix
        # A suffix that first ends where the text ends occurs nowhere else.  Its link's does.
        if self.first[state] == len(self.text) - 1:
            state = max(self.link[state], 0)
            length = self.length[state]
        return self.first[state] + 1, length

# ---------------------------------------------------------------- section 3.3
class MaxGram:
    """Proposals for a growing text: commit() what is settled, propose() what comes after a draft.

    bigram: list, the next token of each token, 0 where unknown.
    confidence: list by length of match, the last for "or longer".
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
        # Of the generation, the longest suffix that the source holds.
        self.in_source = NOTHING

    def commit_source(self, tokens):
        """The encoder's input.  Its tokens are searched, and never part of the query."""
        assert not self.generation.text, "the source comes before the first commit()"
        self.source.extend(tokens)

    def commit(self, tokens):
        """Append tokens to the generation, a decoder-only model's prompt included."""
        tokens = ints(tokens)
        self.generation.extend(tokens)
        for token in tokens:
            self.in_source = self.source.advance(self.in_source, token)

    def confidence_of(self, length):
        """How often a token from a match of this length is right (0: from the bigram)."""
        return self.confidence[min(length, len(self.confidence) - 1)]

    def here(self):
        """The end of the generation -> Place."""
        text = self.generation.text
        last = text[-1] if text else None
        whole = Suffix(self.generation.last, len(text))
        return Place(last, self.in_source, whole)

    def after(self, place, token):
        """One token further -> Place.  Both automata go one step; nothing is searched again."""
        in_source = self.source.advance(place.in_source, token)
        in_generation = self.generation.advance(place.in_generation, token)
        return Place(token, in_source, in_generation)

    def chunk(self, place, most):
        """What follows one match, or the bigram's token -> (list of up to `most` tokens, length).

        length: of the match; 0 for the bigram.
        """
        text = self.source.text
        at, length = self.source.match(place.in_source)
        # The longer match of the two; of equals the source's.
        other_at, other_length = self.generation.match(place.in_generation)
        if other_length > length:
            text, at, length = self.generation.text, other_at, other_length
        if self.matching and length > 0:
            return text[at:at + most], length
        # "In cases where there is no match, we resort to a bigram model".
        follower = self.bigram[place.last] if place.last < len(self.bigram) else 0
        known = follower > 0 and most > 0
        return [follower] if known else [], 0

    def propose(self, draft=(), n=N):
        """What comes after the generation and `draft` (list of ids) -> (tokens: up to n, lengths).

        Lists.  lengths[i]: of the match that gave token i, the same for a whole chunk; 0: the
        bigram.  Raises ValueError where there is nothing to continue.
        """
        assert n >= 0, f"n is {n}: it must not be negative"
        place = self.here()
        new = ints(draft)                        # tokens that `place` has not passed yet
        if place.last is None and not new:
            raise ValueError(NOTHING_TO_CONTINUE)
        tokens, lengths = [], []
        while True:
            for token in new:
                place = self.after(place, token)
            # A chunk is read like a draft: matching starts again at its end.
            new, length = self.chunk(place, n - len(tokens))
            if not new:
                return tokens, lengths
            tokens += new
            lengths += [length] * len(new)

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
    # "the quick brown" is in the source; after "jumps" and "over" there is the bigram alone; then
    # "i" is in the generation.
    assert lengths == [3, 3, 0, 0, 1, 1, 1, 1, 1, 1]

    given = [torch.tensor(x) for x in (draft, source, bigram)]
    tensor_tokens, tensor_lengths = max_gram_tensor(torch.tensor(generation), 10, *given)
    assert tensor_tokens.tolist() == tokens, "Listing 1, corrected, gives the same"
    assert tensor_lengths == lengths
    shown = [f"{words[i]}({length})" for i, length in zip(tokens, lengths)]
    print("the quick brown |", *shown)

if __name__ == "__main__":
    main()
