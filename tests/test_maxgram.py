"""Max-Gram against a definition by brute force; its index against sets of places; the bigram; a drafter beside it, against
the mixture in Python floats and plain decoding; the file alone."""
import json
import math
import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import test_drawn
import torch
from conftest import plain, random_drafter, shared, target_of
from test_cape import run_the_docstrings_lines

import cape
import maxgram
import pct
import verify
from maxgram import CONFIDENCE, Beside, Index, MaxGram, build_bigram, max_gram_tensor
from runtime import grams
from runtime.grams import measure_confidence, read_bigram

def brute_force(generation, draft, n, source=(), bigram=()):
    """The definition: the longest suffix of the query with a token after it in the text; the bigram."""
    text, query, tokens, lengths = [*source, -1, *generation], [*generation, *draft], [], []
    while len(tokens) < n:
        chunk, length = [], 0
        for size in range(len(query), 0, -1):
            starts = [i for i in range(len(text) - size) if text[i:i + size] == query[-size:]]
            at = [i + size for i in starts if text[i + size] >= 0]
            if at:
                end = len(source) if at[0] < len(source) else len(text)
                chunk, length = text[at[0]:end][:n - len(tokens)], size
                break
        if not chunk and query[-1] < len(bigram) and bigram[query[-1]]:
            chunk = [bigram[query[-1]]]
        if not chunk:
            break
        tokens, query, lengths = tokens + chunk, query + chunk, lengths + [length] * len(chunk)
    return tokens, lengths

def cases(count, seed):
    """(generation, draft, n, source, bigram): 2 to 4 symbols; random, periodic and copying texts."""
    rng = random.Random(seed)
    for _ in range(count):
        symbols = rng.randint(2, 4)

        def text(low, high, symbols=symbols):
            ids = [rng.randrange(symbols) for _ in range(rng.randint(low, high))]
            if ids and rng.random() < 0.2:
                ids = (ids[:rng.randint(1, 4)] * len(ids))[:len(ids)]
            return ids
        source = text(1, 40) if rng.random() < 0.5 else []
        generation, draft = text(1, 40), text(0, 6) if rng.random() < 0.6 else []
        if source and rng.random() < 0.3:
            generation = (generation + source[-rng.randint(1, 5):])[-40:]
        bigram = [rng.choice([0, rng.randrange(symbols + 2)]) for _ in range(rng.randint(1, symbols + 2))]
        bigram *= rng.random() < 0.5
        yield generation, draft, rng.choice([0, 1, 2, 5, 10, 25]), source, bigram

# ---------------------------------------------------------------- proposals
def test_index_equals_brute_force_with_incremental_commits():
    """Proposals leave no trace: the index is what it is where all is committed at once."""
    rng = random.Random(1)
    for generation, draft, n, source, bigram in cases(800, 0):
        g, once, done = MaxGram(bigram), MaxGram(bigram), 0
        for part in (source[:7], source[7:]):
            g.commit_source(part)
        while done < len(generation):
            step = rng.randint(1, 9)
            new = generation[done:done + step]
            g.commit(new if rng.random() < 0.5 else torch.tensor(new))
            done = min(done + step, len(generation))
            if rng.random() < 0.5:
                assert g.propose(draft, n) == brute_force(generation[:done], draft, n, source, bigram)
        assert g.propose(draft, n) == brute_force(generation, draft, n, source, bigram)
        once.commit_source(source)
        once.commit(generation)
        assert vars(g.source) == vars(once.source) and vars(g.generation) == vars(once.generation)
        # Each token depends on the tokens before it alone.
        one_by_one = []
        while len(one_by_one) < n and (token := g.propose(draft + one_by_one, 1)[0]):
            one_by_one += token
        assert g.propose(draft, n)[0] == one_by_one

def test_tensors_equal_brute_force():
    for generation, draft, n, source, bigram in cases(300, 2):
        given = [torch.tensor(x) if x else None for x in (draft, source, bigram)]
        tokens, lengths = max_gram_tensor(torch.tensor(generation), n, *given)
        assert (tokens.tolist(), lengths) == brute_force(generation, draft, n, source, bigram)

def test_tensors_stay_on_their_device():
    """Whatever is made without naming a device lands on the meta device here, and mixing the two raises."""
    text, source, bigram, two, three = map(torch.tensor, ([1, 2, 3, 1], [5, 6], [0, 0], [1, 2], [1, 2, 4]))
    with torch.device("meta"):
        tokens, _ = max_gram_tensor(text, 10, None, source, bigram)
        whole, _ = max_gram_tensor(two, 2, None, three)
    assert tokens.tolist() == [2, 3, 1, 2, 3, 1, 2, 3, 1, 2] and whole.tolist() == [4]

def test_lengths_leftmost_and_the_source_first():
    g = MaxGram()
    g.commit([1, 2, 3, 9, 2, 3, 8, 2, 3])
    # 2 3 is at three places; the last has no follower
    assert g.propose([], 3) == ([9, 2, 3], [2, 2, 2])
    assert g.propose([8], 2) == ([2, 3], [3, 3])                            # 2 3 8
    g.reset()
    g.commit_source([4, 2, 3, 7])
    g.commit([2, 3, 9, 2, 3])
    assert g.propose([], 1) == ([7], [2])                                   # as long in both: the source's
    assert g.propose([9], 1) == ([2], [3])                                  # longer in the generation
    assert g.propose([], 3) == ([7], [2])                                   # the source's end: 7 is nowhere else
    g = MaxGram([0, 0, 0, 0, 0, 0, 0, 5, 0, 4])
    g.commit_source([4, 2, 3, 7])
    g.commit([2, 3])
    assert g.propose([], 9) == ([7, 5], [2, 0])
    # after the bigram's token it matches again
    assert g.propose([9], 9) == ([4, 2, 3, 7, 5], [0, 1, 1, 1, 0])
    # ten tokens unless said otherwise: the last column of Table 2's matrices
    g = MaxGram()
    g.commit([1, 2, 3] * 9)
    assert g.propose()[0] == ([1, 2, 3] * 4)[:10] == max_gram_tensor(torch.tensor([1, 2, 3] * 9))[0].tolist()

def test_nothing_matches_and_nothing_to_continue():
    empty = torch.tensor([], dtype=torch.long)
    g = MaxGram()
    for source in ([], [1, 2]):
        g.commit_source(source)
        with pytest.raises(ValueError, match="commit at least one token, or give a draft"):
            g.propose([], 5)
    with pytest.raises(ValueError, match="commit at least one token, or give a draft"):
        max_gram_tensor(empty)
    g.commit([7])
    assert g.propose([], 5) == ([], []) and g.propose([8], 5) == ([], [])
    g.commit([7, 7])
    assert g.propose([], 5) == ([7] * 5, brute_force([7] * 3, [], 5)[1])
    with pytest.raises(AssertionError, match="before the first commit"):
        g.commit_source([1])
    g.reset()
    g.commit_source([1])
    # A draft before anything is committed
    for source in ([], [1, 2, 3]):
        g = MaxGram([0, 2, 0])
        g.commit_source(source)
        assert g.propose([1], 4) == brute_force([], [1], 4, source, [0, 2, 0])
        slow, lengths = max_gram_tensor(empty, 4, torch.tensor([1]), torch.tensor(source, dtype=torch.long), torch.tensor([0, 2, 0]))
        assert (slow.tolist(), lengths) == g.propose([1], 4)

def test_without_matching_there_is_the_bigram_alone():
    gram = MaxGram([0, 2, 3, 1, 9], matching=False)
    gram.commit([1, 4, 4, 1, 4, 4, 1])
    assert gram.propose([], 5) == ([2, 3, 1, 2, 3], [0] * 5)
    gram.matching = True
    assert gram.propose([], 2)[0] == [4, 4]

# ---------------------------------------------------------------- the index
def all_states(index):
    """{state: its substrings} by following every path from state 0."""
    found, todo = {}, [(0, ())]
    while todo:
        state, path = todo.pop()
        found.setdefault(state, set()).add(path)
        todo += [(after, (*path, token)) for token, after in index.next[state].items()]
    return found

def ends(text, part):
    size = len(part)
    return [i + size - 1 for i in range(len(text) - size + 1) if text[i:i + size] == list(part)]

def test_a_state_is_the_substrings_that_end_at_the_same_places():
    rng = random.Random(5)
    for _ in range(120):
        text = [rng.randrange(rng.randint(1, 3)) for _ in range(rng.randint(1, 14))]
        index = Index()
        index.extend(text)
        states = all_states(index)
        parts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
        assert set().union(*(states[s] for s in states if s)) == parts and states[0] == {()}
        by_ends = {}
        for part in parts:
            by_ends.setdefault(tuple(ends(text, part)), set()).add(part)
        assert sorted(map(sorted, by_ends.values())) == sorted(sorted(states[s]) for s in states if s)
        for s in states:
            longest, shortest = max(states[s], key=len), min(states[s], key=len)
            assert index.length[s] == len(longest)
            if s:
                assert index.first[s] == ends(text, longest)[0]
                assert shortest[1:] in states[index.link[s]], "the link is the first suffix that is not in it"

def test_the_picture_of_ababb():
    """The table in Index's docstring, row by row, from an index that grows letter by letter."""
    row = r"^        ([ab]+)? +(\d)   +([ab ]+?)   +([\d ]+?)   +(\d)$"
    rows = re.findall(row, Index.__doc__, re.MULTILINE)
    assert [row[0] for row in rows] == ["a", "ab", "aba", "abab", "ababb", ""]
    index, states, whole = Index(), {}, ""
    for text, number, substrings, places, link in rows:
        if text:
            index.extend([ord(text[-1])])
            states = {s: {"".join(map(chr, path)) for path in paths} for s, paths in all_states(index).items()}
            whole += text[-1]
            assert whole == text
        state = int(number)
        assert states[state] == set(substrings.split()), text
        assert index.link[state] == int(link)
        assert places == " ".join(map(str, ends(list(whole), max(states[state], key=len))))
    assert states[2] == {"ab"}, "b has parted from it"
    g = MaxGram()
    g.commit(map(ord, "abab"))
    assert g.propose([], 2) == ([ord("a"), ord("b")], [2, 2]), "after abab: what came after the first ab"

class CountingList(list):
    """The transitions of an Index, counting how often a state is looked at."""
    looks = 0

    def __getitem__(self, i):
        CountingList.looks += 1
        return super().__getitem__(i)

def looks(call):
    before = CountingList.looks
    call()
    return CountingList.looks - before

def test_work_is_linear_in_what_is_committed_and_a_proposals_does_not_grow_with_the_context():
    rng, counts = random.Random(0), {}
    for size in (500, 5000, 20000):
        text = [rng.randrange(200) for _ in range(size)]
        text[-12:] = text[100:112]
        g = MaxGram()
        g.commit(text)
        g.generation.next = CountingList(g.generation.next)
        counts[size] = looks(lambda g=g, text=text: [g.propose(text[112:112 + i], 10) for i in range(4)])
    assert max(counts.values()) <= 1.2 * counts[500], counts
    for text in ([rng.randrange(2) for _ in range(8000)], [0] * 8000, [0, 1] * 4000, ([0] * 50 + [1]) * 160):
        index = Index()
        index.next = CountingList(index.next)
        assert looks(lambda index=index, text=text: index.extend(text)) < 12 * len(text)
        assert len(index.link) <= 2 * len(text)

# ---------------------------------------------------------------- bigram and confidence
def test_bigram_equals_a_counter():
    rng = random.Random(0)
    for _ in range(100):
        vocab = rng.randint(2, 7)
        texts = [[rng.randrange(vocab) for _ in range(rng.randint(0, 30))] for _ in range(rng.randint(0, 4))]
        counts = [Counter(b for ids in texts for x, b in zip(ids, ids[1:]) if x == a) for a in range(vocab)]
        best = [min(c, key=lambda b, c=c: (-c[b], b)) if c else 0 for c in counts]
        assert build_bigram(iter(texts), vocab) == best
    # a tie goes to the lower id; 2 -> 3 crosses texts
    assert build_bigram([[1, 2], [3, 1], [1, 3]], 5) == [0, 2, 0, 1, 0]
    for ids in ([1, 5], [-1, 2]):
        with pytest.raises(ValueError, match="give the tokenizer that the ids were made with"):
            build_bigram([ids], 5)

def test_confidence_by_hand():
    # 1 2 3: nothing is proposed.  After 1 2 3 1: "1" is followed by 2, right (length 1); then "1 2": 3,
    # wrong, it is 4 (length 2); after the 4 nothing; after its 1: 2, wrong, the end is 3 (length 1).
    # The second text proposes by the bigram alone: 4 -> 5, right.
    texts = [[1, 2, 3, 1, 2, 4, 1, 3], [4, 5]]
    assert measure_confidence(texts, None, 3) == [0.5, 0.5, 0, 0]
    # The bigram is asked after the first text's only 4 too, where 5 is wrong.
    assert measure_confidence(texts, [0, 0, 0, 0, 5], 3) == [0.5, 0.5, 0, 0]
    assert measure_confidence(texts[1:], [0, 0, 0, 0, 5], 2) == [1, 1, 1]
    # lengths 1 to 4: "3 or longer" is right as well
    assert measure_confidence([[7] * 6], None, 3) == [1, 1, 1, 1]
    assert measure_confidence([[1], []]) is None
    # Lengths never seen take the nearest value: lengths 1 to 4, right, and 5, wrong; then the bigram's alone
    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]
    assert measure_confidence([a + b + [0]], None, 8) == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert measure_confidence([[9, 8], [9, 7]], [0] * 9 + [8], 4) == [0.5] * 5
    # A token's confidence is that of its match's length, the last for "or longer".
    assert MaxGram(confidence=[0.1, 0.2, 0.7]).confidence_of(50) == 0.7
    assert MaxGram(confidence=[0.1, 0.2]).confidence_of(0) == 0.1
    assert len(CONFIDENCE) == maxgram.LENGTHS + 1 and 0 < CONFIDENCE[0] and CONFIDENCE[-1] < 1
    assert [MaxGram().confidence_of(i) for i in (0, 8, 9)] == [CONFIDENCE[0], CONFIDENCE[8], CONFIDENCE[8]]

def test_both_kinds_of_bigram_file(tmp_path):
    path = tmp_path / "b.json"
    # the published form, shorter than the vocabulary
    path.write_text("[0, 2, 1]")
    assert read_bigram(path, 5) == ([0, 2, 1, 0, 0], None)
    path.write_text('{"bigram": [0, 2, 1], "confidence": [0, 0.5, 1]}')
    assert read_bigram(str(path), 3) == ([0, 2, 1], [0, 0.5, 1])
    # Both vocabularies are large enough for its ids: only the fingerprint tells.
    path.write_text(json.dumps({"bigram": [0, 2, 1], "confidence": None, "fingerprint": "a1b2"}))
    assert read_bigram(path, 4) == read_bigram(path, 4, "a1b2") == ([0, 2, 1, 0], None)
    with pytest.raises(ValueError, match="another tokenizer .*a1b2.*c3d4.*make one with") as caught:
        read_bigram(path, 4, fingerprint="c3d4")
    assert "\n" not in str(caught.value)
    for old in ("[0, 2, 1]", '{"bigram": [0, 2, 1], "about": {}}'):
        path.write_text(old)
        assert read_bigram(path, 4, "c3d4") == ([0, 2, 1, 0], None), "files without one cannot be told apart"

@pytest.mark.parametrize("text, why", [(None, "does not exist: make one with"),
    ("[0, 1", "cannot be read .*: make one with"), ("\xff", "cannot be read .*: make one with"),
    ('{"other": 1}', "holds no array of token ids: make one with"), ("7", "holds no array of token ids: make one with"),
    ("[0, true]", "holds no array of token ids: make one with"), ("[0, 1.5]", "holds no array of token ids: make one with"),
    ("[0, 1, 2, 3, 0]", r"a bigram of another vocabulary \(5 entries, .* 4 tokens\): make one with"),
    ("[0, 1, 4]", r"a bigram of another vocabulary \(token id 4, .* 4 tokens\): make one with"),
    ("[0, -1]", r"a bigram of another vocabulary \(token id -1"),
    ('{"bigram": [0], "confidence": [0.1, 1.5]}', "no array of numbers from 0 to 1: make one with"),
    ('{"bigram": [0], "confidence": []}', "no array of numbers from 0 to 1"),
    ('{"bigram": [0], "confidence": [NaN]}', "no array of numbers from 0 to 1")])
def test_bad_bigram_files_say_what_to_do(tmp_path, text, why):
    path = tmp_path / "b.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=why) as caught:
        read_bigram(path, 4)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)

# ---------------------------------------------------------------- beside a neural drafter
class Paths:
    """A drafter with logits of its own after each path; some rows are -inf, and all are asked for once."""
    needs, temperature, vocab = {"hidden": (1,)}, 0.7, 5

    def reset(self):
        self.kept = []

    def begin(self, view):
        self.paths = []

    def keep(self, path):
        self.kept = path

    def expand(self, tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            self.paths.append((self.paths[parent] if parent >= 0 else ()) + (token,))
        return torch.stack([self.row(path) for path in self.paths[-len(parents):]])

    def row(self, path):
        rng = random.Random(hash(path))
        row = [-math.inf if rng.random() < 0.2 else rng.gauss(0, 2) for _ in range(self.vocab)]
        return torch.tensor([-math.inf] * 5 if rng.random() < 0.2 else row, dtype=torch.float64)

def by_hand(row, heard, confidence, agreement):
    """The row of probabilities with Max-Gram's word mixed in, on Python floats.  heard: (tokens, lengths) of one proposal."""
    row = [math.exp(x / Paths.temperature) for x in row.tolist()]
    if not heard[0] or heard[1][0] < 2:
        return [x / max(sum(row), 1e-300) for x in row]
    (word, *_), (length, *_) = heard
    row = [x / sum(row) for x in row] if sum(row) else [0.2] * 5
    w = confidence[min(length, len(confidence) - 1)]
    if agreement:
        p, (a, b, c) = min(max(row[word], 1e-6), 1 - 1e-6), agreement
        rho = 1 / (1 + math.exp(-(a + b * min(length, 8) + c * math.log(p / (1 - p)))))
        w = max(0, (rho - p) / (1 - p))
    return [(1 - w) * x + w * (i == word) for i, x in enumerate(row)]

def test_rows_are_mixtures_and_suggestions_are_proposals_of_one():
    """Whatever tree is asked about, in whatever steps; where the drafter cannot go on, the rest is uniform."""
    rng, mixed = random.Random(0), 0
    for _ in range(150):
        text, confidence = [rng.randrange(5) for _ in range(rng.randint(1, 40))] * rng.choice([1, 2]), [rng.choice([0, rng.random(), 1]) for _ in range(4)]
        agreement = rng.choice([None, (rng.uniform(-2, 2), rng.random(), rng.random())])
        both = Beside(Paths(), MaxGram([1] * 5, confidence), agreement)
        both.begin(SimpleNamespace(tokens=torch.tensor(text)))
        assert both.needs == Paths.needs and both.temperature == 0.7
        paths = []
        for _ in range(rng.randint(1, 4)):
            tokens = [rng.randrange(5) for _ in range(rng.randint(1, 4))]
            parents = [rng.randint(-1, len(paths) - 1 + i) if paths or i else -1 for i in range(len(tokens))]
            for token, parent in zip(tokens, parents):
                paths.append((paths[parent] if parent >= 0 else ()) + (token,))
            p = verify.Greedy().probs(both.expand(torch.tensor(tokens), parents), both.temperature).nan_to_num(0)
            for row, path in zip(p, paths[-len(tokens):]):
                heard = brute_force(text, path, 1, bigram=[1] * 5)
                expected = by_hand(both.drafter.row(path), heard, confidence, agreement)
                assert row.tolist() == pytest.approx(expected, abs=1e-9)
                mixed += heard[1][:1] >= [2]
        assert both.drafter.paths == paths, "the drafter reads each node once"
        one = [brute_force(text, path, 1, bigram=[1] * 5) for path in paths]
        assert both.words == [tokens[0] if tokens and lengths[0] >= 2 else None for tokens, lengths in one]
        # Behind a token below the committed text, or below a node
        parent, most, chain, sure = rng.randint(-1, len(paths) - 1), rng.randint(0, 12), [], []
        start = [*(paths[parent] if parent >= 0 else ()), 3]
        while len(chain) < most and (said := brute_force(text, start + chain, 1))[1][:1] >= [2]:
            chain += said[0]
            sure.append(confidence[min(said[1][0], len(confidence) - 1)])
        assert both.suggest(3, parent, most) == (chain, sure)
        both.keep([0])
        assert both.drafter.kept == [0]
    assert mixed > 300

def test_half_precision_and_large_steps_stay_finite():
    """A word that the drafter all but excludes; a match that is always right."""
    for dtype in (torch.bfloat16, torch.float32):
        drafter = SimpleNamespace(needs={}, reset=int, begin=int, expand=lambda tokens, parents: torch.tensor([[0, sure, -sure, 0]], dtype=dtype))  # noqa: B023
        for sure, agreement, confidence, low, high in ((300.0, None, [0.5], 0.49, 0.51), (300, None, [1], 1, 1), (300, None, [0], 0, 0),
                                                       (300, (0, 1, 0.1), [0], 0.6, 0.7), (-300, (0, 1, 0.1), [0], 1, 1)):
            both = Beside(drafter, MaxGram(confidence=confidence), agreement)
            both.gram.commit([0, 1, 2, 0])
            p = (row := both.expand(torch.tensor([1]), [-1])).float().softmax(-1)[0]
            assert row.dtype == dtype and low <= p[2] <= high and p.sum().item() == pytest.approx(1)

def test_a_node_costs_the_host_the_same_whatever_is_committed():
    """No rescans: looks at the automaton, of a suggestion and of the forward over it, in texts of any length."""
    rng, counts = random.Random(0), {}
    for size in (500, 5000, 20000):
        text = [rng.randrange(200) for _ in range(size)]
        text[-12:] = text[100:112]
        drafter = SimpleNamespace(needs={}, reset=int, begin=id, expand=lambda tokens, parents: torch.zeros(len(parents), 200))
        both = Beside(drafter, MaxGram())
        both.begin(SimpleNamespace(tokens=torch.tensor(text)))
        both.gram.generation.next = CountingList(both.gram.generation.next)
        root = text[112]
        counts[size] = looks(lambda both=both, root=root: both.expand(torch.tensor([root, *both.suggest(root)[0]]), list(range(-1, 10))))
        assert len(both.suggest(root)[0]) == 10
    assert max(counts.values()) <= 1.2 * counts[500] and counts[500] <= 4 * 22, counts

TREES = {"chain": cape.chain, "cape": cape.cape, "beam": cape.beam, "pct": pct.pct, "pct-cost": pct.pct_cost, "graft": pct.graft, "eagle2": pct.eagle2}

@pytest.mark.parametrize("name", ["edd", *(pytest.param(name, marks=pytest.mark.long) for name in ("glide", "medusa"))])
def test_every_tree_gives_plain_decodings_tokens(name):
    """Greedy: the model's own forward; sampling by keyed noise: the draws without a drafter.  The chain is read in one forward."""
    model = shared("llama")
    target, prompt = target_of(model), [3, 1, 4, 1, 5, 3, 1, 4, 1]
    both = Beside(random_drafter(model, name), MaxGram(confidence=[0.2, 0.3, 0.9]))
    greedy, read, own = plain(model, prompt, 12), [], both.drafter.expand
    both.drafter.expand = lambda tokens, parents: read.append(len(parents)) or own(tokens, parents)
    for rule in (verify.Greedy(), verify.Sampled(0.8, top_p=0.9, seed=3)):
        expected = verify.generate(target, None, verify.root_only, prompt, 12, rule).tokens
        assert rule.seed is not None or expected == greedy
        for tree, build in TREES.items():
            read.clear()
            assert verify.generate(target, both, build, prompt, 12, rule).tokens == expected, tree
            assert tree != "graft" or max(read) > 3

@pytest.mark.long
def test_drawn_chains_of_the_mixture_follow_the_target(monkeypatch):
    def make():
        return Beside(test_drawn.Drafter(test_drawn.table(2, test_drawn.VOCAB)), MaxGram(confidence=[0.5]))
    monkeypatch.setitem(test_drawn.CASES, "beside", (make, test_drawn.DRAWN))
    assert min(test_drawn.chi_squares(test_drawn.decoded("beside", range(test_drawn.SEEDS)))) > test_drawn.ALARM

# ---------------------------------------------------------------- how far the words can be trusted
def test_judged_words_by_a_replay_of_the_text():
    """Each word along the target's text as long as those before it in its round were right; p by a fresh drafter."""
    model = shared("llama")
    target, prompts, expected = target_of(model), [[3, 1, 4, 1, 5, 3, 1, 4], [2, 7, 2, 7, 2, 7, 2]], []
    drafter, fresh = random_drafter(model, "vanilla"), random_drafter(model, "vanilla")
    drafter.temperature = 1.5
    judged = grams.judged_words(target, drafter, MaxGram(), prompts, 25)
    for prompt in prompts:
        text, at = prompt + plain(model, prompt, 25), len(prompt)        # text[at]: the root
        while at + 1 < len(text):
            start, right = at, True
            while right and at - start < 11 and at + 1 < len(text):
                said, lengths = brute_force(text[:start], text[start:at + 1], 1)
                at += 1
                if not said or lengths[0] < 2:
                    break
                right = said[0] == text[at]
                fresh.reset()
                fresh.begin(verify.View(torch.tensor(text[:start]), start, {}, {}))
                row = fresh.expand(torch.tensor(text[start:at]), list(range(-1, at - start - 1)))[-1]
                expected.append((lengths[0], (row / 1.5).softmax(-1)[said[0]].item(), right))
    assert [(length, right) for length, _, right in judged] == [(length, right) for length, _, right in expected]
    assert [p for _, p, _ in judged] == pytest.approx([p for _, p, _ in expected], rel=1e-4)
    assert len(judged) > 5 and {right for *_, right in judged} == {True, False}

def test_agreement_finds_the_logistic_that_made_the_words():
    rng, judged = random.Random(0), []
    for _ in range(20000):
        length, p = rng.randint(2, 12), rng.random()
        judged.append((length, p, rng.random() < 1 / (1 + math.exp(1 - 0.4 * min(length, 8) - 0.5 * math.log(p / (1 - p))))))
    found = grams.fit_agreement(judged, lambda length: 0.3)
    assert found["weights"] == pytest.approx([-1, 0.4, 0.5], abs=0.1) and found["words"] == 20000
    assert found["log_loss"] < found["plain"]["log_loss"] and found["ece"] < 0.05 < found["plain"]["ece"]
    # at 0.9 one of two was right, at 0.25 none of one: (2 |0.9 - 0.5| + |0.25 - 0|) / 3
    p, y = torch.tensor([[0.9, 0.9, 0.25], [1, 0, 0]], dtype=torch.float64)
    loss = -(math.log(0.9) + math.log(0.1) + math.log(0.75)) / 3
    assert grams.scores(p, y) == pytest.approx({"ece": 0.35, "log_loss": loss}, abs=1e-4)

def test_agreement_of_a_file(tmp_path):
    path = tmp_path / "b.json"
    assert grams.read_agreement(path, "edd") is None
    path.write_text(json.dumps({"bigram": [0], "agreement": {"edd": {"weights": [1, 0.5, 2]}, "glide": {"weights": [1, 2]}, "vdm": {"weights": [1, 2, None]}}}))
    assert grams.read_agreement(path, "edd") == (1, 0.5, 2) and grams.read_agreement(path, "eagle") is None
    for name in ("glide", "vdm"):
        with pytest.raises(ValueError, match=f"its agreement with {name} is not three numbers: fit it again with checkpoints/make.py agreement"):
            grams.read_agreement(path, name)
    for old in ("[0, 2]", '{"bigram": [0], "confidence": null}'):
        path.write_text(old)
        assert grams.read_agreement(path, "edd") is None, "files of before are read without"

def test_a_stranger_uses_it_alone(tmp_path):
    run_the_docstrings_lines(tmp_path, maxgram, ["maxgram.py"])
