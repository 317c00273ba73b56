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
import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", "work", "__pycache__", ".pytest_cache")
LONGEST = 300                                    # seconds of CPU time, after which tests do not end
PACKAGES = ["numpy", "pytest", "tokenizers", "torch", "safetensors.torch",
            *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "t5"))]

EDITS = {}

# ---------------------------------------------------------------- GLIDE
EDITS["glide"] = [
    # the mask, and what is glimpsed
    ("block mask: >= for >", "return block_of[:, None] > block_of[None, :]", "return block_of[:, None] >= block_of[None, :]"),
    ("the first block looks anywhere", "concat = concat.masked_fill(sees_none, 0)", "pass"),
    ("late tokens glimpse all that is there", "delayed = key < block_start[:, None]", "delayed = key < self.t + 0 * block_start[:, None]"),
    ("blocks counted from 0 in decoding", "(position - self.last_root) % c.block", "position % c.block"),
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
    # the layer
    ("ReLU for SiLU", "self.down(F.silu(gate) * up)", "self.down(F.relu(gate) * up)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a norm before the glimpse", "norm() if c.norm else nn.Identity()", "norm()"),
    ("self-attention without its residual", "x = x + self.o(concat)", "x = self.o(concat)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("the loss predicts its own input", 'batch["ids"].roll(-1, 1)', 'batch["ids"]'),
    ("KL reversed", "p_target = labels.float().softmax(-1)", "p_target, log_p_draft = log_p_draft.exp(), labels.float().log_softmax(-1)"),
    # decoding
    ("entries are lost when the store grows", "self.store = F.pad(self.store, (0, 0, 0, more))", "self.store = F.pad(0 * self.store, (0, 0, 0, more))"),
    ("a node does not see its ancestors", "self.visible.append(ancestors + others + [True])", "self.visible.append([False] * len(self.visible) + [True])", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("a node's position counts from one", "position = self.t - 1 + visible.sum(1)", "position = self.t + visible.sum(1)", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("a chain at once sees all of itself", "if m > 1 or not all(self.visible[-1]):", "if not all(self.visible[-1]):", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("accepted entries are not moved", "self.store[..., self.t:self.context, :] = kept", "pass", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0"),
    # the paper's constants
    ("paper: L is 5, by default", "block: int = 5", "block: int = 4"),
    ("paper: one layer, by default", "layers: int = 1", "layers: int = 2"),
    ("paper: no norm", "norm: bool = False", "norm: bool = True"),
]

# ---------------------------------------------------------------- CAPE
EDITS["cape"] = [
    ('paper: gamma', 'GAMMA = 5 ', 'GAMMA = 4 '),
    ('paper: the size of the first bin', 'SIZES = (7, 5, 3, 1)', 'SIZES = (8, 5, 3, 1)'),
    ('paper: the first edge', 'EDGES = (0.3, 0.6, 0.8)', 'EDGES = (0.35, 0.6, 0.8)'),
    ('paper: at most 32 nodes', 'MAX_NODES = 32 ', 'MAX_NODES = 40 '),
    ('paper: fixed takes 4 extras', 'SIZE = 4 ', 'SIZE = 3 '),
    ('paper: a beam of 4', 'WIDTH = 4 ', 'WIDTH = 5 '),
    ('bins closed on the left', 'torch.bucketize(p, edges)', 'torch.bucketize(p, edges, right=True)'),
    ('the chosen token is an extra too', 'others = probs.scatter(1, chosen[:, None], 0.0)', 'others = probs'),
    ('one extra too many', 'outside = rank >= K_i[:, None]', 'outside = rank > K_i[:, None]'),
    ('the cap counts the token itself', 'before = pad(p[:-1], (1, 0), value=1.0)', 'before = p'),
    ('the cap looks at the parent alone', 'ancestors = before.cumprod(0)', 'ancestors = before'),
    ('the cap looks at the extra alone', 'joint = ancestors[:, None] * p_extras', 'joint = (ancestors[:, None] > 0) * p_extras'),
    ('the cap counts the root', 'most = min(extras.numel(), max_nodes - gamma)', 'most = min(extras.numel(), max_nodes - gamma - 1)'),
    ('tokens below an absent one are there', 'least = p.cummin(0).values', 'least = p'),
    ("the chain's parents are not told", 'after = expand(tokens[i], [i - 1])', 'after = expand(tokens[i], [-1])'),
    ('draws by the race reversed', 'return (probs / race).argmax(-1)', 'return (probs * race).argmax(-1)'),
    ("the loop's generator is not asked", 'generator = getattr(expand, "generator", None)', 'generator = None'),
    ('a drawn chain takes the best', 'return proposed(expand, root, gamma, pick)', 'return proposed(expand, root, gamma, best)'),
    ('beam search forgets the score so far', 'score = score + p.log()', 'score = p.log() + 0 * score'),
    ('extras hang below their token', 'row = index // K\n', 'row = index // K + 1\n'),
    ('extras of probability zero are there', 'drafted(p), (joint > 0).sum())', 'drafted(p), (joint >= 0).sum())'),
    ('tokens of probability zero are there', 'return (least > 0).sum()', 'return (least >= 0).sum()'),
    ('p_draft has rows of tokens that are not there', 'return Tree(tokens, parents, probs[:n])', 'return Tree(tokens, parents, probs)', "pct"),
    ('deeper than what remains', 'return min(gamma, remaining)', 'return gamma', "pct"),
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
    ("the soft prompt's keys do not rotate", "k = k * cos[:, None] + rotate_half(k) * sin[:, None]", "k = k + 0"),
    ("the soft prompt is not normed", "x = self.layer.input_layernorm(x)", "x = x + 0"),
    ("vdm is an EDD", '"vdm": {"encoding": False}', '"vdm": {}'),
    ("edd-ce learns by KL", '"edd-ce": {"loss": "ce"}', '"edd-ce": {}'),
    ("edd-fixed draws its blocks", '"edd-fixed": {"blocks": (5, 5)}', '"edd-fixed": {}'),
    ("the layer is drawn otherwise", "        layer.apply(model._init_weights)\n", ""),
    ("the embedding is the target's own", "self.embed = self.own(model.get_input_embeddings())", "self.embed = model.get_input_embeddings()"),
    ("the head is fresh", "self.head = self.own(model.get_output_embeddings())", "self.head = self.own(model.get_output_embeddings()).apply(model._init_weights)"),
    ("the last block length is never drawn", "integers(low, high + 1)", "integers(low, high)"),
    ("a node's position counts from one", "position = self.t + sees.sum(1) - 1", "position = self.t + sees.sum(1)"),
    ("each round encodes from the start", "        self.t += len(x)\n", "        self.t = len(x)\n"),
    ("a node sees all nodes", "sees[rows, columns] = True", "sees[:] = True"),
    ("a lone node sees its sibling", "if m > 1 or len(paths[0]) < nodes:", "if m > 1:"),
    ("nodes of the last round stay", "        self.length = view.length\n        self.paths = []\n", "        self.length = view.length\n"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0"),
    ("confidence is not calibrated", "(logits / self.temperature)", "(logits / 1.0)"),
    ("paper: the fourth-to-last layer", "HIDDEN = -4 ", "HIDDEN = -3 "),
    ("paper: blocks up to 10", "BLOCKS = (5, 10)", "BLOCKS = (5, 9)"),
]
EDITS["beyond/eagle"] = [
    ("the target's head learns", "weight = model.get_output_embeddings().weight.detach()", "weight = model.get_output_embeddings().weight", "edd"),
    ("the target's embedding learns", "        with torch.no_grad():\n            return", "        if True:\n            return", "edd"),
    ("EAGLE reads EDD's layer", "for_target(cls, model, hidden=-1,", "for_target(cls, model, hidden=2,", "convert::test_drafts_are_those_of_the_published_forward"),
    ("it reads the feature that it predicts", "self.inputs(ids[:, 1:], feature[:, :-1])", "self.inputs(ids[:, 1:], feature[:, 1:])", "edd"),
    ("its regression is L2", "F.smooth_l1_loss(", "F.mse_loss(", "edd"),
    ("its balance does not follow the width", "(PUBLISHED / width) ** 0.5", "1.0", "edd"),
    ("it drafts from the parent's parent", "[parent + 1 for parent in parents[:count]]", "[max(parent, 0) for parent in parents[:count]]", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a child of a new node is ready", "if parent >= nodes:", "if parent > nodes:", "edd"),
    ("paper: w_cls", "W_CLS = 0.1 ", "W_CLS = 0.2 ", "edd"),
]
EDITS["beyond/medusa"] = [
    ("ReLU for SiLU", "[feature + F.silu(w(feature))", "[feature + F.relu(w(feature))", "edd"),
    ("labels are shifted by one less", "roll(-2 - k, 1)", "roll(-1 - k, 1)", "edd"),
    ("the loss mask is not shifted", '(0, 1 + k))[:, 1 + k:]', '(0, 1 + k))[:, :-1 - k]', "edd"),
    ("the deepest head goes on for ever", "deepest = self.config.heads", "deepest = self.config.heads - 1", "edd"),
    ("paper: five heads", "HEADS = 5 ", "HEADS = 4 ", "edd"),
    ("paper: decay", "DECAY = 0.8 ", "DECAY = 0.9 ", "edd"),
]

# ---------------------------------------------------------------- PCT and its baselines
EDITS["pct"] = [
    ('paper: width', 'WIDTH = 5 ', 'WIDTH = 4 '),
    ('paper: depth', 'DEPTH = 10 ', 'DEPTH = 9 '),
    ('paper: leaf', 'LEAF = 0.01 ', 'LEAF = 0.02 '),
    ("paper: VCT's width", 'def vct(expand, root, width=3, depth=5)', 'def vct(expand, root, width=4, depth=5)'),
    ("paper: EAGLE-2's total", 'def eagle2(expand, root, total=50,', 'def eagle2(expand, root, total=60,'),
    ('EAGLE-2 expands all', 'return candidates.best(layer, expanded)', 'return list(layer)'),
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
    ('deeper than what remains', 'remaining = getattr(expand, "remaining", depth)', 'remaining = depth'),
]

# ---------------------------------------------------------------- beyond the papers: prices, and a tree of two drafters
EDITS["beyond/priced"] = [
    ('the rate counts nodes that are not worth it', 'worth = [p for p in candidates.p[1:] if p >= r * prices.node_price]', 'worth = candidates.p[1:]'),
    ('the rate forgets the start', 'T = 1 + prices.start + D * prices.cost + len', 'T = 1 + D * prices.cost + len'),
    ('drafting is free once it is done', 'T = 1 + D * prices.cost    ', 'T = 1    '),
    ('expands what its children cannot pay', 'if s * p[j] >= price]', 'if p[j] >= price]'),
    ('the share counts nodes that are not worth it', 'worth = [p[j] for j in layer if p[j] >= price]', 'worth = [p[j] for j in layer]'),
    ('children carry all', 's = sum(worth) / sum(p[j] for j in read)', 's = 1.0'),
    ("a depth's nodes are free", 'gain = sum(s * p[j] - price for j in frontier)', 'gain = sum(s * p[j] for j in frontier)'),
    ('the first forward is free', '    if worth_first_forward(expand, prices, depth):\n', '    if True:\n'),
    ('what first forwards kept is forgotten', 'memory["share"] = before + LEARN * (s - before)', 'pass'),
    ('the second forward keeps all that the first kept', 'gain += s ** i - prices.cost', 'gain += s - prices.cost'),
    ('tokens are not announced', 'if hasattr(drafter, "announce"):', 'if False:', 'graft'),
    ("Max-Gram's chain is ten", 'n = len(ids)\n', 'n = min(10, len(gram.propose([expand.root])[0]))\n'),
    ('prices in seconds', 'return Prices((both - node_price) / s_t, node_price / s_t, start / s_t)', 'return Prices(both - node_price, node_price, start)'),
    ("a draft that takes its node's time, too", '"cost": max(0.0, median(both) - node_price)', '"cost": median(both)'),
]
EDITS["beyond/graft"] = [
    ('the chain is deeper than what remains', 'suggested(candidates, best, min(most, deepest))', 'suggested(candidates, best, most)', 'priced'),
    ('always drafts', 'draft = worth_drafting(alone, nodes, prices)', 'draft = True', 'priced'),
    ('what is left beside the chain is all of p', 'left = p_j - p_child', 'left = p_j', 'priced'),
    ('all that is left is found', 's = sum(p) / sum(read[:-1])', 's = 1', 'priced'),
    ('nothing hangs at the end', 'hang(candidates, j, chain, least=r * node_price)', 'pass', 'priced'),
    ('the chain hangs from the first of the frontier', 'index_of_best = first_index + len(nodes) - 1', 'index_of_best = first_index', 'priced'),
    ('rows after the doubted token count', 'if token not in children:\n            break', 'if token not in children:\n            continue', 'priced'),
    ('the rest keeps its weight', 'mixture = log_p + torch.log1p(-w)', 'mixture = log_p.clone()'),
    ('the predicted token alone', 'rho = p + w * (1 - p)', 'rho = w'),
    ('the root is read back', 'known = parents == [-1] and self.root is not None', 'known = False', 'graft'),
    ('the parent is forgotten', 'above = self.gram.here() if parent < 0 else self.places[parent]', 'above = self.gram.here()'),
    ('the committed text is not shown', '        self.gram.commit(view.tokens if ids is None else ids)\n', ''),
    ('agreement with a drafter that has no prediction', 'w = torch.where(none, confidence, self.weight(p, lengths))', 'w = self.weight(p, lengths)'),
]
EDITS["beyond/running"] = [
    ('the next root is forgotten', 'following = torch.cat((self.following, root))', 'following = self.following', 'graft'),
    ('a step without its slope', 'gradient = slope * (y - c) / variance', 'gradient = -(y - c) / variance', 'graft'),
]

# ---------------------------------------------------------------- Cascade
EDITS["cascade"] = [
    ("paper: Max-Gram's column", 'GRAM = 10 ', 'GRAM = 9 '),
    ('paper: k is cumulative', 'counts = [after - before for before, after in zip([0, *sums], sums)]', 'counts = sums'),
    ("an inner limit of the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = min(limit, cur_target.capacity)'),
    ("no limit but the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = limit - 1'),
    ('> for >= at capacity', 'and len(gen.tokens) <= cur_limit:', 'and len(gen.tokens) < cur_limit:'),
    ("drafts beyond their reviewer's context", 'cur_k, gen, cur_limit, review, stop, False)', 'cur_k, gen, limit, review, stop, False)'),
    ('a stage adds one too many', 'while len(gen.tokens) < enough and', 'while len(gen.tokens) <= enough and'),
    ('the count restarts, as it is printed', 'cur_prefix = len(gen.tokens)\n', 'cur_prefix = prefix\n'),
    ('inner K of the wrong rows', 'cur_k = [row[i + 1:] for row in K[i + 1:]]', 'cur_k = [row[i + 1:] for row in K[i:]]'),
    ('inner reviews by the wrong stages', 'cur_draft_list = draft_list[i + 1:]', 'cur_draft_list = draft_list[i + 1:i + 2]'),
    ('a review of one draft too few', 'review(logits, gen, prefix)', 'review(logits, gen, prefix + 1)'),
    ('Max-Gram does not see the first draft', 'uncommitted = gen.tokens[gen.committed:]', 'uncommitted = gen.tokens[gen.committed + 1:]'),
    ('a chain of the last round stays', 'self.paths = None  ', "self.paths = getattr(self, 'paths', None)  "),
    ('lenience is ignored, greedy', '(n + 1,)\n    if lenience > 1:\n', '(n + 1,)\n    if False:\n'),
    ('lenience is ignored, drawn', 'will follow\n    if lenience > 1:\n', 'will follow\n    if False:\n'),
    ('lenience at the wrong position', 'accepted = p_draft[x] <= lenience * p_reviewer[i, x]', 'accepted = p_draft[x] <= lenience * p_reviewer[i + 1, x]'),
    ('lenience on the wrong side', 'accepted = torch.minimum(p_draft, l * p_reviewer)', 'accepted = torch.minimum(l * p_draft, p_reviewer)'),
    ('what is rejected is not drawn again', 'return accepted + rejection * resampled', 'return accepted / accepted.sum(-1, keepdim=True)'),
    ('the residual without p_draft', 'residual = (p_reviewer - p_draft).clamp(min=0)', 'residual = p_reviewer.clone()'),
    ("Max-Gram's row is certain of another token", 'row[token].fill_(1)', 'row[token - 1].fill_(1)'),
    ('committed tokens are read back', 'new = view.ids', 'new = view.tokens.tolist()', 'device'),
    ('a confidence that does not sum to one', 'row.fill_((1 - p) / (self.vocab - 1))', 'row.fill_((1 - p) / self.vocab)'),
    ("the decoder's cache outlives its encoder", '        self.reset()\n        ids = torch.tensor([ids], device=self.device)', '        ids = torch.tensor([ids], device=self.device)'),
    ('Max-Gram does not read the source', 'self.gram.commit_source(ids)', 'pass'),
    ('sum: Max-Gram adds what is left', 'most = min(k_i, limit - cur_prefix)', 'most = min(enough, limit) - cur_prefix'),
    ('sum of all k', 'prefix + sum(K[0][:i + 1])', 'prefix + sum(K[0])'),
    ('rows beside other tokens', 'probs[:len(new)])', 'probs[1:1 + len(new)])'),
    ('drafts of the last round stay', 'gen.replace(gen.committed, new, [None] * len(new))', 'gen.replace(len(gen.tokens), new, [None] * len(new))'),
    ('lenience for Max-Gram, drawn', 'l = torch.where(of_models, lenience, 1.0)', 'l = torch.where(of_models, lenience, lenience)'),
    ("p_draft is p, not q'", 'p_new = torch.cat((lenient, p_reviewer[-1:]))', 'pass'),
    ('drawn chains are not drawn', 'generator = expand.generator if drawn and warp else None', 'generator = None', 'drawn'),
    ('off its path it goes on', 'if chain[:n] != path or n == len(chain):', 'if n >= len(chain):'),
    ('what changed counts as unchanged', 'self.unchanged[stage] = min(length, first)', 'pass'),
    ('T5 verifies trees', 'if parents is not None and parents.tolist() != chain:', 'if False:'),
]

# ---------------------------------------------------------------- Max-Gram
EDITS["maxgram"] = [
    ('paper: ten tokens', 'N = 10 ', 'N = 9 '),
    ("of equals the generation's match", 'if other_length > length:', 'if other_length >= length:'),
    ("a match at the text's end", 'if self.first[state] == len(self.text) - 1:', 'if False:'),
    ('the last place, not the first', 'length, self.link[following], self.first[following])', 'length, self.link[following], len(self.text))'),
    ('a clone shares its transitions', 'transitions = dict(self.next[following])', 'transitions = self.next[following]'),
    ('matches lose their length', 'return Suffix(self.next[state][token], length + 1)', 'return Suffix(self.next[state][token], length)'),
    ('the bigram is ignored', 'follower = self.bigram[place.last] if place.last < len(self.bigram) else 0', 'follower = 0'),
    ('a short chunk is not filled', '            lengths += [length] * len(new)\n', '            lengths += [length] * len(new)\n            n = len(tokens)\n'),
    ('the draft is not part of the query', '        tokens, lengths = [], []\n        while True', '        tokens, lengths, new = [], [], []\n        while True'),
    ('the source is not searched', 'self.in_source = self.source.advance(self.in_source, token)', 'pass'),
    ('confidence of one less', 'self.confidence[min(length, len(self.confidence) - 1)]', 'self.confidence[min(max(0, length - 1), len(self.confidence) - 1)]'),
    ('bigram: ties to the higher id', 'tie = count == most[a] and b < bigram[a]', 'tie = count == most[a] and b > bigram[a]'),
    ('bigram: pairs across documents', 'pairs = zip(ids, ids[1:])', 'pairs = zip(ids, ids[1:] + ids[:1])'),
    ('Listing 1 takes the last match', 'leftmost = int(matches.int().argmax())', 'leftmost = int(matches.nonzero().max())'),
    ('Listing 1 matches without a follower', '(text[:-1] == query[-1]) & (text[1:] >= 0)', '(text[:-1] == query[-1])'),
]

EDITS["runtime/grams"] = [
    ('confidence counts what was not proposed', 'seen[length] += 1', 'seen[length] += 2', 'maxgram'),
    ('confidence by one token later', 'right[length] += proposed[0] == after', 'right[length] += proposed[0] == token', 'maxgram'),
    ("agreement is not clamped", "lengths = lengths.clamp(max=maxgram.LENGTHS)", "pass", "graft"),
]

# ---------------------------------------------------------------- verification and the loop
EDITS["verify"] = [
    # masks and cache
    ("tree mask transposed", "    return seen\n", "    return seen.T\n"),
    ("a node sees its parent alone", "        ancestor = ancestor[ancestor]  ", "        break  "),
    ("tree mask ignored", "mask = F.pad(seen, (cached, 0), value=True)", "mask = F.pad(seen | True, (cached, 0), value=True)"),
    ("positions by the place in the cache", "position = cached + depth\n", "position = slots\n"),
    ("positions beyond the context", ".clamp(max=self.capacity - 1)", ""),
    ("a later chunk takes no mask", "if parents is None and cached:", "if False:"),
    ("entries not moved on commit", "if path != list(range(len(path))):", "if False:"),
    ("values not moved on commit", "            for x in held:\n                x[:, :, self.length", "            for x in held[:1]:\n                x[:, :, self.length"),
    ("hidden states not moved on commit", "[of_nodes[nodes] for", "[of_nodes[:len(path)] for"),
    ("a view's tokens are copied", "tokens, *hidden = self.committed\n", "tokens, *hidden = self.committed\n        tokens = torch.tensor(tokens.tolist()).to(self.device)\n", "device"),
    ("a view shows all tokens again", "ids = self.ids[-len(tokens):]", "ids = self.ids"),
    ("hidden states of the layer before", "out.hidden_states[index][0]", "out.hidden_states[index - 1][0]"),
    ("entries are lost when the cache grows", "[F.pad(x, (0, 0, 0, more)) for x in held]", "[F.pad(0 * x, (0, 0, 0, more)) for x in held]",
     "verify::test_sync_keeps_the_common_prefix random cascade::test_stages_forward_only_what_is_new"),
    ("prefix not rolled back in sync", "while common < longest and self.ids[common] == ids[common]:\n            common += 1", "common = longest"),
    ("tokens whose logits are wanted are not read again", "longest = min(len(self.ids), len(ids) - logits_to_keep)",
     "longest = min(len(self.ids), len(ids) - 1)"),
    ("what is known to be there is more than there is", "common = min(unchanged, longest)", "common = unchanged"),
    # acceptance and sampling
    ("of duplicates the last", "child.setdefault((parent, token), node)", "child[parent, token] = node"),
    ("acceptance ratio x 1.0001", "value=torch.inf) < ratio", "value=torch.inf) < 1.0001 * ratio"),
    ("acceptance ratio reversed", "(p_target / p_draft).gather", "(p_draft / p_target).gather"),
    ("residual without p_draft", "residual = (p_target - p_draft).clamp(min=0)", "residual = p_target.clamp(min=0)"),
    ("residual without its positive part", "residual = (p_target - p_draft).clamp(min=0)", "residual = (p_target - p_draft).abs()"),
    ("one stream for drafting and accepting", 'f"{seed} {purpose}"', 'f"{seed}"'),
    ("one acceptance stream for all rounds", 'stream(self.seed, f"accept {first}", logits.device)', 'stream(self.seed, "accept", logits.device)'),
    ("keyed noise without position", "stream(seed, position, device)", "stream(seed, 0, device)"),
    ("keyed noise by depth", "keyed_noise(self.seed, first + d, ", "keyed_noise(self.seed, d, ", "random"),
    ("noise of another depth", "noise = torch.stack(noise)[depth]", "noise = torch.stack(noise)", "random"),
    ("noise of the position before", "first = target.cache.length + 1", "first = target.cache.length"),
    ("half precision is sampled in half precision", "self.processors(None, logits.float())", "self.processors(None, logits)"),
    ("draws by the race reversed", "(p_target / noise).argmax(-1)", "(p_target * noise).argmax(-1)"),
    ("warp order: top-p before temperature", "processors.append(warper(value))", "processors.insert(0, warper(value))"),
    ("top-k is ignored", "            if value:\n", "            if value and warper is not TopKLogitsWarper:\n"),
    # the loop
    ("the output goes on to the end of the run", "                break\n", "                continue\n"),
    ("limit off by one", "[ids + [0] * limit]", "[ids + [0] * (limit + 1)]"),
    ("a tree without its root is taken", "assert tokens[0] == new[-1],", "assert True,"),
    ("drafted beyond the limit", "remaining = limit - len(out.tokens) - 1", "remaining = limit - len(out.tokens)"),
    ("confidence is not calibrated", "return (logits / temperature).softmax(-1)", "return logits.softmax(-1)"),
    ("sampling shows the drafter unwarped", "        return self.warp(logits)  ", "        return logits.softmax(-1)  "),
    ("a dead row is not a number", ".nan_to_num(0.0)", ""),
    ("the drafter keeps the tree's numbers", "drafter.keep(expand.path(numbers[3 * n:], accepted))", "drafter.keep(path)"),
    ("a prompt that fills the context is refused", "return self.capacity - len(ids) + 1", "return self.capacity - len(ids)"),
    ("tau counts the prefill", "return (len(self.tokens) - 1) / max(", "return len(self.tokens) / max("),
]

# ---------------------------------------------------------------- any family, static shapes
EDITS["beyond/longspec"] = [
    ("its own table in the place of the target's", 'register_buffer("own_table", table,', 'register_buffer("own_table", torch.stack(glide.angles(own_size, len(tables[0]))),', "convert::test_drafts_are_those_of_the_published_forward"),
    ("a norm before LongSpec's head", "eps=c.eps) if c.last_norm else nn.Identity()", "eps=c.eps)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a window one token short", "later <= self.c.window", "later < self.c.window", "convert::test_drafts_are_those_of_the_published_forward"),
    ("a window of all nodes, whoever sees them", "count = mask.cumsum(1)", "count = torch.ones_like(mask).cumsum(1)", "convert::test_drafts_are_those_of_the_published_forward"),
    ("the next node of a chain sees all", "            if mask is None:\n", "            if mask is None:\n                return super().forward(x, ropes, mask, kv, glimpse_mask, cache)\n            if False:\n", "convert::test_drafts_are_those_of_the_published_forward"),
    ("no biases", "if c.bias:", "if False:", "convert::test_drafts_are_those_of_the_published_forward glide::test_longspec_costs_what_its_docstring_says_and_has_names_for_train_py"),
]

EDITS["runtime/parts"] = [
    ("another target's drafter is taken", "if config.glimpse and found != [wanted]:", "if False:", "glide"),
    ("a latent's parts change places", "return torch.cat((v, k), -1), k", "return torch.cat((k, v), -1), k", "glide"),
    ("all layers turn by the last one's table", "top = layers_read[-1] if layers_read else -1", "top = -1", "glide"),
    ("the first entries do not turn", "rotated = glide.apply_rope(x[..., :r], cos, sin)", "rotated = x[..., :r]", "glide"),
    ("the head does not start as the target's", "self.head.weight.copy_(", "self.head.weight.clone().copy_(", "glide"),
    ("the public theta is not taken", "glide.angles(c.width // c.heads, length, c.theta)", "glide.angles(c.width // c.heads, length)", "convert::test_drafts_are_those_of_the_published_forward"),
]
EDITS["runtime/anydraft"] = [
    ("the embedding's scale is left out", "target.embed = lambda ids: embed(ids) * scale", "target.embed = embed", "edd"),
    ("the logits' scale is left out", "super().forward(x * self.scale)", "super().forward(x)", "edd"),
    ("soft-capping is left out", "return cap * torch.tanh(logits / cap) if cap else logits", "return logits", "edd"),
    ("embeddings are not proven", 'scale = factor(embed(ids), states[0], "embeddings")', "scale = 1.0", "edd"),
    ("weights of the target learn", "weights = {name: p.detach() for name, p in self.module.named_parameters()}", "weights = dict(self.module.named_parameters())", "edd"),
    ("gradients pass through float16", "if learns and weights and all(", "if False and all(", "edd"),
]
EDITS["runtime/families"] = [
    ("sliding window off by one", "mask & (distance < window)", "mask & (distance <= window)",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("sliding window by the place in the cache", "key_position = key_position.index_copy(0, slots, position)", "pass",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("all layers slide a window", '{kind: window if kind == "sliding_attention" else None for kind in kinds}',
     "{kind: window for kind in kinds}", "families verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("any error passes", "if error < (1e-3 if exact else 0.1):", "if error < 1e9:"),
    ("trees for chains", "if not self.verifies_trees and parents is not None and not is_chain(parents):", "if False:"),
    ("a node beyond the turning point turns its tree", "self.capacity = min(own, self.short)", "pass"),
    ("hidden states of the last chunk alone", "[torch.cat(of_chunks) for of_chunks in zip(*chunks)]", "chunks[-1]", "verify::test_sync_keeps_the_common_prefix"),
    ("hidden states are lost", "self.vocab), *states]", "self.vocab)]", "verify::test_sync_keeps_the_common_prefix"),
    ("rows of a spread model are not moved", "memory[:, :, :, self.length:end] = memory.index_select(3, slots)", "pass"),
]
EDITS["runtime/attention"] = [
    ("queries of a group see another's mask", "repeat(1, 1, groups, 1)", "repeat_interleave(groups, 2)", "families"),
]
EDITS["runtime/graphs"] = [
    ("padded keys are not masked", "padded = torch.zeros(size, total, dtype=torch.bool",
     "padded = torch.ones(size, total, dtype=torch.bool"),
    ("padding writes over the tree", "after = torch.arange(keys, keys + padding",
     "after = torch.arange(keys - 1, keys - 1 + padding"),
    ("a lone node sees nothing", "True if mask is None else mask", "False if mask is None else mask"),
    ("void entries of the target are glimpsed", "there = torch.arange(length, device=self.x.device) < t  ",
     "there = torch.arange(length, device=self.x.device) <= length  "),
    ("a recording replays its own input", "            kept.copy_(x)\n", "            pass\n"),
    ("a recording does not know where its keys lie", "if addresses != self.addresses:", "if False:"),
    ("chains-only targets are padded", 'hasattr(x, "run") and getattr(x, "verifies_trees", True)', 'hasattr(x, "run")'),
]

# ---------------------------------------------------------------- the benchmark
EDITS["bench"] = [
    ("tokens are held against the fastest plain decoding's", "report.losses(run, arm, truth or base, which)",
     "report.losses(run, arm, base, which)"),
    ("`drawn` not drawn", 'drawn=tree.name == "drawn"', "drawn=False"),
    ("the first arm is always first", "random.Random(i).sample(arms, len(arms))", "arms"),
    ("the slower baseline", "base = min(plain, key=", "base = max(plain, key="),
    ("speedup upside down", "self.results[i].speed() / base.results[i].speed()",
     "base.results[i].speed() / self.results[i].speed()"),
    ("assisted generation without its assistant", "partial(library, run, assistant_model=model)",
     "partial(library, run)"),
    ("generate() samples among fifty tokens", "top_k=a.top_k or 0", "top_k=a.top_k or 50"),
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
]
EDITS["training/frozen"] = [
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
    ("repeated head after head", "heads.repeat_interleave(config.heads // key_heads, 0)", "heads.repeat(config.heads // key_heads, 1, 1)"),
    ("LongSpec's window is not kept", "window=WINDOW", "window=0"),
    ("LongSpec's norms change places", 'layer["norm2"] = {"post_cross', 'layer["norm2"] = {"post_self'),
    ("code in pickles runs", "weights_only=True", "weights_only=False"),
    ("the glimpse's base is the target's", "config.glimpse_theta = GLIMPSE_THETA", "pass"),
]

EDITS["checkpoints/bigram"] = [
    ("held-out documents are counted into the bigram", "            else:\n                yield ids\n",
     "            if True:\n                yield ids\n", "make"),
]

# ---------------------------------------------------------------- beside the nine files
EDITS["data/read"] = [
    ("an answer is learned one character late", "np.searchsorted(ends, len(before),", "np.searchsorted(ends, len(before) + 9,", "data"),
    ("a killed write leaves half a file", "        write(part)\n        os.replace(part, path)", "        write(path)",
     "parallel::test_a_full_disk_leaves_the_last_checkpoint"),
    ("what people and models say is swapped", '{"human": "user", "gpt": "assistant"}', '{"human": "assistant", "gpt": "user"}', "data train corpus"),
]
EDITS["runtime/clock"] = [
    ("SWI without the costs", "sum(count * cost for count, cost in zip(runs, costs))", "sum(runs)", "ewif"),
    ("E(Spd.) with one draft too few", "for i in range(gamma + 1))", "for i in range(gamma))", "ewif"),
    ("a measured cost that cannot be is taken", 'not 0.005 <= prices["cost"] <= 1:', 'prices["cost"] < 0:', "bench::test_what_is_measured_is_not_what_is_given"),
    ("alpha over what was drafted", '"alpha": ratio(accepted, total["tested"])', '"alpha": ratio(accepted, total["nodes"])',
     "bench calls"),
    ("trees have an alpha", 'accepted = None if total["trees"] else total["accepted"]', 'accepted = total["accepted"]', "bench calls"),
    ("alpha_depth by the nodes", 'ratio(row["tau"], row["depth"])', 'ratio(row["tau"], row["nodes"])', "bench calls"),
]
EDITS["runtime/report"] = [
    ("a difference is lossless", "if ours != plain:", "if False:", "bench::test_tokens_are_held_against_the_exact_ones"),
    ("the gap of another token", "(logits[plain[at]] - logits[ours[at]]).item()",
     "(logits.max() - logits[ours[at]]).item() + 1", "bench::test_divergence_is_reported_with_its_gap"),
]
EDITS["runtime/load"] = [
    ("k ignored", "K = None if k is None else", "K = None if True else", "bench calls train real"),
    ("EOS is ignored", "eos = self.model.generation_config.eos_token_id", "eos = None", "bench calls train real"),
    ("tokenizers need not agree", "if mine[i] != its[i]:", "if False:", "bad_input"),
    ("remote code runs unasked", '"trust_remote_code": trust', '"trust_remote_code": True', "bench calls train real"),
]
EDITS["training/jobs"] = [
    ("a resumed run forgets its learners", "learner.load_state_dict(its)", "pass", "train parallel"),
    ("a resumed run may change its seed", 'FREE = set("lr ', 'FREE = set("seed lr ', "train parallel"),
    ("a damaged state is taken", "if damaged or not whole:", "if not whole:", "train"),
    ("files of unknown origin are replaced", "if any(folder.iterdir()):", "if False:", "train"),
]
EDITS["training/walk"] = [
    ("a temperature is fitted to the first texts", "share = min(1.0, share)", "share = float(self.seen < FITTED)",
     "train::test_greedy_temperature_is_found_again"),
    ("a rejected token is not tested", "            found.right.append(right)\n", "            found.right.extend([right] * right)\n", "train"),
]
EDITS["training/continuations"] = [
    ("a resumed file keeps half a batch", "os.truncate(self.path, self.ends[rows - 1] if rows else 0)", "pass", "make"),
    ("prompts come twice", "and tuple(ids) not in known:", "and True:", "make"),
    ("a chat's answer is given", "            return chat[:number]\n", "            return chat\n", "make"),
]
EDITS["data/prepare"] = [
    ("every hundredth document is held out", "HELD_OUT = 50 ", "HELD_OUT = 100 ", "data train corpus"),
    ("the token file's key ignores content", "                content.update(block)", "                pass",
     "data train corpus"),
    ("the last step has what was left over", "return np.split(shuffled, ends)[:-1]", "return np.split(shuffled, ends[:-1])", "data"),
    ("the order is the same in each epoch", "default_rng([seed, epoch])", "default_rng([seed, 0])", "data"),
    ("what is only read is learned from", "learn[:, :-1] = found[:, 1:] >= 0", "learn[:, :-1] = True", "data train corpus"),
]

# ---------------------------------------------------------------- the papers' tables, claims
EDITS["figures/compare"] = [
    ("signs are not drawn", "np.random.RandomState(0).randint(0, 2, (DRAWS, n))", "np.ones((DRAWS, n))",
     "paper::test_drawn_signs_give_the_exact_p"),
    ("a tie, untested, counts as more", "return Found(UNTESTED, in", "return Found(MORE, in", "paper::test_comparisons_by_hand"),
]
EDITS["docs/any_project"] = [
    ("a node sees the tree before it", "sees[t + node] |= sees[t + parents[node]]", "sees[t + node] |= sees[t + node - 1]", "cape::test_any_project"),
    ("positions follow the order of the nodes", "position = sees.sum(1) - 1 ", "position = torch.arange(t + n) ", "cape::test_any_project"),
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


def run_tests(folder, tests, seconds):
    """In a process of its own, forked from one that has imported the large packages: pytest, whose status is the exit's."""
    import pytest
    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(10 * seconds)                   # what waits takes no CPU time; a busy machine makes all slower
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(status)


def trial(name, file, old, new, tests):
    """Apply an edit to a copy of the repository (file None: no edit) and run its tests there -> (name, result, why)."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tree"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        if file is not None:
            path = folder / file
            text = path.read_text(encoding="utf-8")
            if text.count(old) != 1:
                return name, "stale", f"the old text occurs {text.count(old)} times in {file}"
            path.write_text(text.replace(old, new), encoding="utf-8")
        process = os.fork()
        if process == 0:
            run_tests(folder, tests, LONGEST if file else 10 * LONGEST)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)   # whom the tests have left behind
        log = (folder / "log.txt").read_text(errors="replace")
    return name, *verdict(os.waitstatus_to_exitcode(status), log)


def verdict(status, log):
    """pytest's exit status -> the result, and what to say of it."""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    if status == 0:
        return "survived", ""
    if status == 1:
        return "noticed", failed[0] if failed else ""
    if status < 0:
        return "noticed", "the tests did not end"
    last = (log.strip().splitlines() or [""])[-1]
    return "stale", f"its tests could not run: {failed[0] if failed else last}"


def preload():
    """Import what takes seconds once; each run of pytest is a fork of this process.  Nothing of the repository."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "tests")]
    for name in PACKAGES:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


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
    if not a.unchecked:
        tests = sorted({test for *_, tests in chosen for test in tests})
        _, result, why = trial("no edit", None, "", "", tests)
        if result != "survived":
            print(f"without any edit: {why}", file=sys.stderr)
            return 2
    found, lines, start = [], [], time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(a.jobs, multiprocessing.get_context("fork")) as pool:
        for done in concurrent.futures.as_completed([pool.submit(trial, *edit) for edit in chosen]):
            name, result, why = done.result()
            found.append(result)
            lines.append(f"{result:9} {name}   {why}")
            print(lines[-1], flush=True)
    counts = ", ".join(f"{found.count(result)} {result}" for result in ("noticed", "survived", "stale"))
    print(f"\n{len(chosen)} edits: {counts}; {(time.monotonic() - start) / 60:.1f} minutes")
    print(*(line for line in lines if not line.startswith("noticed")), sep="\n")
    return 0 if found.count("noticed") == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
