"""Max-Gram: drafting by the longest match between the end of a text and what was read or written before.

Cascade Speculative Drafting (arXiv 2312.11462), section 3.3 and Appendix A (Listing 1).

The idea.  A model often repeats phrases of its input and of its own output.  So find the longest suffix of
the generation that occurs earlier, and propose what followed it there; where nothing matches, propose the
bigram's next token.  No neural network runs.  Listing 1 compares every position of the text with the query,
once for each length of match, and asks the device each time whether any is left.  Here the committed text is
kept in a suffix automaton (Blumer et al. 1985), walked through on "ababb" at class Index: a proposal visits a
few states, however long the context is.

    paper              shape      name here
    encoder_ids        (s,)       source: the encoder's input, where there is one
    input_ids          (t + d,)   query: the committed generation, then the draft, then the proposal so far
    matches            (T - 1,)   matches, in longest_match(): True where one ends and a token follows
    n                  int        n: tokens proposed at once (10, section 5.2)
    bigram             (V,)       bigram: list, the next token of each token, 0 where unknown

A match is a suffix of the query, one token or longer, that occurs in the committed text with at least one
token after it: the longest suffix, and of its occurrences the leftmost, the source before the generation.
The tokens after it are the chunk.  A chunk that meets the end of its text is filled by matching
again, with the chunk as part of the query, and by the bigram wherever nothing matches; where the bigram knows
nothing either, the proposal ends.

Differences from the paper:
 1. Section 3.3 matches "the initial input (or existing generation)"; the listing searches the encoder's input
    alone.  Here both are searched.  A decoder-only model's prompt is the beginning of its generation.
 2. The listing returns what follows the longest match even if nothing follows it; here a match has a
    following token.
 3. How a short chunk is filled, and whether matching is tried again after a token of the bigram, is not
    said.  Here each token depends on the tokens before it alone: n tokens are n proposals of one, each
    appended to the draft.
 4. Only committed tokens are searched, not the draft: it may be wrong.
 5. Source and generation have an automaton each, which is one text with a token between them that nothing
    equals.
 6. The confidence of a token is how often matches of its length were right on held-out text, for tree
    builders, which read probabilities.  The paper's chain has no use for it.
 7. The paper's bigram comes from Wikipedia; build_bigram() counts any corpus.
 8. The paper's drafters take turns.  Here Max-Gram may also speak beside another, at each node (Beside).

To use this file alone, with a causal LM `target` and a list of token ids `text`.  The last token, which the
target has not read yet, is not committed: it goes in as the draft.

    gram = maxgram.MaxGram()
    gram.commit(text[:-1])
    while len(text) < 60:
        draft, _ = gram.propose(text[-1:], 10)
        logits = target(torch.tensor([text + draft])).logits[0]      # (t + n, V)
        choice = logits[len(text) - 1:].argmax(-1).tolist()          # n + 1: after the text, after each token
        n = 0
        while n < len(draft) and draft[n] == choice[n]:
            n += 1
        gram.commit(text[-1:] + draft[:n])
        text += choice[:n + 1]

In verify.generate it is the last stage of a cascade, or the only one; or it stands beside a drafter, for any
tree, of which pct.graft lets that drafter read Max-Gram's whole chains, each in one forward:

    cascade.Cascade([], gram=MaxGram(bigram), vocab=V)
    verify.generate(target, Beside(drafter, MaxGram()), pct.graft, text)
    python maxgram.py         # the demo: the index on "abab"; one proposal; a drafter beside Max-Gram
"""
from collections import Counter, namedtuple
from types import SimpleNamespace

import torch

N = 10                           # tokens proposed at once (section 5.2)
LENGTHS = 8                      # the confidence table has lengths 0 to 8, the last for "that or longer"
LEAST = 2                        # shorter matches are not heard beside a neural drafter
# How often the first proposed token is right, by length of match; 0 is the bigram.  Used where no table is
# stored beside the bigram.  Measured on held-out Python source and GSM8K, rounded to steps of 0.05.
CONFIDENCE = (0.15, 0.15, 0.45, 0.55, 0.6, 0.65, 0.65, 0.75, 0.8)

NOTHING_TO_CONTINUE = "there is nothing to continue: commit at least one token, or give a draft"

class UserError(ValueError):
    """A user's mistake: one sentence that says what is wrong and what to do."""

def ints(tokens):
    """A list, or a tensor of any shape, of token ids -> list of ints."""
    if torch.is_tensor(tokens):
        return tokens.flatten().tolist()
    return list(tokens)

# ---------------------------------------------------------------- Appendix A, on tensors
def longest_match(query, text):
    """Listing 1, lines 6 to 22: the longest suffix of `query` that a token follows in `text`, leftmost.

    query (q,), text (T,); a token below 0 matches nothing and follows nothing.  Reads the device once for
    each length.  -> (place of the token after it, length), or None.
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
    -> (tokens (up to n,), lengths: list)

    What is wrong with the printed listing: its last torch.tensor() names no device, so on a GPU the call
    fails whenever the whole query matches; a longest match at the end of encoder_ids returns an empty chunk,
    even if a shorter one has a following token (given the prompt as encoder_ids, that is every first step of
    a decoder-only model); the generation is never searched, though section 3.3 says so; a short chunk stays
    short, and without a match None is returned: the bigram is not there.  Its time, as this one's, grows with
    the text and with the length of the match.
    """
    empty = generation.new_empty(0)
    draft = empty if draft is None else draft
    source = empty if source is None else source
    # One text of both; -1 stands between them, which equals no token.
    text = torch.cat((source, source.new_full((1,), -1), generation))        # (s + 1 + t,)
    query = torch.cat((generation, draft))                                   # (t + d,)
    if not len(query):
        raise UserError(NOTHING_TO_CONTINUE)
    tokens, lengths = empty, []
    while len(tokens) < n:
        match = longest_match(query, text)
        last = query[-1:]
        if match is not None:
            at, length = match
            # Line 20: what follows the match, which stays inside its text.
            end = len(source) if at < len(source) else len(text)
            chunk = text[at:end][:n - len(tokens)]
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
    """The most frequent follower of each token, ties to the lower id -> list (vocab,), 0 where none was seen.

    sequences: iterable of lists of ids, one a document: the last token of one is not followed by the first of
    the next.  0 means "unknown" in the published files, so a token whose best follower is token 0 has none.
    Raises UserError where an id is outside the vocabulary.
    """
    counts = Counter()
    for ids in sequences:
        wrong = [x for x in ids if not 0 <= x < vocab]
        if wrong:
            raise UserError(f"the corpus holds token id {wrong[0]}, but the vocabulary has {vocab} tokens: "
                            "give the tokenizer that the ids were made with")
        counts.update(zip(ids, ids[1:]))
    # Of each token the follower that was seen most often; of equally frequent ones the lowest.
    bigram = [0] * vocab
    most = [0] * vocab                                       # how often that was
    for (a, b), count in counts.items():
        tie = count == most[a] and b < bigram[a]
        if count > most[a] or tie:
            most[a], bigram[a] = count, b
    return bigram

# ---------------------------------------------------------------- the index
# Of what was read, the longest suffix that the text holds: the state that it is in, and its length.
Suffix = namedtuple("Suffix", "state length")
NOTHING = Suffix(0, 0)
# Where a text stands: its last token, and its longest suffix that each of the two texts holds.
Place = namedtuple("Place", "last in_source in_generation")

class Index:
    """A suffix automaton of one growing text: every substring leads from state 0, token by token, to a state.

    Substrings that end at the same places of the text share a state: what follows them is the same.  They are
    suffixes of one another, so a state needs its longest one only.  "ababb", letter by letter (place 0 is the
    first letter):

        text     new state   its substrings         end at   link
        a        1           a                      0        0
        ab       2           ab b                   1        0
        aba      3           aba ba                 2        1
        abab     4           abab bab               3        2
        ababb    5           ababb babb abb bb      4        6
                 6           b                      1 3 4    0

    A letter makes one new state, of all the substrings that end here for the first time.  The longest suffix
    that was there before is in the state's *link*: after "abab" that is "ab", which ends at 1, too.  So what
    comes after "abab"?  Follow the link to "ab", which ended at place 1 first; after it stood "a", then "b":
    that is the proposal.  The second b in a row parts a state: "b" ends at 4, "ab" does not, so "b" moves
    from state 2 to a state of its own.

    Of state s: next[s] {token: state}; length[s] of its longest substring; link[s]; first[s], the leftmost
    place where its substrings end.  last: the state of the whole text.  text: its tokens.

    extend() costs amortised O(1) a token.  A proposal costs O(1) a token plus the suffixes it lets go of: a
    few in text, and the length of the repetition in the worst case, a text of one token over and over.
    """

    def __init__(self):
        self.text, self.last = [], 0
        self.next, self.length, self.link, self.first = [], [], [], []
        self.new_state({}, length=0, link=-1, first=-1)              # state 0, the empty string

    def new_state(self, next, length, link, first):
        self.next.append(next)
        self.length.append(length)
        self.link.append(link)
        self.first.append(first)
        return len(self.next) - 1

    def extend(self, tokens):
        """Append committed tokens (list or tensor)."""
        for token in ints(tokens):
            here = self.new_state({}, length=len(self.text) + 1, link=0, first=len(self.text))
            # Each suffix of the text now has the token after it, from the longest to the first that had it.
            p = self.last
            while p >= 0 and token not in self.next[p]:
                self.next[p][token] = here
                p = self.link[p]
            # That one, with the token, is the longest suffix of the new text that was there before.
            if p >= 0:
                self.link[here] = self.state_of(p, token)
            self.last = here
            self.text.append(token)

    def state_of(self, p, token):
        """The state of p's longest substring with `token` after it, and of nothing longer."""
        q = self.next[p][token]
        if self.length[q] == self.length[p] + 1:
            return q
        # q's longer substrings do not end here: those up to this length part from them.
        clone = self.new_state(dict(self.next[q]), self.length[p] + 1, self.link[q], self.first[q])
        self.link[q] = clone
        while p >= 0 and self.next[p].get(token) == q:
            self.next[p][token] = clone
            p = self.link[p]
        return clone

    def advance(self, suffix, token):
        """The longest suffix of (suffix, then token) that the text holds -> Suffix."""
        state, length = suffix
        # Let go of tokens on the left until the text holds the rest with the token after it.
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token not in self.next[state]:
            return NOTHING
        return Suffix(self.next[state][token], length + 1)

    def match(self, suffix):
        """The longest suffix of `suffix` that a token follows -> (place of that token, length or 0)."""
        state, length = suffix
        # What ends at the text's end for the first time occurs nowhere else; its link does, and earlier.
        if self.first[state] == len(self.text) - 1:
            state = max(self.link[state], 0)
            length = self.length[state]
        return self.first[state] + 1, length

class MaxGram:
    """Proposals for a sequence that grows: commit() what is settled, propose() what comes after a draft.

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
        self.source, self.generation = Index(), Index()
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
        """How likely a token is right that comes from a match of this length (0: from the bigram)."""
        return self.confidence[min(length, len(self.confidence) - 1)]

    def here(self):
        """The end of the generation -> Place."""
        last = self.generation.text[-1] if self.generation.text else None
        in_generation = Suffix(self.generation.last, len(self.generation.text))
        return Place(last, self.in_source, in_generation)

    def after(self, place, token):
        """One token further -> Place.  Nothing is searched again: both automata go on from there."""
        in_source = self.source.advance(place.in_source, token)
        in_generation = self.generation.advance(place.in_generation, token)
        return Place(token, in_source, in_generation)

    def chunk(self, place, most):
        """What one match, or (length 0) the bigram puts next -> (list of up to `most` tokens, length)."""
        text = self.source.text
        at, length = self.source.match(place.in_source)
        # The longer match of the two; of equals the source's.
        other_at, other_length = self.generation.match(place.in_generation)
        if other_length > length:
            text, at, length = self.generation.text, other_at, other_length
        if self.matching and length > 0:
            return text[at:at + most], length
        # No match: what the bigram says.
        known = place.last < len(self.bigram) and self.bigram[place.last]
        return [known] if known and most > 0 else [], 0

    def propose(self, draft=(), n=N):
        """What comes after the generation and `draft` (list of ids) -> (tokens: list of up to n, lengths).

        lengths[i]: of the match that gave token i, the same for a whole chunk; 0 for the bigram's.
        """
        assert n >= 0, f"n is {n}: it must not be negative"
        place, unread = self.here(), ints(draft)
        if place.last is None and not unread:
            raise UserError(NOTHING_TO_CONTINUE)
        tokens, lengths = [], []
        while True:
            for token in unread:
                place = self.after(place, token)
            unread, length = self.chunk(place, n - len(tokens))
            if not unread:
                return tokens, lengths
            tokens += unread
            lengths += [length] * len(unread)

# ---------------------------------------------------------------- beside a neural drafter
class Beside:
    """A neural drafter beside Max-Gram: one drafter, by the contract at the top of verify.py, for any tree.

    drafter: a drafter by that contract.  gram: a MaxGram.  agreement: (a, b, c) of weight(), or None.

    Where Max-Gram has a match of LEAST tokens or more, a row, in greedy decoding's softmax at `temperature`,
    is the mixture   (1 - w) p_draft + w delta_word,   w its weight; elsewhere it is the drafter's own row.
    words: of each node, in the order of expand(), the token that Max-Gram puts behind it, or None.
    """

    def __init__(self, drafter, gram, agreement=None):
        self.drafter, self.gram, self.agreement = drafter, gram, agreement
        self.needs = drafter.needs
        self.reset()

    @property
    def temperature(self):
        """At which the drafter's confidence is calibrated, and so is the mixture."""
        return getattr(self.drafter, "temperature", 1.0)

    def reset(self):
        """Forget the sequence."""
        self.drafter.reset()
        self.gram.reset()
        self.places, self.words = [], []

    def begin(self, view):
        """A round starts: both are shown what was committed since the last one."""
        self.drafter.begin(view)
        self.gram.commit(view.tokens)
        self.places, self.words = [], []

    def keep(self, path):
        """Of the drafter's nodes these stay; to Max-Gram they come back as committed tokens."""
        self.drafter.keep(path)

    def place_of(self, token, parent):
        """Where the text stands behind a token below a node (-1: below the committed text) -> Place."""
        above = self.places[parent] if parent >= 0 else self.gram.here()
        return self.gram.after(above, token)

    def word(self, place):
        """What Max-Gram says comes next -> (token, or None; length of the match)"""
        chunk, length = self.gram.chunk(place, 1)
        return (chunk[0], length) if length >= LEAST else (None, length)

    def suggest(self, token, parent=-1, most=N):
        """Max-Gram's chain behind a token below a node -> up to `most` ids, its confidence in each: lists."""
        place, chain, confidences = self.place_of(token, parent), [], []
        token, length = self.word(place)
        while token is not None and len(chain) < most:
            chain.append(token)
            confidences.append(self.gram.confidence_of(length))
            place = self.gram.after(place, token)
            token, length = self.word(place)
        return chain, confidences

    def expand(self, tokens, parents):
        """One forward of the drafter.  tokens (m,), parents [m ints] -> logits (m, V), words mixed in."""
        logits = self.drafter.expand(tokens, parents)
        spoken = []                              # row, word, length of the match
        for row, (token, parent) in enumerate(zip(tokens.tolist(), parents)):
            self.places.append(self.place_of(token, parent))
            word, length = self.word(self.places[-1])
            self.words.append(word)
            if word is not None:
                spoken.append((row, word, length))
        return self.mixed(logits, *zip(*spoken)) if spoken else logits

    def mixed(self, logits, rows, words, lengths):
        """Logits (m, V) whose `rows`, in a softmax at `temperature`, are the mixture.  Lists (k,) each."""
        rows, words = torch.tensor([rows, words], device=logits.device)
        words = words[:, None]                                                   # (k, 1)
        said = logits[rows].to(torch.promote_types(logits.dtype, torch.float32))
        said = said / self.temperature                                           # (k, V)
        # Where the drafter cannot go on, its row is -inf, and any token as likely.
        mute = said.isneginf().all(1, keepdim=True)
        log_p = said.masked_fill(mute, 0.0).log_softmax(1)
        p = log_p.gather(1, words).exp()                                         # (k, 1)
        w = self.weight(p, lengths)                                              # (k, 1)
        # (1 - w) p_draft; of the word there is w more
        mixture = log_p + torch.log1p(-w)
        mixture = mixture.scatter(1, words, (p + w * (1 - p)).log())
        mixture = (self.temperature * mixture).to(logits.dtype)
        return logits.index_copy(0, rows, mixture)

    def weight(self, p, lengths):
        """w, from the drafter's probability p of each word, (k, 1), and the lengths of the matches -> (k, 1).

        Without agreement it is Max-Gram's confidence by length of match.  With it, what the drafter says of
        the word counts: in the mixture the word's probability is to be rho,
            logit rho = a + b length + c logit p.
        """
        if self.agreement is None:
            confidence = [self.gram.confidence_of(length) for length in lengths]
            return p.new_tensor(confidence)[:, None]
        a, b, c = self.agreement
        lengths = p.new_tensor(lengths).clamp(max=LENGTHS)[:, None]
        p = p.clamp(1e-6, 1 - 1e-6)
        rho = torch.sigmoid(a + b * lengths + c * torch.logit(p))
        # rho = (1 - w) p + w, unless the drafter is surer than that by itself
        return ((rho - p) / (1 - p)).clamp(min=0)

# ---------------------------------------------------------------- demo
def demo():
    """The index on "abab"; a proposal that needs generation, source and bigram; a drafter beside Max-Gram."""
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
    # "the quick brown" is in the source; jumps and over have a bigram only; then "i" is in the generation.
    assert lengths == [3, 3, 0, 0, 1, 1, 1, 1, 1, 1]
    tensors = [torch.tensor(x) for x in (draft, source, bigram)]
    slow, same = max_gram_tensor(torch.tensor(generation), 10, *tensors)
    assert slow.tolist() == tokens and same == lengths, "Listing 1, corrected, says the same"
    shown = [f"{words[i]}({length})" for i, length in zip(tokens, lengths)]
    print("the quick brown |", *shown)

    # Beside a drafter that always expects "over": after "the quick brown" Max-Gram's word comes first.
    row = torch.zeros(len(words))
    row[ids["over"]] = 3.0
    drafter = SimpleNamespace(needs={}, reset=int, begin=int, expand=lambda tokens, parents: row.repeat(3, 1))
    both = Beside(drafter, max_gram)
    max_gram.commit_source(source)
    max_gram.commit(generation)
    chain, _ = both.suggest(ids["brown"], most=2)
    p = both.expand(torch.tensor([*draft, *chain]), [-1, 0, 1]).softmax(-1)
    shown = [words[i] for i in p.argmax(-1)]
    assert shown == ["fox", "jumps", "over"], "where the source ends the drafter speaks"
    print("the quick brown |", *shown, "  (beside a drafter)")

if __name__ == "__main__":
    demo()
