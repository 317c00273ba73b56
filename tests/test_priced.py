"""The priced tree and the graft builder against their equations on dicts, against all subtrees of small trees; prices by hand."""
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cape import random_table, table_expand
from test_maxgram import brute_force
from test_pct import paths

import cascade
from beyond import graft, priced
from maxgram import MaxGram
from runtime import measure

def layered(table, first, width, depth, prices, most, suggest=None, room=99):
    """The rule of the docstrings on dicts -> all nodes {path: joint} that are drafted, the paths expanded, the number of forwards.

    most: nodes in a tree.  suggest(path, most): what is suggested after a path, a tuple."""
    found, frontier, expanded, rate, (cost, price, start) = {}, {(): 1.0}, set(), 1.0, prices
    for drafts in range(1, min(depth, room) + 1):
        layer, asked, todo, best = {}, dict(frontier), list(frontier), max(frontier, key=frontier.get)
        todo += hung(best, frontier[best], suggest, price, room - 1) if suggest else []
        for path in todo:
            if path not in frontier and path not in layer:
                break                                                    # the chain is not among the best here
            joint = asked[path] = frontier.get(path, layer.get(path))
            row = table[path[-1] if path else first]
            for x in sorted(range(len(table)), key=lambda x: (-row[x], x))[:width]:
                if row[x] > 0:
                    layer[path + (x,)] = joint * row[x]
        expanded |= set(asked)
        found.update(layer)
        paid = sorted((p for p in found.values() if p >= price * rate), reverse=True)[:most]
        rate = max(rate, (1 + sum(paid)) / (1 + start + cost * drafts + price * len(paid)))
        share = sum(p for p in layer.values() if p >= price * rate) / sum(asked.values())
        frontier = {path: p for path, p in layer.items() if share * p >= price * rate and path not in asked and len(path) < room}
        frontier = dict(sorted(frontier.items(), key=lambda at: -at[1])[:most])
        if not frontier or sum(share * p - price * rate for p in frontier.values()) < cost * rate:
            break
    for path in found.keys() - expanded if suggest else ():
        found.update(hung(path, found[path], suggest, price * rate, room))
    return found, expanded, drafts

def hung(path, joint, suggest, least, room):
    """What is suggested after a path while its probability is `least` or more -> {path: joint}."""
    chain = suggest(path, room - len(path))
    paths = [path + chain[:i + 1] for i in range(len(chain))]
    joints = itertools.accumulate(map(sureness, paths), lambda p, c: p * c, initial=joint)
    return dict(itertools.takewhile(lambda at: at[1] >= least, zip(paths, itertools.islice(joints, 1, None))))

def sureness(path):
    """Of a suggestion in the last token of a path; some are all but sure."""
    return (0.5, 0.7, 0.9, 0.99)[hash(path) % 4]

def best_rate(alone, price, start):
    """A chain {path: joint} that was drafted for nothing, cut where the rate is best -> paths, E, T."""
    p = [1.0, *alone.values()]
    rates = [sum(p[:n + 1]) / (1 + n * price + start * (n > 0)) for n in range(len(p))]
    n = rates.index(max(rates))
    return {*list(alone)[:n]}, sum(p[:n + 1]), 1 + n * price + start * (n > 0)

def test_pct_cost_drafts_by_its_rule_and_keeps_the_most_profitable_subtree():
    """Of what was drafted no other set gives more expected tokens for its time."""
    silent = [0, 0]
    for seed in range(260):
        small = seed < 60
        table, price = random_table(seed, vocab=3 if small else 8), [0.0, 0.03, 0.2, 1.0][seed % 4] if small else [0.005, 0.02, 0.05][seed % 3]
        width, depth, cost = (3, 2, [0.05, 0.2][seed % 2]) if small else (4, 6, [0.05, 0.1, 0.2, 0.4][seed % 4])
        given = []

        def expand(tokens, parents, given=given, table=table):
            for token, parent in zip(tokens.tolist(), parents):
                given.append((given[parent] if parent >= 0 else ()) + (token,))
            expand.calls += 1                                                                          # noqa: B023
            return table[tokens]
        expand.calls = 0
        start, most = [0.0, 0.3, 1.0][seed % 3], 4 if seed % 7 == 6 else 99
        settings, suggest, room = dict(cost=cost, node_price=price, start=start, width=width, depth=depth, max_nodes=most), None, 99
        build = (priced.pct_cost, graft.graft)[seed // 4 % 2]
        if seed % 3 and build is graft.graft:
            suggest, expand.root, expand.remaining = suggesting(seed, table), 0, 2 + seed % 7
            room, expand.drafter = expand.remaining, Suggester(suggest, given)
        if seed % 5 == 0 and most == 99:
            # Drafting gained and took this much lately, in rounds of either kind.
            alone, E, T = best_rate(hung((), 1.0, suggest, price, room) if suggest else {}, price, start)
            expand.memory = {(kind := bool(alone)): (gain := [0.1, 0.6][seed // 5 % 2], took := 0.3)}
            if gain < took * E / T:
                assert {*paths(build(expand, torch.tensor([0]), **settings))} == alone and not expand.calls
                assert expand.memory == {kind: (pytest.approx(gain + 0.003 * (1 - gain)), took)}
                silent[bool(alone)] += 1
                continue
        tree = build(expand, torch.tensor([0]), **settings)
        nodes, expanded, drafts = layered(table.tolist(), 0, width, depth, (cost, price, start), most, suggest, room)
        assert {path[1:] for path in given} >= expanded and expand.calls == drafts, "a suggestion may be read in vain"
        assert max(map(len, given), default=0) <= room and (suggest or {path[1:] for path in given} == expanded)
        kept = paths(tree)
        assert max(map(len, kept), default=0) <= room

        def rate(some):
            return (1 + sum(nodes[n] for n in some)) / (1 + start * (len(some) > 0) + cost * drafts + price * len(some))            # noqa: B023
        assert len(kept) <= most
        ranked = sorted(nodes, key=nodes.get, reverse=True)
        assert rate(kept) >= max(rate(ranked[:n]) for n in range(min(most, len(nodes)) + 1)) - 1e-12, "of each number the most probable are the best"
    assert min(silent) > 3, "the root alone, and chains that are good enough alone"

def suggesting(seed, table):
    """Chains as Max-Gram's would be: mostly the likeliest tokens, up to seed % 6 of them after two paths of three."""
    def suggest(path, most):
        rng, chain = random.Random(hash((seed, path))), ()
        while len(chain) < min(most, seed % 6) and hash(path) % 3:
            here = (path + chain or (0,))[-1]
            chain += (table[here].argmax().item() if rng.random() < 0.8 else rng.randrange(len(table)),)
        return chain
    return suggest

class Suggester:
    """A drafter's suggest(token, parent, most) from suggesting()'s, as graft.Mixture has it; given: paths asked about, root first."""
    def __init__(self, of_path, given):
        self.of_path, self.given = of_path, given

    def suggest(self, token, parent, most, match):
        path = (self.given[parent] if parent >= 0 else ()) + (token,)
        chain = self.of_path(path[1:], most)
        return list(chain), [sureness(path[1:] + chain[:i + 1]) for i in range(len(chain))]

# ---------------------------------------------------------------- whether a round drafts, and Max-Gram alone
def test_a_round_drafts_where_drafting_lately_gained_what_it_took():
    """A drafter that knows nothing: at first, then rarely.  A good one always, unless to start takes more than it gives."""
    for c, cost, start, worth in ((0.2, 0.5, 0.0, False), (0.9, 0.5, 0.0, True), (0.9, 0.5, 9.0, False), (0.9, 0.1, 3.0, True)):
        expand = table_expand(torch.tensor([[c, 0.0]]).repeat(2, 1))
        expand.memory, drafted, means = {}, 0, None
        for _ in range(400):
            before = expand.calls
            n, D = len(priced.pct_cost(expand, torch.tensor([0]), cost=cost, node_price=0.01, start=start).tokens) - 1, expand.calls - before
            drafted += D > 0
            if D:
                now = torch.tensor([sum(c ** (i + 1) for i in range(n)), D * cost + n * 0.01 + start * (n > 0)])
                means = now if means is None else 0.8 * means + 0.2 * now
            else:
                assert n == 0 and means[0] < means[1]
                means[0] += 0.003 * (1 - means[0])
            assert expand.memory == {False: pytest.approx(means.tolist())}
        assert drafted == 400 if worth else 0 < drafted < 30, (c, drafted)

def test_max_grams_chain_has_the_length_of_the_highest_rate():
    """Of all lengths, by brute force; none where nothing pays.  Nobody drafts a forward."""
    rng, lengths = random.Random(0), []
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 30))] * rng.choice([1, 2])
        confidence = sorted(rng.random() for _ in range(5))
        gram, root = MaxGram([0, 2, 3, 1], confidence), rng.randrange(4)
        drafter = cascade.Cascade([], gram=gram, vocab=4)
        drafter.begin(SimpleNamespace(tokens=torch.tensor(text), ids=text, source=None))
        remaining, price, start = rng.randint(0, 12), rng.choice([0.01, 0.05, 0.3]), rng.choice([0.0, 0.1, 0.6])
        expand = SimpleNamespace(drafter=drafter, root=root, remaining=remaining)
        tree = priced.pct_cost(expand, torch.tensor([root]), node_price=price, start=start)
        chain, joints = [], [1.0]
        while len(chain) < remaining and (said := brute_force(text, [root, *chain], 1, bigram=[0, 2, 3, 1]))[0]:
            chain += said[0]
            joints.append(joints[-1] * confidence[min(said[1][0], 4)])
        rates = [sum(joints[:n + 1]) / (1 + n * price + start * (n > 0)) for n in range(len(joints))]
        n = len(tree.tokens) - 1
        assert tree.tokens.tolist() == [root, *chain[:n]] and tree.parents.tolist() == list(range(-1, n))
        assert graft.graft(expand, torch.tensor([root]), node_price=price, start=start).tokens.tolist() == tree.tokens.tolist()
        assert rates[n] == pytest.approx(max(rates))
        lengths.append(n)
    assert 40 < lengths.count(0) < 160 and max(lengths) > 6

# ---------------------------------------------------------------- the prices
# Seconds of a target forward over 1, 2 ... 9 rows: a straight line, and a table of runtime/linear.py
VERIFY = {"a line": [0.1, *(0.1 * (1.3 + 0.02 * n) for n in range(1, 9))], "F.linear": [227, 510, 490, 470, 445, 420, 395, 370, 380]}
SHAPES = [(1, 1), (4, 4), (6, 2), (8, 1)]                                # nodes, forwards of a round

def spent(verify, nodes, forwards, cost, rng, begin=0.02, other=0.15):
    """Twelve rounds; cost, begin and other in target steps.  rng: where another program slows each part by a factor of its own."""
    seconds = [begin * verify[0], forwards * cost * verify[0], verify[nodes], other * verify[0]]
    slowed = [12 * second * (rng.uniform(1, 9) if rng else 1) for second in seconds]
    return priced.Spent(12, nodes * 12, forwards * 12, *slowed)

@pytest.mark.parametrize("name", VERIFY)
def test_prices_in_closed_form(name):
    """s_d / s_t is the mean of the drafter's forwards, whatever shape the target's time has; a third of the turns is disturbed."""
    verify, rng, turns = VERIFY[name], random.Random(0), []
    costs = {"gram": 0.0, "a": 0.005, "b": 0.05, "c": 0.25, "slow": 1.7}
    for number in range(12):
        slow = rng if number % 3 == 0 else None
        of_label = {label: [spent(verify, nodes, D * (label != "gram"), cost, slow) for nodes, D in SHAPES] for label, cost in costs.items()}
        turns.append((spent(verify, 0, 0, 0.0, slow, 0, 0.1), {**of_label, "ended": [priced.Spent(0, 0, 0, 0.0, 0.0, 0.0, 0.0)]}))
    found = priced.prices_of(turns)
    assert set(found) == {*costs}, "a text that ended at once says nothing"
    nodes = [n for n, _ in SHAPES]
    rise = max(0, sum((n - 4.75) * verify[n] for n in nodes) / sum((n - 4.75) ** 2 for n in nodes) / verify[0])
    for label, cost in costs.items():
        # begin, .05 of other, and the step from one row to a few
        start = 0.07 + sum(verify[n] for n in nodes) / 4 / verify[0] - 1 - 4.75 * rise
        expected = {"cost": cost, "node_price": rise, "start": max(0, start)}
        assert {key: found[label][key] for key in expected} == pytest.approx(expected, abs=1e-9)
        assert found[label]["cost_range"][0] <= cost + 1e-9 and cost <= found[label]["cost_range"][1] + 1e-9
    if name == "a line":
        assert rise == pytest.approx(0.02) and start == pytest.approx(0.37)

# Milliseconds of SmolLM2's forward over so many tokens, on 2 cores of an AMD EPYC (figures/costs.py): two take longer than four.
EPYC = {1: 39.8, 2: 46.7, 4: 41.0, 8: 45.9, 16: 56.5, 32: 91.9}

@pytest.mark.parametrize("drafter", [SimpleNamespace(), SimpleNamespace(chain=None)])
def test_a_node_has_a_price_where_two_tokens_take_longer_than_four(drafter):
    """Over trees of a few nodes alone the slope would be 0, and a priced tree would grow without end."""
    decodings = []
    for _, build in measure.rounds_for_prices(drafter):
        tree = build(table_expand(random_table(0)), torch.tensor([0]))
        nodes = len(tree.tokens) - 1
        took = np.interp(1 + nodes, list(EPYC), list(EPYC.values()))
        decodings.append(priced.Spent(1, nodes, 1, 0.0, 0.0, took, 0.0))
    plain = priced.Spent(1, 0, 0, 0.0, 0.0, EPYC[1], 0.0)
    price = priced.prices_of([(plain, {"a": decodings})])["a"]["node_price"]
    over_all = (EPYC[32] - EPYC[1]) / 31 / EPYC[1]
    assert 0.5 * over_all < price < over_all
