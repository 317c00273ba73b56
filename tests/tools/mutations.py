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
    # the mask, and what a row may glimpse
    ("block mask: >= for >", "return of[:, None] > of[None, :]", "return of[:, None] >= of[None, :]"),
    ("block mask transposed", "return of[:, None] > of[None, :]", "return of[:, None] < of[None, :]"),
    ("the first block looks anywhere", "seen = seen.masked_fill(blind, 0)", "seen = seen.masked_fill(blind & False, 0)"),
    ("late rows glimpse all that is there", "delayed = key < block_start[:, None]", "delayed = key < self.t + 0 * block_start[:, None]"),
    ("late rows glimpse what their round began with", "(place - self.began) % c.block", "(place - self.began) * (self.began > 0)"),
    ("blocks counted from 0 in decoding", "(place - self.began) % c.block", "place % c.block", "glide::test_no_row_is_staler_than_in_training"),
    ("blocks begin where rows end", "        self.began = self.t\n", "        self.began = self.context\n"),
    ("nodes glimpse one key too few", "k, v = kv[self.read]", "k, v = [x[:, :, :-1] if mask is None else x for x in kv[self.read]]"),
    ("the target's first layers for its last", "tuple(range(top - layers + 1, top + 1))", "tuple(range(layers))"),
    ("all layers read the same", "self.read = c.layers_read[m]", "self.read = c.layers_read[0]", "convert::test_glide"),
    # rotary embeddings
    ("theta fixed at 10000", "cos, sin = rotary(position.float(), position)", "cos, sin = (x[None] for x in angles(8, length))"),
    ("queries of the glimpse do not turn", "q = self.rotate_query(q, *turn)", "q = q + 0"),
    ("the drafter's own keys do not turn", "        k = rotate(k, *turn)\n", "", "convert::test_glide"),
    ("a quarter of a turn the other way", "torch.cat((-b, a), -1)", "torch.cat((b, -a), -1)"),
    ("theta to another power", "theta ** (-pair / size)", "theta ** (-2 * pair / size)", "convert::test_glide"),
    # the layer
    ("ReLU for SiLU", "self.down(F.silu(gate) * up)", "self.down(F.relu(gate) * up)", "convert::test_glide"),
    ("a norm before the glimpse", "norm() if c.norm else nn.Identity()", "norm()"),
    ("no norm before the glimpse", "norm() if c.norm else nn.Identity()", "nn.Identity()"),
    ("self-attention without its residual", "x = x + self.o(seen)", "x = self.o(seen)", "convert::test_glide"),
    ("feed-forward without its norm", "self.up(self.norm2(x))", "self.up(x)"),
    ("matrices start with std 2", "nn.init.normal_(p, std=0.02)", "nn.init.normal_(p, std=2.0)"),
    ("the loss predicts its own input", 'batch["ids"].roll(-1, 1)', 'batch["ids"]'),
    ("KL reversed", "p_target = meant.float().softmax(-1)", "p_target, log_p_draft = log_p_draft.exp(), meant.float().log_softmax(-1)"),
    ("its own table in the place of the target's", "if c.theta else tables", "if c.theta or True else tables", "convert::test_longspec"),
    ("a norm before LongSpec's head", "eps=c.eps) if c.last_norm else nn.Identity()", "eps=c.eps)", "convert::test_longspec"),
    ("a window one row short", "place <= self.c.window", "place < self.c.window", "convert::test_longspec"),
    ("a window of all nodes, whoever sees them", "place = mask.cumsum(1)", "place = torch.ones_like(mask).cumsum(1)", "convert::test_longspec"),
    # decoding
    ("rows are lost when the store grows", "self.store = F.pad(self.store, (0, 0, 0, more))", "self.store = F.pad(0 * self.store, (0, 0, 0, more))"),
    ("the tree's mask ends at 64 nodes", "            sees = sees.to(self.device, non_blocking=True)\n", "            sees[:, 64:] = False\n            sees[:, -m:] |= torch.eye(m, dtype=torch.bool)\n",
     "glide::test_a_tree_of_many_nodes_equals_paths_drafted_alone"),
    ("a node's position counts from one", "position = self.t - 1 + sees.sum(1)", "position = self.t + sees.sum(1)"),
    ("a chain at once sees all of itself", "if m > 1 or len(self.lines[-1]) < nodes or self.config.window:", "if len(self.lines[-1]) < nodes:", "edd::test_a_round_costs_the_committed_and_the_drafted_rows edd::test_rows_of_a_tree_equal_paths_drafted_alone"),
    ("accepted rows are not moved", "self.store[..., self.t:self.context, :] = kept", "pass", "edd::test_a_round_costs_the_committed_and_the_drafted_rows edd::test_rows_of_a_tree_equal_paths_drafted_alone"),
    ("accepted rows come from one place before", "rows = torch.tensor(path, device=self.device) + self.t", "rows = torch.tensor(path, device=self.device) + self.t - 1", "edd::test_a_round_costs_the_committed_and_the_drafted_rows edd::test_rows_of_a_tree_equal_paths_drafted_alone"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0"),
    ("confidence is not calibrated", "(logits / self.temperature)", "(logits / 1.0)"),
    ("drafting builds graphs", "    @torch.no_grad()\n    def expand(", "    def expand("),
    ("another target's drafter is taken", "if config.glimpse and sizes[top:top + 1] != [wanted]:", "if False:"),
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
    ('the chosen token is an extra too', 'others = rows.scatter(1, chosen[:, None], 0.0)', 'others = rows'),
    ('one extra too many', 'outside = rank >= K[:, None]', 'outside = rank > K[:, None]'),
    ('the cap counts the token itself', 'before = pad(p[:-1], (1, 0), value=1.0)', 'before = p'),
    ('the cap looks at the parent alone', 'above = before.cumprod(0)', 'above = before'),
    ('the cap looks at the extra alone', 'joint = above[:, None] * p_extras', 'joint = (above[:, None] > 0) * p_extras'),
    ('the cap keeps the least likely', 'return joint.flatten().topk(room)', 'return joint.flatten().topk(room, largest=False)'),
    ('the cap leaves room for the root', 'room = min(extras.numel(), max_nodes - gamma)', 'room = min(extras.numel(), max_nodes - gamma - 1)'),
    ('tokens below an absent one are there', 'least = p.cummin(0).values', 'least = p'),
    ("the chain's parents are not told", 'row = expand(tokens[i], [i - 1])', 'row = expand(tokens[i], [-1])'),
    ('draws by the race reversed', 'return (row / race).argmax(-1)', 'return (row * race).argmax(-1)'),
    ("the loop's generator is not asked", 'generator = getattr(expand, "generator", None)', 'generator = None'),
    ('a drawn chain takes the best', 'chosen, p, rows = draft(expand, root, gamma, pick)', 'chosen, p, rows = draft(expand, root, gamma, best)'),
    ('beam search forgets the score so far', 'score = score + p.log()', 'score = p.log() + 0 * score'),
    ('beam search tells no parents', 'above = [parents[node] for node in frontier]', 'above = [-1 for node in frontier]'),
    ('extras hang below their token', 'torch.cat((parents, index // K))', 'torch.cat((parents, index // K + 1))'),
    ('extras of probability zero are there', 'extra = (joint > 0).sum()', 'extra = (joint >= 0).sum()'),
    ('tokens of probability zero are there', 'drafted = (least > 0).sum()', 'drafted = (least >= 0).sum()'),
    ('p_draft has rows of tokens that are not there', 'return Tree(tokens, parents, rows[:n])', 'return Tree(tokens, parents, rows)'),
    ('deeper than there is room', 'return min(gamma, getattr(expand, "remaining", gamma))', 'return gamma'),
    ('logits are taken', 'assert highest < 1.01', 'assert highest < 1e9'),
    ('logarithms are taken', 'assert lowest >= 0', 'assert lowest > -1e9'),
]

# ---------------------------------------------------------------- EDD and its baselines
EDITS["edd"] = [
    ("block mask: >= for >", "hidden = of[:, None] > of[None, :]", "hidden = of[:, None] >= of[None, :]"),
    ("tokens of other blocks are seen", "tokens = of[:, None] == of[None, :]", "tokens = of[:, None] >= of[None, :]"),
    ("a token does not see itself", "tokens.tril()", "tokens.tril(-1)"),
    ("KL reversed", "F.kl_div(log_p_draft, p_target, reduction", "F.kl_div((p_target + 1e-9).log(), log_p_draft.exp(), reduction"),
    ("KL off by one row", '        meant = batch["logits"]\n', '        meant = batch["logits"].roll(1, 1)\n'),
    ("cross entropy unshifted", 'meant = batch["ids"].roll(-1, 1)', 'meant = batch["ids"]'),
    ("vdm is an EDD", '"vdm": {"encoding": False}', '"vdm": {}'),
    ("edd-ce learns by KL", '"edd-ce": {"loss": "ce"}', '"edd-ce": {}'),
    ("vdm-ce learns by KL", '"vdm-ce": {"encoding": False, "loss": "ce"}', '"vdm-ce": {"encoding": False}'),
    ("edd-fixed draws its blocks", '"edd-fixed": {"blocks": (5, 5)}', '"edd-fixed": {}'),
    ("the final norm is a copy", "        self.norm.apply(model._init_weights)\n", ""),
    ("the layer is drawn otherwise", "        layer.apply(model._init_weights)\n", ""),
    ("the embedding is the target's own", "self.embed = self.own(model.get_input_embeddings())", "self.embed = model.get_input_embeddings()"),
    ("the head is fresh", "self.head = self.own(model.get_output_embeddings())", "self.head = self.own(model.get_output_embeddings()).apply(model._init_weights)"),
    ("the target's head learns", "head = model.get_output_embeddings().weight.detach()", "head = model.get_output_embeddings().weight"),
    ("the target's embedding learns", "torch.no_grad()(model.get_input_embeddings().forward)", "model.get_input_embeddings().forward"),
    ("the last block length is never drawn", "integers(low, high + 1)", "integers(low, high)"),
    ("the baselines read EDD's layer", '"eagle": {"kind": "eagle", "hidden": -1, ', '"eagle": {"kind": "eagle", '),
    ("EAGLE reads the feature it predicts", "self.inputs(ids[:, 1:], feature[:, :-1])", "self.inputs(ids[:, 1:], feature[:, 1:])"),
    ("EAGLE's regression is L2", "F.smooth_l1_loss(", "F.mse_loss("),
    ("EAGLE keeps its first norm", "self.layer.input_layernorm = nn.Identity()", "pass", "convert::test_eagle"),
    ("EAGLE's balance does not follow the width", "(PUBLISHED / width) ** 0.5", "1.0"),
    ("EAGLE drafts from the parent's parent", "[parent + 1 for parent in parents]", "[max(parent, 0) for parent in parents]", "convert::test_eagle"),
    ("MEDUSA: ReLU for SiLU", "[f + F.silu(w(f))", "[f + F.relu(w(f))"),
    ("MEDUSA without its residual", "[f + F.silu(w(f))", "[F.silu(w(f))"),
    ("MEDUSA's heads are shifted by one less", 'following = batch["ids"].roll(-2 - k, 1)', 'following = batch["ids"].roll(-1 - k, 1)'),
    ("MEDUSA's deepest head goes on for ever", "min(depth, self.config.heads)", "min(depth, self.config.heads - 1)"),
    ("MEDUSA's heads count from the root's parent", "[len(line) - 1 for line in", "[len(line) for line in"),
    ("rows are lost when the cache grows", "F.pad(kept, (0, 0, 0, more))", "F.pad(0 * kept, (0, 0, 0, more))"),
    ("a node's position counts from one", "self.t - 1 + sees.sum(1)", "self.t + sees.sum(1)"),
    ("pending rows are lost", "self.pending.append(self.prompt(view))", "self.pending = [self.prompt(view)]"),
    ("pending rows see nodes of the tree", "mask[p:, self.t:] = sees", "mask[:, self.t:] = True"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0"),
    ("confidence is not calibrated", "(logits / self.temperature)", "(logits / 1.0)"),
    ("a smaller target is taken", "or config.hidden > c.num_hidden_layers:", "or False:"),
    ("paper: the fourth-to-last layer", "HIDDEN = -4 ", "HIDDEN = -3 "),
    ("paper: blocks from 5 on", "BLOCKS = (5, 10)", "BLOCKS = (4, 10)"),
    ("paper: blocks up to 10", "BLOCKS = (5, 10)", "BLOCKS = (5, 9)"),
    ("paper: five heads of MEDUSA", "HEADS = 5 ", "HEADS = 4 "),
    ("paper: MEDUSA's decay", "DECAY = 0.8 ", "DECAY = 0.9 "),
    ("paper: EAGLE's w_cls", "W_CLS = 0.1 ", "W_CLS = 0.2 "),
    ("paper: EAGLE's width", "PUBLISHED = 4096 ", "PUBLISHED = 2048 "),
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
    ('paper: k is cumulative', 'counts = [after - before for before, after in zip([0] + row, row)]', 'counts = row', 'cascade::test_table_2s_form_is_algorithm_1s_matrix'),
    ("an inner limit of the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = min(limit, cur_target.capacity)', 'cascade::test_no_draft_is_longer_than_asked'),
    ('no limit but the context', 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = cur_target.capacity', 'cascade::test_no_draft_is_longer_than_asked'),
    ("no limit but the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = limit - 1', 'cascade::test_a_stage_stops_at_its_context_and_smaller_ones_go_on'),
    ('> for >= at capacity', 'and len(gen) <= cur_limit:', 'and len(gen) < cur_limit:', 'cascade::test_no_draft_is_longer_than_asked'),
    ("drafts beyond their reviewer's context", 'cascade_step(cur_target, cur_draft_list, cur_k, gen, cur_limit, review', 'cascade_step(cur_target, cur_draft_list, cur_k, gen, limit, review', 'cascade::test_no_draft_is_longer_than_asked'),
    ('a stage adds one too many', 'while len(gen) < enough and', 'while len(gen) <= enough and', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('the count restarts, as it is printed', 'cur_prefix = len(gen)\n', 'cur_prefix = prefix\n', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('inner K of the wrong rows', 'cur_k = [row[i + 1:] for row in K[i + 1:]]', 'cur_k = [row[i + 1:] for row in K[i:]]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('inner reviews by the wrong stages', 'cur_draft_list = draft_list[i + 1:]', 'cur_draft_list = draft_list[i + 1:i + 2]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('a review of one draft too few', 'review(logits, gen, prefix)', 'review(logits, gen, prefix + 1)', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('Max-Gram does not see the first draft', 'draft = gen.tokens[gen.settled:]', 'draft = gen.tokens[gen.settled + 1:]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ("Max-Gram's runs are not counted", 'gen.runs[max_gram] += 1', 'pass', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('a chain of the last round stays', 'self.paths = None  ', "self.paths = getattr(self, 'paths', None)  ", 'cascade::test_each_round_has_a_chain_of_its_own'),
    ('lenience is ignored, greedy', 'elif self.lenience > 1:', 'elif False:', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('lenience is ignored, drawn', '    if lenience > 1:\n', '    if False:\n', 'cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram'),
    ('lenience of the wrong row', 'kept = p_draft[x] <= lenience * p_reviewer[i, x]', 'kept = p_draft[x] <= lenience * p_reviewer[i + 1, x]', 'cascade::test_chain_and_runs_against_a_plain_recursion'),
    ('lenience: < for <=', 'kept = p_draft[x] <= lenience * p_reviewer[i, x]', 'kept = p_draft[x] < lenience * p_reviewer[i, x]'),
    ('lenience on the wrong side', 'accepted = torch.minimum(p_draft, l * p_reviewer)', 'accepted = torch.minimum(l * p_draft, p_reviewer)', 'cascade::test_one_lenient_review_exactly'),
    ('what is rejected is not drawn again', 'return accepted + rejected * left', 'return accepted / accepted.sum(-1, keepdim=True)', 'cascade::test_one_lenient_review_exactly'),
    ('the residual without p_draft', 'left = (p_reviewer - p_draft).clamp(min=0)', 'left = p_reviewer.clone()', 'cascade::test_one_lenient_review_exactly'),
    ("Max-Gram's row is certain of another token", 'row[token] = 1\n', 'row[token - 1] = 1\n', 'cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram'),
    ('a confidence that does not sum to one', 'row.fill_((1 - said) / (self.vocab - 1))', 'row.fill_((1 - said) / self.vocab)', 'cascade::test_trees_see_the_chains_distributions_and_nothing_off_it'),
    ("the decoder's cache outlives its encoder", '        self.reset()\n        ids = torch.tensor([ids], device=self.device)', '        ids = torch.tensor([ids], device=self.device)', 'cascade'),
    ("a stage's encoder reads nothing", 'stage.encode(ids)\n', 'stage.encode(ids[:1])\n'),
    ('Max-Gram does not read the source', 'self.gram.commit_source(ids)', 'pass', 'cascade'),
    ('Theorem 4.1 as equation 6 prints it', 'return 1 + (x - 1) * geometric(alpha * x, k)', 'return x + (x - 1) * geometric(alpha * x, k)', 'ewif'),
    ('Corollary 4.2 with one draft too few', 'return geometric(alpha, k) / (c * k + 1)', 'return geometric(alpha, k - 1) / (c * k + 1)', 'ewif bench'),
    ('Theorem 4.3 with n + 1 rounds', 'geometric(phi(alpha, alpha_inner, k), n - 1)', 'geometric(phi(alpha, alpha_inner, k), n)', 'ewif'),
    ('Theorem 4.3: inner runs are free', 'return tokens / (1 + n * c1 + n * k * c2)', 'return tokens / (1 + n * c1 + n * c2)', 'ewif'),
    ("Theorem 4.5 without the target's run", 'return tokens / (1 + sum(costs))\n\ndef d_ewif', 'return tokens / sum(costs)\n\ndef d_ewif', 'ewif'),
    ('SWI without the costs', 'sum(count * c for count, c in zip(runs, costs))', 'sum(runs)', 'ewif cascade'),
    ('the default k', 'k = [1] * wanted if k is None', 'k = [2] * wanted if k is None'),
    ('sum: Max-Gram adds what is left', 'propose(cur_target, gen, min(k_i, limit - cur_prefix))', 'propose(cur_target, gen, min(enough, limit) - cur_prefix)'),
    ('sum: Max-Gram is always asked', 'if cur_prefix < enough:', 'if True:'),
    ('sum of all k', 'prefix + sum(K[0][:i + 1])', 'prefix + sum(K[0])'),
    ('Max-Gram beyond the limit', 'min(k_i, limit - cur_prefix)', 'k_i'),
    ('rows beside other tokens', 'rows[:len(new)])\n\ndef review_greedy', 'rows[1:1 + len(new)])\n\ndef review_greedy'),
    ('drafts of the last round stay', 'gen.replace(gen.settled, new, [None] * len(new))', 'gen.replace(len(gen), new, [None] * len(new))'),
    ('lenience for Max-Gram, drawn', 'l = [lenience if torch.is_tensor(p) else 1.0 for p in gen.probs[first:]]', 'l = [lenience for p in gen.probs[first:]]'),
    ("rows are p, not q'", 'rows[:-1] = lenient_distribution(rows[:-1], p_draft, l[:, None])', 'lenient_distribution(rows[:-1], p_draft, l[:, None])'),
    ('drawn chains are not drawn', 'generator = expand.generator if drawn and warp else None', 'generator = None', 'drawn'),
    ('drawn where nothing is', 'if drawn and warp else None', 'if drawn else None'),
    ('off its path it goes on', 'if drafts[start:after] != path or after == len(drafts):', 'if after >= len(drafts):'),
    ("an encoder's input takes room", '        return self.capacity\n', '        return self.capacity - len(ids) + 1\n'),
    ('what changed counts as unchanged', 'self.same[stage] = min(self.same[stage], first)', 'pass'),
    ('the whole text is searched', 'same = self.same.get(stage, 0)', 'same = 0'),
    ('rows stay where their stage is', 'return stage.sync(self.tokens, rows, same).to(self.device)', 'return stage.sync(self.tokens, rows, same)'),
    ('T5 verifies trees', 'if parents is not None and parents.tolist() != chain:', 'if False:'),
    ('Corollary 4.6: alpha_l is counted', 'return math.prod(alphas[:l - 1]) * after', 'return math.prod(alphas[:l]) * after', 'ewif'),
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
    ("tree mask transposed", "return seen[:n, :n]", "return seen[:n, :n].T", "verify::test_ancestor_mask_against_walking_up"),
    ("a node sees its parent alone", "        parent = parent[parent]\n", "        break\n",
     "verify::test_ancestor_mask_against_walking_up"),
    ("a parent that is no node", ".clamp(max=n)\n", "\n", "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("tree mask ignored", "return F.pad(seen, (cached, 0), value=True)", "return F.pad(seen | True, (cached, 0), value=True)",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("sliding window off by one", "mask & (distance < self.window)", "mask & (distance <= self.window)",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("sliding window by the place in the cache", "key_position = key_position.index_copy(0, slots, position)", "pass",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("positions by the place in the cache", "position = cached + seen.sum(1) - 1\n", "position = slots.clone()\n",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("positions beyond the context", "position = position.clamp(max=self.capacity - 1)", "pass",
     "verify::test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds"),
    ("a capacity beyond the context", "self.capacity = min(capacity or context, context)", "self.capacity = capacity or context",
     "verify::test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds"),
    ("layers of two kinds are taken", 'if kinds not in (["full_attention"], ["sliding_attention"]):', "if False:",
     "verify::test_layers_of_two_kinds_are_refused_by_name"),
    ("rows not moved on commit", "if path != list(range(len(path))):", "if False:",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("values not moved on commit", "                for x in held:\n                    x[:, :, self.length",
     "                for x in held[:1]:\n                    x[:, :, self.length", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("rows are moved from the prefix", "device=self.slots.device) + self.length", "device=self.slots.device)",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden rows not moved on commit", "kept = [rows[path] for rows in self.states]", "kept = [rows[:len(path)] for rows in self.states]",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden rows are shown twice", "self.shown, self.hidden = length, []\n        return", "self.shown = length\n        return",
     "verify::test_greedy_output_is_plain_decoding"),
    ("hidden states of the layer before", "out.hidden_states[k][0]", "out.hidden_states[k - 1][0]",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden states for nobody", "output_hidden_states=bool(wanted)", "output_hidden_states=True",
     "verify::test_hidden_states_are_made_for_who_reads_them"),
    ("rows are lost when the cache grows", "[F.pad(x, below) for x in held]", "[F.pad(0 * x, below) for x in held]",
     "verify::test_sync_keeps_the_common_prefix random cascade::test_stages_forward_only_what_is_new"),
    ("prefix not rolled back in sync", "while same < longest and self.ids[same] == ids[same]:\n            same += 1", "same = longest",
     "verify::test_sync_keeps_the_common_prefix"),
    ("prefix rolled back one token too little", "        self.cache.length, self.shown = same,",
     "        same += same < longest\n        self.cache.length, self.shown = same,",
     "verify::test_sync_keeps_the_common_prefix"),
    ("rows that are wanted are not read again", "longest = min(len(self.ids), len(ids) - rows)", "longest = min(len(self.ids), len(ids) - 1)",
     "verify::test_sync_keeps_the_common_prefix"),
    ("what is known to be there is more than there is", "same = min(same, longest)", "pass",
     "verify::test_sync_keeps_the_common_prefix"),
    ("what was shown is not rolled back", "min(self.shown, same)", "self.shown", "verify::test_sync_keeps_the_common_prefix"),
    # acceptance and sampling
    ("of duplicates the last", "child.setdefault(place, node)", "child[place] = node",
     "verify::test_duplicates_and_the_two_orders_of_nodes"),
    ("acceptance ratio x 1.15", "passed = u < ratio", "passed = u < 1.15 * ratio",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("acceptance ratio x 1.0001", "passed = u < ratio", "passed = u < 1.0001 * ratio",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("acceptance ratio reversed", "ratio = p / tree.p_draft.gather(1, drawn)", "ratio = tree.p_draft.gather(1, drawn) / p",
     "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("residual without p_draft", "residual = (p_target - p_draft).clamp(min=0)", "residual = p_target.clamp(min=0)",
     "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("residual without its positive part", "residual = (p_target - p_draft).clamp(min=0)", "residual = (p_target - p_draft).abs()",
     "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("nothing is left where both are sure", "residual = residual + 1e-30 * p_target", "pass",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("one stream for drafting and accepting", 'f"{seed} {purpose}"', 'f"{seed}"',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("acceptance takes the drafting stream", 'stream(self.seed, f"accept {first}", device)', 'stream(self.seed, f"draft {first}", device)',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("one acceptance stream for all rounds", 'stream(self.seed, f"accept {first}", device)', 'stream(self.seed, "accept", device)',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("keyed noise without position", "stream(seed, position, device)", "stream(seed, 0, device)",
     "verify::test_sampled_text_follows_the_target"),
    ("keyed noise by depth", "keyed_noise(self.seed, first + d, vocab", "keyed_noise(self.seed, d, vocab",
     "verify::test_sampling_over_any_tree_is_plain_sampling_with_the_same_seed"),
    ("noise of another depth", "noise = torch.stack(noise)[depth]", "noise = torch.stack(noise)",
     "verify::test_sampling_over_any_tree_is_plain_sampling_with_the_same_seed random"),
    ("draws by the race reversed", "(p_target / noise).argmax(-1)", "(p_target * noise).argmax(-1)",
     "verify::test_sampled_text_follows_the_target"),
    ("warp order: top-p before temperature", "processors.append(TopPLogitsWarper(top_p))", "processors.insert(0, TopPLogitsWarper(top_p))",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    ("warp order: top-p before top-k", "processors.append(TopPLogitsWarper(top_p))", "processors.insert(1, TopPLogitsWarper(top_p))",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    ("top-k is ignored", "        if top_k:\n", "        if False:\n",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    # the loop
    ("a text ends before the token that ends it", "        self.tokens += new\n",
     "        new = new[:-1] if self.ended and len(new) > 1 else new\n        self.tokens += new\n",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("the output goes on to the end of the run", "while len(new) < len(tokens) and not self.ended:", "while len(new) < len(tokens):",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("criteria see the whole run", "read = text[:, :end + len(new)]", "read = text",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("criteria see the new tokens alone", "read = text[:, :end + len(new)]", "read = text[:, end:end + len(new)]",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("limit off by one", "MaxLengthCriteria(len(ids) + limit)", "MaxLengthCriteria(len(ids) + limit + 1)",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("a streamer is not told the end", "        streamer.end()\n", "        pass\n",
     "verify::test_a_streamer_is_shown_the_prompt_and_each_rounds_tokens"),
    ("a streamer does not get the prompt", "        streamer.put(torch.tensor([ids]))\n", "        pass\n",
     "verify::test_a_streamer_is_shown_the_prompt_and_each_rounds_tokens"),
    ("a tree without its root is taken", "assert tokens[0] == new[-1] and ordered,", "assert ordered,",
     "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("a child before its parent is taken", "assert tokens[0] == new[-1] and ordered,", "assert tokens[0] == new[-1],",
     "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("more tokens than parents are taken", "assert len(tree.tokens) == len(tree.parents),", "assert True,",
     "verify::test_a_tree_that_breaks_the_contract_is_refused"),
    ("drafted beyond the limit", "expand.begin(new[-1], limit - len(out.tokens) - 1, first)", "expand.begin(new[-1], limit - len(out.tokens), first)",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("confidence is not calibrated", "return (logits / temperature).softmax(-1)", "return logits.softmax(-1)",
     "verify::test_what_a_builder_sees"),
    ("sampling shows the drafter unwarped", "        return self.warp(logits)\n", "        return logits.softmax(-1)\n",
     "verify::test_what_a_builder_sees"),
    ("a dead row is not a number", ".nan_to_num(0.0)", "", "verify::test_a_row_of_minus_infinity_is_never_followed"),
    ("the drafter keeps the root alone", "        return path\n\ndef root_only", "        return path[:1]\n\ndef root_only",
     "verify::test_duplicates_and_the_two_orders_of_nodes"),
    ("the drafter keeps the tree's numbers", "drafter.keep(expand.path(drafted, kept))", "drafter.keep(path)",
     "verify::test_duplicates_and_the_two_orders_of_nodes"),
    ("a prompt that fills the context is refused", "return self.capacity - len(ids) + 1", "return self.capacity - len(ids)",
     "verify::test_greedy_output_is_plain_decoding"),
    ("a batch is one text", "if ids.numel() != ids.shape[-1]:", "if False:", "verify::test_mistakes_are_named_in_one_sentence"),
    ("tau counts the prefill", "return sum(self.runs) / max(1, len(self.runs))", "return (1 + sum(self.runs)) / max(1, len(self.runs))",
     "verify::test_greedy_output_is_plain_decoding"),
]

# ---------------------------------------------------------------- any family, static shapes
EDITS["runtime/parts"] = [
    ("a latent's parts change places", "return torch.cat((v, k), -1), k", "return torch.cat((k, v), -1), k", "glide"),
    ("a latent's values are what turns", "return torch.cat((v, k), -1), k", "return torch.cat((v, k), -1), v", "glide"),
    ("longrope by its long table alone", "for end in sorted(min(end or length, length) for end in ends):", "for end in [length]:", "glide"),
    ("each angle stands there twice", "if table.shape[-1] == len(getattr(rotary, \"inv_freq\", ())):", "if False:", "glide"),
    ("all layers turn by the last one's table", "top = layers_read[-1] if layers_read else -1", "top = -1", "glide"),
    ("asking a table leaves a trace", "rotary = copy.deepcopy(getattr(model.get_decoder(), \"rotary_emb\", None))", "rotary = getattr(model.get_decoder(), \"rotary_emb\", None)", "glide"),
    ("the first entries do not turn", "turned = glide.rotate(x[..., :r], cos, sin)", "turned = x[..., :r]", "glide"),
    ("ids that the drafter does not know", "logits = super().expand(tokens.clamp(max=self.config.vocab - 1), parents)", "logits = super().expand(tokens, parents)", "convert::test_glide"),
    ("keys of several sizes", "    if len(sizes) > 1:\n", "    if False:\n", "glide"),
    ("Whisper's heads", "if glimpse and c.num_attention_heads % keys.shape[1]:", "if False:", "glide"),
    ("the head does not start as the target's", "self.head.weight.copy_(", "self.head.weight.clone().copy_(", "glide"),
    ("the norm is not passed on", "config.norm, config.loss = norm, loss", "config.loss = loss", "convert::test_longspec"),
    ("the loss is not passed on", "config.norm, config.loss = norm, loss", "config.norm = norm", "glide"),
    ("the embedding's scale is left out", "target.embed = lambda ids: embed(ids) * scale", "target.embed = embed", "edd"),
    ("the logits' scale is left out", "super().forward(x * self.scale)", "super().forward(x)", "edd"),
    ("the frozen head's scale is left out", "target.raw_head(x * target.scale)", "target.raw_head(x)", "edd"),
    ("soft-capping is left out", "return cap * torch.tanh(logits / cap) if cap else logits", "return logits", "edd"),
    ("embeddings are not proven", 'scale = factor(embed(ids), states[0], "embeddings")', "scale = 1.0", "edd"),
    ("the last layer is not proven", 'factor(self.causal(states[-2]), states[-1], "last layer")', "pass", "edd"),
    ("weights of the target learn", "weights = {name: p.detach() for name, p in self.module.named_parameters()}", "weights = dict(self.module.named_parameters())", "edd"),
    ("a head's bias is lost", "has_bias = getattr(lm_head, \"bias\", None) is not None", "has_bias = False", "edd"),
    ("hooks stay", "            for hook in hooks:\n                hook.remove()\n", "            pass\n", "edd"),
    ("accelerate's forward is copied", "    vars(twin).pop(\"forward\", None)\n", "", "edd"),
    ("damage is a traceback", "raise ValueError(f\"the drafter in {folder} is damaged", "raise RuntimeError(f\"the drafter in {folder} is damaged", "edd"),
]
EDITS["runtime/families"] = [
    ("all layers slide a window", '{kind: window if kind == "sliding_attention" else None for kind in kinds}',
     "{kind: window for kind in kinds}", "families verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("a mask of one kind for all", "masks[kind] = found[\"attention_mask\"]",
     "masks[kind] = masks.get('sliding_attention', found[\"attention_mask\"])", "families"),
    ("RoBERTa's table is as long as it says", "context -= module.padding_idx + 1", "pass", "families"),
    ("MPT's context goes by another name", 'names = ("max_position_embeddings", "max_seq_len")',
     'names = ("max_position_embeddings",)', "families"),
    ("no proof", "        if model not in self.proven:\n", "        self.proven[model] = True\n        if False:\n", "families"),
    ("a proof each time", "        if model not in self.proven:\n", "        if True:\n", "families"),
    ("any error passes", "if error < (1e-3 if exact else 0.1):", "if error < 1e9:", "families"),
    ("half precision is exact", "if error < (1e-3 if exact else 0.1):", "if error < 1e-3:", "families"),
    ("the proof leaves its window", "                config.sliding_window = window\n", "                pass\n", "families"),
    ("the proof ends within a window that the model alone knows", "max([6] + [size + 4 for size in windows])", "6", "families"),
    ("trees for chains", "if not self.verifies_trees and parents is not None and not is_chain(parents):", "if False:",
     "families"),
    ("positions for who takes none", "        if not self.verifies_trees:\n            return {}\n", "", "families"),
    ("flash attention", 'if attention not in (None, "sdpa", "eager"):', "if False:", "families"),
    ("longrope's room is the context's",
     "return min(room, self.turn - len(ids) + 1) if self.turn and len(ids) <= self.turn else room", "return room", "families"),
    ("a node beyond the turning point turns its tree", "self.capacity = min(own, self.turn)", "pass", "families"),
    ("slices beyond the turning point", "            self.slice_size = len(ids)\n", "            pass\n", "families"),
    ("rows of both tables", "        if turned != self.turned:\n            self.reset()\n", "", "families"),
    ("what a stage does not know is any logit", 'value=float("-inf")) if missing', "value=9.0) if missing", "families"),
    ("a stage is shown ids that it does not know", "tokens = tokens.clamp(max=self.known - 1)", "pass", "families"),
    ("hidden states are lost", "self.vocab), *states]", "self.vocab)]", "families"),
    ("the type is the weights'", "self.dtype = model.get_input_embeddings()(token).dtype",
     "self.dtype = next(p for p in model.model.layers[0].mlp.parameters()).dtype", "real"),
    ("rows of a spread model are not moved", "x[:, :, length:end] = x.index_select(2, index.to(x.device))", "pass", "families"),
    ("an encoder-decoder is a decoder", "kind = AnyEncoderDecoder if model.config.is_encoder_decoder else AnyTarget",
     "kind = AnyTarget", "families"),
]
EDITS["runtime/graphs"] = [
    ("padded keys are not masked", "padded = torch.zeros(size, total, dtype=torch.bool",
     "padded = torch.ones(size, total, dtype=torch.bool", "graphs"),
    ("rows that pad see nothing", "        padded[n:, 0] = True\n", "", "graphs"),
    ("rows that pad write over the tree", "behind = torch.arange(keys, keys + more",
     "behind = torch.arange(keys - 1, keys - 1 + more", "graphs"),
    ("rows that pad are returned, too", "[rows[:n] for rows in found]", "found", "graphs"),
    ("more logits than were asked for", "return [first[-asked:], *states]", "return [first, *states]", "graphs"),
    ("a lone row sees nothing", "True if mask is None else mask", "False if mask is None else mask", "graphs"),
    ("void rows of the target are glimpsed", "there = torch.arange(length, device=self.x.device) < t  ",
     "there = torch.arange(length, device=self.x.device) <= length  ", "graphs"),
    ("lengthened rows stay", "        self.x.kv = own\n", "", "graphs"),
    ("GLIDE finds too few rows of its target", "self.x.cache.reserve(self.multiple(keys))", "pass", "graphs"),
    ("a drafter loses its keep()", "        if self.target:\n            asked,", "        if True:\n            asked,",
     "graphs"),
    ("a recording replays its own input", "            kept.copy_(x)\n", "            pass\n", "graphs"),
    ("a recording of few keys serves more", "key = (total, *", "key = (0, *", "graphs"),
    ("a recording serves all sizes", "*(x.shape for x in tensors), *places)", "*places)", "graphs"),
    ("a recording does not know where the rows lie", "*(x.shape for x in tensors), *places)", "*(x.shape for x in tensors))",
     "graphs"),
    ("a recording serves other hidden states", '(total, *self.x.needs.get("hidden", ()), ', "(total, ", "graphs"),
    ("what cannot be recorded stops the program", "except RuntimeError as why:", "except KeyError as why:", "graphs"),
    ("it is tried again", "                self.graphs = False\n", "                return self.own(total, *tensors)\n",
     "graphs"),
    ("chains-only targets are padded", 'if hasattr(x, "run") and getattr(x, "verifies_trees", True):',
     'if hasattr(x, "run"):', "graphs"),
]

# ---------------------------------------------------------------- the benchmark
EDITS["bench"] = [
    ("tokens are held against the fastest plain decoding's", "truth = truth or base", "truth = base",
     "bench::test_tokens_are_held_against_the_exact_ones"),
    ("`drawn` not drawn", 'drawn=tree.name == "drawn"', "drawn=False",
     "bench::test_sampling_runs_and_says_what_it_can_say"),
    ("costs are measured for each tree", "if label not in run.costs:", "if True:", "bench::test_the_whole_grid"),
    ("the first arm is always first", "random.Random(i).sample(arms, len(arms))", "arms",
     "bench::test_arms_take_turns_in_going_first"),
    ("the slower baseline", "base = min(plain, key=", "base = max(plain, key=",
     "bench::test_the_baseline_is_the_faster_plain_arm"),
    ("speedup upside down", "self.results[i].speed() / base.results[i].speed()",
     "base.results[i].speed() / self.results[i].speed()", "bench::test_figures_of_a_row_by_hand"),
    ("a difference is lossless", 'row["lossless"] = not wrong if exact else None',
     'row["lossless"] = True if exact else None', "bench::test_divergence_is_reported_with_its_gap"),
    ("the gap of another token", "(logits[plain[at]] - logits[ours[at]]).item()",
     "(logits.max() - logits[ours[at]]).item() + 1", "bench::test_divergence_is_reported_with_its_gap"),
    ("own-confidence is pct", '"own-confidence": pct.own_confidence', '"own-confidence": pct.pct',
     "bench::test_the_whole_grid"),
    ("pct-cost is pct", '"pct-cost": priced.pct_cost', '"pct-cost": pct.pct',
     "bench::test_what_is_measured_is_not_what_is_given"),
    ("assisted generation without its assistant", "partial(library, run, assistant_model=model)",
     "partial(library, run)", "bench::test_what_transformers_is_asked_for"),
    ("prompt lookup without its lookup", "partial(library, run, prompt_lookup_num_tokens=maxgram.N)",
     "partial(library, run)", "bench::test_what_transformers_is_asked_for"),
    ("generate() greedy where the others sample", "do_sample=a.temperature > 0", "do_sample=False",
     "bench::test_what_transformers_is_asked_for"),
]

# ---------------------------------------------------------------- training
EDITS["train"] = [
    # what rows ask
    ("paper: block length", '("block", int, 5,', '("block", int, 4,', "train"),
    ("paper: one layer", '("layers", int, 1,', '("layers", int, 2,', "train"),
    ("paper: the layer that EDD reads", '("hidden", int, edd.HIDDEN,', '("hidden", int, -3,', "train"),
    ("paper: AdamW's betas", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)",
     "train::test_an_update_is_adamws_of_the_clipped_gradient"),
    ("half a cosine ends at half the rate", "return 0.5 * (1 + math.cos(math.pi *",
     "return 0.5 * (1 + math.cos(0.5 * math.pi *", "train"),
    ("no warm-up", "    if step < ramp:\n", "    if False:\n", "train::test_a_second_stage_starts_from_the_first"),
    ("a loss that is not finite goes on", "if not math.isfinite(loss + norm):", "if not math.isfinite(loss):",
     "train::test_no_update_where_a_loss_or_a_gradient_is_not_finite"),
    ('Ctrl-C does not save', 'if step % a.every == 0 or stopped:',
     'if step % a.every == 0:', 'train::test_resumed_is_bit_for_bit_uninterrupted'),
    ("the loss of each process is for its own rows", ".sum().item()) / processes", ".sum().item())", "parallel"),
    ("Ctrl-C in one process stops that one", "if stopped:\n                stop(", "if asked:\n                stop(",
     "parallel"),
    ('all layers are kept', 'if self.wanted is None or layer_idx in self.wanted:',
     'if True:', 'parallel::test_the_target_keeps_what_somebody_reads'),
]

# ---------------------------------------------------------------- making the stand-in
EDITS["checkpoints/convert"] = [
    ("EAGLE's weights of another target", "if other:", "if False:", "convert"),
    ("what is missing is not named", "    for key, shape in shapes.items():\n        if key not in weights:",
     "    for key, shape in shapes.items():\n        if False:", "convert"),
    ("settings are not compared", "if tbeyond[name] != value:", "if False:", "convert"),
    ("GLIDE's keys are not repeated", "if \".k_proj.\" in key or \".v_proj.\" in key:", "if False:", "convert"),
    ("repeated head after head", "rows.repeat_interleave(config.heads // key_heads, 0)", "rows.repeat(config.heads // key_heads, 1, 1)", "convert"),
    ("LongSpec's window is not kept", "True, False, WINDOW", "True, False, 0", "convert::test_longspec"),
    ("LongSpec's norms change places", 'layer["norm2"] = {"post_cross', 'layer["norm2"] = {"post_self', "convert"),
    ("what LongSpec never reads must be there", "if not re.match(NEVER_READ, key)", "if True", "convert"),
    ("LongSpec beside a target that turns otherwise", "made.own_table.shape[-1] * config.heads != config.width or not", "not", "convert"),
    ("MEDUSA's heads as config.json says", "heads=len(heads)", "heads=int(settings.get('medusa_num_heads', 2))", "convert"),
    ("code in pickles runs", "weights_only=True", "weights_only=False", "convert"),
    ("the glimpse's base is the target's", "config.glimpse_theta = GLIMPSE_THETA", "pass", "convert"),
    ("the epsilon is not taken", 'settings["num_attention_heads"], settings["rms_norm_eps"]', 'settings["num_attention_heads"], 1e-6', "convert"),
]

EDITS["checkpoints/make"] = [
    ("held-out documents are counted into the bigram", "            else:\n                yield ids\n",
     "            if True:\n                yield ids\n", "make"),
]

# ---------------------------------------------------------------- beside the nine files
EDITS["data/read"] = [
    ("categories are no groups", ' or about.get("category")', "", "data train corpus"),
    ("Vicuna's turns are parted by a blank", "ASSISTANT: {{ turn.content }}</s>{% endif %}",
     "ASSISTANT: {{ turn.content }}</s> {% endif %}", "data train corpus"),
    ("choices are not asked", '("question choices", CHOICES),', "", "data train corpus"),
    ("GLIDE's layout is unknown", '"conversation", "messages")', '"messages")', "data train corpus"),
    ("U+2028 ends a line", 'lines = text.split("\\n") if', "lines = text.splitlines() if", "data train corpus"),
    ("a killed write leaves half a file", "        write(part)\n        os.replace(part, path)", "        write(path)",
     "data train corpus"),
    ("what people and models say is swapped", '{"human": "user", "gpt": "assistant"}', '{"human": "assistant", "gpt": "user"}', "data train corpus"),
]
EDITS["runtime/clock"] = [
    ("depth counts the root", "depths = [0]\n        for parent", "depths = [1]\n        for parent", "bench calls"),
    ("measured costs without a warm-up", "if number and all(", "if all(", "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("a measured cost that cannot be is taken", 'not 0.005 <= prices["cost"] <= 1:', 'prices["cost"] < 0:', "bench::test_what_is_measured_is_not_what_is_given"),
    ("Max-Gram pays for forwards", 'prices |= {"cost": 0.0, "cost_range": [0.0, 0.0]}', 'pass', "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("wide trees of chains alone", '{"width": 3, "depth": 3}]', '{"width": 1, "depth": 3}]', "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("fixed counts the chosen token", '/ max(1, total["depth"])) - 1)', '/ max(1, total["depth"])))', "bench calls"),
    ("speed without the tokens", "return len(self.tokens) / self.seconds", "return 1 / self.seconds", "bench calls"),
    ("alpha over what was drafted", 'ratio(total["accepted"], total["tested"])', 'ratio(total["accepted"], total["nodes"])',
     "bench calls"),
    ("alpha_depth by the nodes", 'ratio(row["tau"], row["depth"])', 'ratio(row["tau"], row["nodes"])', "bench calls"),
    ("c by the rounds", 'ratio(ratio(total["draft"], total["draft_forwards"]), step)',
     'ratio(ratio(total["draft"], rounds), step)', "bench calls"),
    ("trigrams for 4-grams", "(out.tokens[i:] for i in range(4))", "(out.tokens[i:] for i in range(3))", "bench calls"),
]
EDITS["runtime/load"] = [
    ("a stage's nodes hang from the text alone", "[k + parent if parent >= 0 else k - 1 for parent", "[k - 1 for parent", "calls train"),
    ("a stage reads what is committed twice", "        self.unread = []\n        return logits", "        return logits", "calls train"),
    ("a stage goes on beyond its context", "if len(self.text) + len(self.tokens) > self.target.capacity:", "if False:", "calls train"),
    ("k ignored", "K = None if k is None else", "K = None if True else", "bench calls train real"),
    ("EOS is ignored", "eos = self.model.generation_config.eos_token_id", "eos = None", "bench calls train real"),
    ("tokenizers need not agree", "if mine[i] != its[i]:", "if False:", "bench calls train real"),
    ("a gated model is looked for here", "if isinstance(why.__cause__, huggingface_hub.errors.GatedRepoError):", "if False:",
     "bench calls train real"),
    ("remote code runs unasked", '"trust_remote_code": trust', '"trust_remote_code": True', "bench calls train real"),
    ("the revision is forgotten", '{"revision": revision,', '{"revision": None,', "bench calls train real"),
    ("the fingerprint ignores the vocabulary", 'for key in a if key in b and key != "probe")',
     'for key in a if key in b and key not in ("probe", "vocabulary"))', "bench calls train real"),
]
EDITS["training/jobs"] = [
    ("a resumed run forgets its learners", "learner.load_state_dict(kept)", "pass", "train parallel"),
    ("a resumed run may change its seed", 'FREE = set("lr ', 'FREE = set("seed lr ', "train parallel"),
]
EDITS["training/walk"] = [
    ("temperatures up to 1.5 alone", "for i in range(89)]", "for i in range(55)]", "train parallel"),
]
EDITS["data/prepare"] = [
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
    ("the paper's values on our side", "                found.append(said.get(heading, \"–\"))\n            found.append(cell)",
     "                found.append(cell)\n            found.append(said.get(heading, \"–\"))", "paper::test_the_paper_s_values_by_hand"),
    ("the paper's rows without one of ours are lost", 'if said["arm"] not in ours:', "if False:",
     "paper::test_the_paper_s_values_by_hand"),
    ("signs are not drawn", "np.random.RandomState(0).randint(0, 2, (DRAWS, n))", "np.ones((DRAWS, n))",
     "paper::test_drawn_signs_give_the_exact_p"),
    ("one-sided", "drawn = np.abs(signs(", "drawn = (signs(", "paper::test_drawn_signs_give_the_exact_p"),
    ("the margin is ignored", ' - spec.get("by", 0))', ")", "paper::test_comparisons_by_hand"),
    ("the factor is ignored", 'x - spec.get("times", 1) * y', "x - y", "paper::test_comparisons_by_hand"),
    ("level counts as more", "if p >= SIGNIFICANT:", "if False:", "paper::test_comparisons_by_hand"),
    ("less counts as more", "Found(MORE if mean > 0 else LESS", "Found(MORE if mean else LESS",
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
    ("what is missing holds", "    if None in verdicts or not found:\n", "    if not found:\n",
     "paper::test_claims_are_held_level_or_not"),
    ("what cannot be said here is judged", '    if claim.get("cannot"):\n', "    if False:\n",
     "paper::test_claims_are_held_level_or_not"),
]
EDITS["figures/probe"] = [
    ("a model that reviews is horizontal", 'not any(any(tokens) for tokens in row["K"][1:])', "True",
     "paper::test_a_prediction_by_hand"),
    ("tokens of the first model alone", "writers += [name] * count", "writers += [next(iter(counts))] * count",
     "paper::test_a_prediction_by_hand"),
    ("the drafted token alone is judged", "zip(one.tokens[1:], confidences, one.new)", "zip(one.tokens[1:], confidences, one.tokens[1:])",
     "analysis::test_calibration_judges_up_to_the_first_rejection"),
    ("what the end cut off was rejected", "judged = drafted if len(one.new) > accepted else accepted", "judged = drafted",
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
EDITS["figures/walltime"] = [
    ("queries are not scaled", "queries *= (heads[1] / heads[0]) ** 0.5", "pass", "walltime::test_growth_keeps_logits_and_text"),
    ("drafters read other layers", "layer = c.layers_read[-1] + further", "layer = c.layers_read[-1]",
     "walltime::test_grown_drafters_draft_the_same"),
    ("the first turn counts", "median(seconds[1:])", "median(seconds)", "walltime::test_medians_leave_out_the_first_turn"),
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
