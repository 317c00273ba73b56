"""Deliberate edits of the code, and whether a test notices each.

    python tests/mutations.py                           # all: some minutes
    python tests/mutations.py --only cape "block mask"  # those whose file or note says so
    python tests/mutations.py --jobs 2 --list

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

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", "work", "__pycache__", ".pytest_cache")
LONGEST = 300                                    # seconds of CPU time, after which tests do not end

EDITS = {}

# ---------------------------------------------------------------- GLIDE
EDITS["glide"] = [
    # static shapes
    ("void rows of the target are glimpsed", "if torch.is_tensor(t) or rows > t: ", "if False: ", "padded"),
    ("void rows of its own are seen", "elif m > 1 or torch.is_tensor(t):", "elif m > 1:", "padded"),
    ("a recording does not know where the rows lie", "return self.store.data_ptr(), *(",
     "return 0, *((0, 0, k.shape) or ", "padded"),
    # the mask, and what a row may glimpse
    ("block mask: >= for >", "return of[:, None] > of[None, :]", "return of[:, None] >= of[None, :]",
     "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("block mask transposed", "return of[:, None] > of[None, :]", "return of[:, None] < of[None, :]",
     "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("the first block looks anywhere", "seen = seen.masked_fill(blind, 0)", "seen = seen.masked_fill(blind & False, 0)",
     "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("rows encoded later glimpse all that is there", "limit = torch.full_like(place, self.began)",
     "limit = torch.full_like(place, self.t)", "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("a prompt is encoded without the delay", "limit = place // c.block * c.block", "limit = place",
     "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("nodes glimpse one key too few", "k, v = kv[self.read]",
     "k, v = [x[:, :, :-1] if mask is None else x for x in kv[self.read]]",
     "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("the target's first layers for its last", "read = range(top - layers + 1, top + 1)", "read = range(layers)",
     "glide::test_layer_read_is_the_paper_s_and_a_flag_picks_another"),
    ("layers read in the other order", "config.layers_read = tuple(read)", "config.layers_read = tuple(read)[::-1]",
     "glide::test_layer_read_is_the_paper_s_and_a_flag_picks_another"),
    ("all layers read the same", "self.read = c.layers_read[m]", "self.read = c.layers_read[0]",
     "glide::test_each_layer_reads_its_own_layer_of_the_target"),
    # rotary embeddings
    ("theta fixed at 10000", "return table.detach().unbind()",
     "return tuple(x.to(table) for x in angles(table.shape[-1], length))", "glide::test_theta_is_the_targets"),
    ("queries of the glimpse do not turn", "q = rotate(q, *turn).to(k)", "q = q.to(k)",
     "glide::test_a_glimpse_is_the_paper_s_equation"),
    ("the drafter's own keys do not turn", "return rotate(q, *turn), rotate(k, *turn), v",
     "return rotate(q, *turn), k, v"),
    ("rotate_half with the other sign", "return torch.cat((-b, a), -1)", "return torch.cat((b, -a), -1)",
     "glide::test_a_glimpse_is_the_paper_s_equation"),
    ("the drafter's own theta", "theta=10000.0", "theta=1000.0"),
    # the layer
    ("ReLU for SiLU", "self.down(F.silu(gate) * up)", "self.down(F.relu(gate) * up)"),
    ("a norm before the glimpse", "x = x + self.glimpse(x, kv,", "x = x + self.glimpse(self.norm1(x), kv,"),
    ("self-attention without its residual", "x = x + self.o(seen)", "x = self.o(seen)"),
    ("feed-forward without its norm", "self.up(self.norm2(x))", "self.up(x)",
     "glide::test_no_gradient_reaches_the_target"),
    ("matrices start with std 2", "nn.init.normal_(p, std=0.02)", "nn.init.normal_(p, std=2.0)"),
    ('the loss predicts its own input', 'following = batch["ids"].roll(-1, 1)  ',
     'following = batch["ids"]  ', 'glide::test_the_loss_is_the_cross_entropy_of_the_next_token'),
    # decoding
    ("rows are lost when the store grows", "self.store = F.pad(self.store, (0, 0, 0, more))",
     "self.store = F.pad(0 * self.store, (0, 0, 0, more))", "glide::test_rows_outgrow_their_first_allocation"),
    ("the tree's mask ends at 64 nodes", "sees[i, line] = True",
     "sees[i, [node for node in line if node < 64]] = True",
     "glide::test_a_tree_of_many_nodes_equals_paths_drafted_alone"),
    ("a node's position counts from one", "position = t + sees.sum(1) - 1", "position = t + sees.sum(1)",
     "glide::test_rows_of_a_tree_equal_paths_drafted_alone"),
    ("accepted rows are not moved", "self.store[:, :, :, self.t:self.context] = kept", "pass",
     "glide::test_nothing_stale_after_rejections"),
    ("accepted rows come from one place before", "rows = torch.tensor(path, device=self.store.device) + self.t",
     "rows = torch.tensor(path, device=self.store.device) + self.t - 1", "glide::test_nothing_stale_after_rejections"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0",
     "glide::test_a_checkpoint_brings_its_temperature"),
    # the paper's constants
    ("paper: L is 5, by default", "block: int = 5", "block: int = 4"),
    ("paper: L is 5, for a target", "glimpse=True, block=5", "glimpse=True, block=4",
     "glide::test_training_equals_decoding_with_the_delayed_cache"),
    ("paper: one layer, by default", "layers: int = 1", "layers: int = 2"),
    ("paper: one layer, for a target", "width=None, layers=1", "width=None, layers=2",
     "glide::test_queries_turn_as_a_layer_s_own_keys_do"),
]

# ---------------------------------------------------------------- CAPE
EDITS["cape"] = [
    ("paper: gamma", "GAMMA = 5 ", "GAMMA = 4 "),
    ("paper: the size of the first bin", "SIZES = (7, 5, 3, 1)", "SIZES = (8, 5, 3, 1)"),
    ("paper: the size of the second bin", "SIZES = (7, 5, 3, 1)", "SIZES = (7, 4, 3, 1)"),
    ("paper: the size of the third bin", "SIZES = (7, 5, 3, 1)", "SIZES = (7, 5, 2, 1)"),
    ("paper: the size of the last bin", "SIZES = (7, 5, 3, 1)", "SIZES = (7, 5, 3, 0)"),
    ("paper: the first edge", "EDGES = (0.3, 0.6, 0.8)", "EDGES = (0.35, 0.6, 0.8)"),
    ("paper: the second edge", "EDGES = (0.3, 0.6, 0.8)", "EDGES = (0.3, 0.65, 0.8)"),
    ("paper: the third edge", "EDGES = (0.3, 0.6, 0.8)", "EDGES = (0.3, 0.6, 0.85)"),
    ("paper: at most 32 nodes", "MAX_NODES = 32 ", "MAX_NODES = 40 "),
    ("paper: fixed takes 4 extras", "SIZE = 4 ", "SIZE = 3 "),
    ("paper: fixed's default", "def fixed(expand, root, gamma=GAMMA, size=SIZE",
     "def fixed(expand, root, gamma=GAMMA, size=SIZE - 1"),
    ("paper: a beam of 4", "WIDTH = 4 ", "WIDTH = 5 "),
    ("paper: beam's default", "def beam(expand, root, gamma=GAMMA, width=WIDTH)",
     "def beam(expand, root, gamma=GAMMA, width=WIDTH - 1)"),
    ("bins closed on the left", "torch.bucketize(p, edges)", "torch.bucketize(p, edges, right=True)"),
    ("the chosen token is an extra too", "others = rows.scatter(1, chosen[:, None], 0.0)", "others = rows"),
    ("one extra too many", "outside = rank >= K[:, None]", "outside = rank > K[:, None]"),
    ("the cap counts the token itself", "before = pad(p[:-1], (1, 0), value=1.0)", "before = p"),
    ("the cap looks at the parent alone", "above = before.cumprod(0)", "above = before"),
    ("the cap looks at the extra alone", "joint = above[:, None] * p_extras",
     "joint = (above[:, None] > 0) * p_extras"),
    ("the cap keeps the least likely", "return joint.flatten().topk(room)",
     "return joint.flatten().topk(room, largest=False)"),
    ("the cap leaves room for the root", "room = min(extras.numel(), max_nodes - gamma)",
     "room = min(extras.numel(), max_nodes - gamma - 1)"),
    ("extras hang below their token", "parents = (index // K).masked_fill", "parents = (index // K + 1).masked_fill"),
    ("extras of probability zero are there", "masked_fill(joint <= 0, ABSENT)", "masked_fill(joint < 0, ABSENT)"),
    ("tokens of probability zero are there", "parents.masked_fill(least <= 0, ABSENT)",
     "parents.masked_fill(least < 0, ABSENT)"),
    ("tokens below an absent one are there", "least = p.cummin(0).values", "least = p"),
    ("the chain's parents are not told", "row = expand(tokens[i], [i - 1])", "row = expand(tokens[i], [-1])"),
    ("draws by the race reversed", "return (row / race).argmax(-1)", "return (row * race).argmax(-1)"),
    ("the loop's generator is not asked", 'generator = getattr(expand, "generator", None)', "generator = None"),
    ("a drawn chain takes the best", "chosen, p, rows = draft(expand, root, gamma, pick)",
     "chosen, p, rows = draft(expand, root, gamma, best)"),
    ("beam search forgets the score so far", "score = score + p.log()", "score = p.log() + 0 * score"),
    ("beam search tells no parents", "above = [parents[node] for node in frontier]",
     "above = [-1 for node in frontier]"),
]

# ---------------------------------------------------------------- EDD and its baselines
EDITS["edd"] = [
    ("block mask: >= for >", "hidden = of[:, None] > of[None, :]", "hidden = of[:, None] >= of[None, :]",
     "edd::test_dual_block_mask_entry_by_entry"),
    ("tokens of other blocks are seen", "return torch.cat((hidden, same_block & not_later), 1)",
     "return torch.cat((hidden, not_later), 1)", "edd::test_dual_block_mask_entry_by_entry"),
    ("a token does not see itself", "not_later = place[:, None] >= place[None, :]",
     "not_later = place[:, None] > place[None, :]", "edd::test_dual_block_mask_entry_by_entry"),
    ("KL reversed", "F.kl_div(log_p_draft, p_target, reduction",
     "F.kl_div((p_target + 1e-9).log(), log_p_draft.exp(), reduction", "edd::test_kl_is_equation_4"),
    ('KL off by one row', 'loss, meant = divergence, batch["logits"]',
     'loss, meant = divergence, batch["logits"].roll(1, 1)', 'edd::test_losses_are_what_their_names_say'),
    ('cross entropy unshifted', 'partial(self.cross_entropy, self.head), batch["ids"].roll(-1, 1)',
     'partial(self.cross_entropy, self.head), batch["ids"]', 'edd::test_losses_are_what_their_names_say'),
    ("vdm is an EDD", '"vdm": {"encoding": False}', '"vdm": {}', "edd::test_losses_are_what_their_names_say"),
    ("edd-ce learns by KL", '"edd-ce": {"loss": "ce"}', '"edd-ce": {}', "edd::test_losses_are_what_their_names_say"),
    ("vdm-ce learns by KL", '"vdm-ce": {"encoding": False, "loss": "ce"}', '"vdm-ce": {"encoding": False}',
     "edd::test_losses_are_what_their_names_say"),
    ("edd-fixed draws its blocks", '"edd-fixed": {"blocks": (5, 5)}', '"edd-fixed": {}',
     "edd::test_block_lengths_are_drawn_from_the_whole_range"),
    ("the final norm is a copy", "own_copy(self.target.norm.module).apply(model._init_weights)",
     "own_copy(self.target.norm.module)", "edd::test_the_layer_and_its_norm_are_fresh"),
    ("the layer starts with std 2", "self.layer = layer.apply(model._init_weights).to(self.like.device, self.like.dtype)",
     "self.layer = layer.to(self.like)\n"
     "        [nn.init.normal_(p, std=2.0) for p in layer.parameters() if p.ndim > 1]",
     "edd::test_the_layer_and_its_norm_are_fresh"),
    ("the layer is a copy", "self.layer = layer.apply(model._init_weights).to(self.like.device, self.like.dtype)",
     "self.layer = copy.deepcopy(decoder.layers[index])",
     "edd::test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns"),
    ("the embedding is the target's own", "self.embed = nn.Embedding.from_pretrained(table.to(self.like), freeze=False)",
     "self.embed = self.target.embed.module", "edd::test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns"),
    ("the head is fresh", "self.head = self.own_head()",
     "self.head = copy.deepcopy(self.target.head.module).apply(model._init_weights)",
     "edd::test_it_is_the_targets_own_layer_with_its_embedding_and_head"),
    ("the embedding's scale is left out", "table = self.target.embed(ids) * self.embed_scale", "table = self.target.embed(ids)",
     "edd::test_the_embedding_is_what_the_targets_first_layer_reads"),
    ("the logits' scale is left out", "logits = head(feature * self.logit_scale)",
     "logits = head(feature)",
     "edd::test_on_the_targets_own_last_state_each_head_says_what_the_target_does"),
    ("soft-capping is left out", "logits = self.cap * torch.tanh(logits / self.cap)", "pass",
     "edd::test_on_the_targets_own_last_state_each_head_says_what_the_target_does"),
    ("the last block length is never drawn", "integers(low, high + 1)", "integers(low, high)",
     "edd::test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns"),
    ("the baselines read EDD's layer", "hidden = -1  ", "pass  ", "edd::test_eagle_equals_brute_force"),
    ("EAGLE reads the feature it predicts", "self.inputs(ids[:, 1:], feature[:, :-1])",
     "self.inputs(ids[:, 1:], feature[:, 1:])", "edd::test_eagle_equals_brute_force"),
    ("EAGLE's regression is L2", "F.smooth_l1_loss(", "F.mse_loss(", "edd::test_eagles_loss"),
    ("EAGLE keeps its first norm", "self.layer.input_layernorm = nn.Identity()", "pass",
     "edd::test_eagle_is_built_as_published"),
    ("EAGLE's feature is not normed", 'feature = self.target.norm(batch["hidden"][self.config.hidden])',
     'feature = batch["hidden"][self.config.hidden]', "edd::test_eagles_loss"),
    ('MEDUSA: ReLU for SiLU', '[f + F.silu(w(f))',
     '[f + F.relu(w(f))', 'edd::test_medusas_heads_as_their_paper_writes_them'),
    ('MEDUSA without its residual', '[f + F.silu(w(f))',
     '[F.silu(w(f))', 'edd::test_medusas_heads_are_shifted_as_the_docstring_says'),
    ("MEDUSA's heads are shifted by one less", 'following = batch["ids"].roll(-2 - k, 1)',
     'following = batch["ids"].roll(-1 - k, 1)', 'edd::test_medusas_heads_are_shifted_as_the_docstring_says'),
    ('MEDUSA: what is shown is not shifted', '[0].roll(1, 1)',
     '[0]', 'edd::test_medusas_heads_are_shifted_as_the_docstring_says'),
    ("MEDUSA's deepest head goes on for ever", "min(depth, self.config.heads)", "min(depth, self.config.heads - 1)",
     "edd::test_medusas_heads_are_shifted_as_the_docstring_says"),
    ("rows are lost when the cache grows", "{i: F.pad(kept, (0, 0, 0, more))",
     "{i: F.pad(0 * kept, (0, 0, 0, more))", "edd::test_rows_outgrow_their_first_allocation"),
    ("a node's position counts from one", "t + sees.sum(1) - 1, slots)",
     "t + sees.sum(1), slots)", "edd::test_rows_of_a_tree_equal_paths_drafted_alone"),
    ("pending rows are lost", "self.pending.append(self.prompt(view))", "self.pending = [self.prompt(view)]",
     "edd::test_a_round_without_expand_loses_nothing"),
    ("a checkpoint's temperature is ignored", 'about.get("validation", {}).get("temperature", 1.0)', "1.0",
     "train::test_a_second_stage_starts_from_the_first"),
    ("paper: the fourth-to-last layer", "HIDDEN = -4 ", "HIDDEN = -3 ", "edd::test_the_fourth_to_last_layer"),
    ("paper: blocks from 5 on", "BLOCKS = (5, 10)", "BLOCKS = (4, 10)",
     "edd::test_block_lengths_are_drawn_from_the_whole_range"),
    ("paper: blocks up to 10", "BLOCKS = (5, 10)", "BLOCKS = (5, 9)",
     "edd::test_block_lengths_are_drawn_from_the_whole_range"),
    ("paper: five heads of MEDUSA", "HEADS, DECAY = 5, 0.8", "HEADS, DECAY = 4, 0.8",
     "edd::test_medusas_heads_are_shifted_as_the_docstring_says"),
    ("paper: MEDUSA's decay", "HEADS, DECAY = 5, 0.8", "HEADS, DECAY = 5, 0.9",
     "edd::test_medusas_heads_are_shifted_as_the_docstring_says"),
    ("paper: EAGLE's w_cls", "W_CLS = 0.1 ", "W_CLS = 0.2 ", "edd::test_eagles_loss"),
]

# ---------------------------------------------------------------- PCT and its baselines
EDITS["pct"] = [
    ("paper: width", "WIDTH = 5 ", "WIDTH = 4 "),
    ("paper: depth", "DEPTH = 10 ", "DEPTH = 9 "),
    ("paper: leaf", "LEAF = 0.01 ", "LEAF = 0.02 "),
    ("paper: VCT's width", "def vct(expand, root, width=3, depth=5)", "def vct(expand, root, width=4, depth=5)"),
    ("paper: VCT's depth", "def vct(expand, root, width=3, depth=5)", "def vct(expand, root, width=3, depth=4)"),
    ("paper: EAGLE-2's total", "def eagle2(expand, root, total=50,", "def eagle2(expand, root, total=60,"),
    ("paper: EAGLE-2's depth", 'total=50, depth=6, expanded=10):\n    "', 'total=50, depth=5, expanded=10):\n    "'),
    ("paper: EAGLE-2's expanded", 'total=50, depth=6, expanded=10):\n    "', 'total=50, depth=6, expanded=8):\n    "'),
    ("cost where it was not measured", "COST = 0.05 ", "COST = 0.1 "),
    ("own_confidence's threshold", "OWN = 0.3 ", "OWN = 0.2 "),
    ("a node's price where it was not measured", "NODE_PRICE = 0.01 ", "NODE_PRICE = 0.1 "),
    ("the cap", "MAX_NODES = 256 ", "MAX_NODES = 128 "),
    ("a node on the threshold is not expanded", "if p[j] >= cost]", "if p[j] > cost]"),
    ("a leaf on the threshold is removed", "(difference 3)\n    kept = [j for j in candidates.nodes() if p[j] >= leaf]",
     "(difference 3)\n    kept = [j for j in candidates.nodes() if p[j] > leaf]"),
    ("pct expands by the node's own confidence", "frontier = [j for j in layer if p[j] >= cost]",
     "frontier = [j for j in layer if candidates.c[j] >= cost]"),
    ("own_confidence expands by the product", "if c[j] >= own]", "if p[j] >= own]"),
    ("own_confidence: a node on the threshold", "if c[j] >= own]", "if c[j] > own]"),
    ("own_confidence removes leaves by their own",
     "if c[j] >= own]\n        frontier = candidates.best(frontier, max_nodes)\n"
     "    kept = [j for j in candidates.nodes() if p[j] >= leaf]",
     "if c[j] >= own]\n        frontier = candidates.best(frontier, max_nodes)\n"
     "    kept = [j for j in candidates.nodes() if c[j] >= leaf]"),
    ("joint confidence is the node's own", "self.p.append(self.p[node] * c_j)", "self.p.append(c_j)"),
    ("joint confidence is the least of the path", "self.p.append(self.p[node] * c_j)",
     "self.p.append(min(self.p[node], c_j))"),
    ("ties break the tree", "key=lambda j: (-self.p[j], j)", "key=lambda j: (-self.p[j], -j)"),
    ("children of probability zero", "if c_j == 0:", "if c_j < 0:"),
    ("parents are numbered as they came", "self.asked[node] = len(self.asked) - 1", "self.asked[node] = node"),
    ("the cap keeps the first", "return sorted(ranked[:most])", "return sorted(nodes)[:most]"),
    ("tokens travel in half precision", "dtype = torch.promote_types(rows.dtype, torch.float32)", "dtype = rows.dtype"),
    ("pct_cost expands by Eq. 5 alone", "if p[j] >= r * cost]", "if p[j] >= cost]"),
    ("pct_cost's rate may fall", "r = max(r, rate_at(r, candidates, cost, node_price))",
     "r = rate_at(r, candidates, cost, node_price)"),
    ("the rate counts nodes that are not worth it", "worth = [p for p in candidates.p[1:] if p >= r * node_price]",
     "worth = candidates.p[1:]"),
    ("drafting is free once it is done", "T = 1 + D * cost\n", "T = 1\n"),
    ("the tree of the last best rate", "if E / T > best:", "if E / T >= 0:"),
    ("measured costs reversed", "costs.append(s_d / s_t)", "costs.append(s_t / s_d)"),
    ("a node's price in seconds", "prices.append(longer / more / s_t)", "prices.append(longer / more)"),
    ("a node's price without its wide tree", 'more = wide["nodes"] / wide["rounds"] - chain["nodes"] / chain["rounds"]',
     'more = wide["nodes"] / wide["rounds"]'),
    ("a negative price", "return cost, max(0.0, price)", "return cost, price"),
    ("the mean of the turns", "cost = median(costs[1:] or costs)", "cost = sum(costs) / len(costs)"),
    ("bounds: rounding", "return int((1 + 1e-5) / p)", "return int(1 / p)"),
]

# ---------------------------------------------------------------- Cascade
EDITS["cascade"] = [
    ("paper: Max-Gram's column", "GRAM = 10 ", "GRAM = 9 ", "cascade::test_table_2s_form_is_algorithm_1s_matrix"),
    ("paper: the default k", "k = list(range(5, 5 + 4 * neural, 4))", "k = list(range(8, 8 + 5 * neural, 5))",
     "cascade::test_the_default_is_table_2s_smallest_tuned_row"),
    ("paper: the default inner k", "k += range(1, size + 1)", "k += range(2, size + 2)",
     "cascade::test_the_default_is_table_2s_smallest_tuned_row"),
    ("paper: k is cumulative", "counts = [after - before for before, after in zip([0] + row, row)]", "counts = row",
     "cascade::test_table_2s_form_is_algorithm_1s_matrix"),
    ("an inner limit of the output's", "cur_limit = min(limit - 1, cur_target.capacity)",
     "cur_limit = min(limit, cur_target.capacity)", "cascade::test_no_draft_is_longer_than_asked"),
    ("no limit but the context", "cur_limit = min(limit - 1, cur_target.capacity)", "cur_limit = cur_target.capacity",
     "cascade::test_no_draft_is_longer_than_asked"),
    ("no limit but the output's", "cur_limit = min(limit - 1, cur_target.capacity)", "cur_limit = limit - 1",
     "cascade::test_a_stage_stops_at_its_context_and_smaller_ones_go_on"),
    ("> for >= at capacity", "and len(gen) <= cur_limit:", "and len(gen) < cur_limit:",
     "cascade::test_no_draft_is_longer_than_asked"),
    ("drafts beyond their reviewer's context", "cascade_step(cur_target, cur_draft_list, cur_k, gen, cur_limit, review",
     "cascade_step(cur_target, cur_draft_list, cur_k, gen, limit, review",
     "cascade::test_no_draft_is_longer_than_asked"),
    ("a stage adds one too many", "while len(gen) < enough and", "while len(gen) <= enough and",
     "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("the count restarts, as it is printed", "cur_prefix = len(gen)\n", "cur_prefix = prefix\n",
     "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("inner K of the wrong rows", "cur_k = [row[i + 1:] for row in K[i + 1:]]",
     "cur_k = [row[i + 1:] for row in K[i:]]", "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("inner reviews by the wrong stages", "cur_draft_list = draft_list[i + 1:]",
     "cur_draft_list = draft_list[i + 1:i + 2]", "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("a review of one draft too few", "review(logits, gen, prefix)", "review(logits, gen, prefix + 1)",
     "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("Max-Gram does not see the first draft", "draft = gen.tokens[gen.settled:]",
     "draft = gen.tokens[gen.settled + 1:]", "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("Max-Gram's runs are not counted", "gen.runs[max_gram] += 1", "pass",
     "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("a review keeps one more", "gen.replace(first, choice[:n + 1], rows[:n + 1])",
     "gen.replace(first, choice[:n + 2], rows[:n + 2])", "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("a chain of the last round stays", "self.paths = None  ", "self.paths = getattr(self, 'paths', None)  ",
     "cascade::test_each_round_has_a_chain_of_its_own"),
    ("drafts of the last round stay", "self.gen.replace(self.gen.settled, new, [None] * len(new))",
     "self.gen.replace(len(self.gen), new, [None] * len(new))",
     "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("lenience is ignored, greedy", "elif self.lenience > 1:", "elif False:",
     "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("lenience is ignored, drawn", "    if lenience > 1:\n", "    if False:\n",
     "cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram"),
    ("lenience for Max-Gram, drawn", "by_model = [torch.is_tensor(p) for p in gen.probs[first:]]",
     "by_model = [True for p in gen.probs[first:]]",
     "cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram"),
    ("lenience of the wrong row", "kept = p_draft[x] <= lenience * p_reviewer[i, x]",
     "kept = p_draft[x] <= lenience * p_reviewer[i + 1, x]", "cascade::test_chain_and_runs_against_a_plain_recursion"),
    ("lenience: < for <=", "kept = p_draft[x] <= lenience * p_reviewer[i, x]",
     "kept = p_draft[x] < lenience * p_reviewer[i, x]"),
    ("lenience on the wrong side", "accepted = torch.minimum(p_draft, l * p_reviewer)",
     "accepted = torch.minimum(l * p_draft, p_reviewer)", "cascade::test_one_lenient_review_exactly"),
    ("what is rejected is not drawn again", "return accepted + rejected * left",
     "return accepted / accepted.sum(-1, keepdim=True)", "cascade::test_one_lenient_review_exactly"),
    ("the residual without p_draft", "left = (p_reviewer - p_draft).clamp(min=0)", "left = p_reviewer.clone()",
     "cascade::test_one_lenient_review_exactly"),
    ("drawn chains are not drawn", "generator = expand.generator if drawn else None", "generator = None"),
    ("Max-Gram's row is certain of another token", "row[token] = 1\n", "row[token - 1] = 1\n",
     "cascade::test_a_review_is_lenient_with_models_and_strict_with_max_gram"),
    ("a confidence that does not sum to one", "row.fill_((1 - said) / (self.vocab - 1))",
     "row.fill_((1 - said) / self.vocab)", "cascade::test_trees_see_the_chains_distributions_and_nothing_off_it"),
    ("off its path it goes on", "if self.gen.tokens[start:after] == path and after < len(self.gen):",
     "if after < len(self.gen):", "cascade::test_trees_see_the_chains_distributions_and_nothing_off_it"),
    ("an encoder's input takes room", "        return 1\n", "        return len(ids)\n",
     "cascade::test_a_long_encoder_input_takes_no_room_from_the_output"),
    ("the decoder's cache outlives its encoder",
     "        self.reset()\n        ids = torch.tensor([ids], device=self.device)",
     "        ids = torch.tensor([ids], device=self.device)",
     "cascade::test_another_encoder_input_empties_the_decoders_cache"),
    ("a stage's encoder reads nothing", "stage.encode(ids)\n", "stage.encode(ids[:1])\n"),
    ("Max-Gram does not read the source", "self.gram.commit_source(ids)", "pass",
     "cascade::test_max_gram_reads_the_encoders_input"),
    # section 4
    ("Theorem 4.1 as equation 6 prints it", "return 1 + (x - 1) * geometric(alpha * x, k)",
     "return x + (x - 1) * geometric(alpha * x, k)", "ewif"),
    ("Corollary 4.2 with one draft too few", "return geometric(alpha, k) / (c * k + 1)",
     "return geometric(alpha, k - 1) / (c * k + 1)", "ewif bench::test_expected_speedup_reproduces_table_1"),
    ("Theorem 4.3 with n + 1 rounds", "geometric(phi(alpha, alpha_inner, k), n - 1)",
     "geometric(phi(alpha, alpha_inner, k), n)", "ewif"),
    ("Theorem 4.3: inner runs are free", "return tokens / (1 + n * c1 + n * k * c2)",
     "return tokens / (1 + n * c1 + n * c2)", "ewif"),
    ("Theorem 4.5 without the target's run", "return tokens / (1 + sum(costs))\n\ndef d_ewif",
     "return tokens / sum(costs)\n\ndef d_ewif", "ewif"),
    ("Corollary 4.6: alpha_l is counted", "product *= 1.0 if i == l else alpha", "product *= alpha", "ewif"),
    ("SWI without the costs", "sum(count * c for count, c in zip(runs, costs))", "sum(runs)",
     "ewif cascade::test_swi_from_the_runs_of_a_real_run"),
]

# ---------------------------------------------------------------- Max-Gram
EDITS["maxgram"] = [
    ("paper: ten tokens", "N = 10 ", "N = 9 "),
    ("of equals the generation's match", "if other_length > length:", "if other_length >= length:"),
    ("the shorter match of the two", "if other_length > length:", "if 0 < other_length < length:"),
    ("a match at the text's end", "if self.first[state] == len(self.text) - 1:", "if False:"),
    ("the last place, not the first",
     "clone = self.new_state(dict(self.next[q]), self.length[p] + 1, self.link[q], self.first[q])",
     "clone = self.new_state(dict(self.next[q]), self.length[p] + 1, self.link[q], len(self.text))"),
    ("a clone shares its transitions", "self.new_state(dict(self.next[q]), ", "self.new_state(self.next[q], "),
    ("matches lose their length", "return Suffix(self.next[state][token], length + 1)",
     "return Suffix(self.next[state][token], length)"),
    ("the bigram is ignored", "elif last < len(self.bigram) and self.bigram[last]:", "elif False:"),
    ("the bigram's token 0 counts", "elif last < len(self.bigram) and self.bigram[last]:",
     "elif last < len(self.bigram):"),
    ("a chunk is longer than asked", "chunk = text[at:at + n - len(tokens)]", "chunk = text[at:at + n]"),
    ("a short chunk is not filled", "last, unread = chunk[-1], chunk",
     "last, unread = chunk[-1], chunk; n = len(tokens)"),
    ("the draft is not part of the query", "tokens, lengths, unread = [], [], query",
     "tokens, lengths, unread = [], [], []"),
    ("the source is not searched", "self.in_source = self.source.advance(self.in_source, token)", "pass"),
    ("confidence of one less", "self.confidence[min(length, len(self.confidence) - 1)]",
     "self.confidence[min(max(0, length - 1), len(self.confidence) - 1)]"),
    ("confidence counts what was not proposed", "seen[length] += 1", "seen[length] += 2"),
    ("confidence by one token later", "right[length] += proposed[0] == after", "right[length] += proposed[0] == token"),
    ("bigram: ties to the higher id", "tie = count == most[a] and b < bigram[a]",
     "tie = count == most[a] and b > bigram[a]"),
    ("bigram: pairs across documents", "counts.update(zip(ids, ids[1:]))",
     "counts.update(zip(ids, ids[1:])); counts.update([(ids[-1], ids[0])] if ids else [])"),
    ("another tokenizer's bigram is read", "theirs is not None and theirs != fingerprint", "False"),
    ("the table ends at a length of 8", "LENGTHS = 8 ", "LENGTHS = 7 "),
    ("Listing 1 takes the last match", "leftmost = int(matches.int().argmax())",
     "leftmost = int(matches.nonzero().max())"),
    ("Listing 1 matches without a follower", "(text[:-1] == query[-1]) & (text[1:] >= 0)", "(text[:-1] == query[-1])"),
    ("Listing 1's chunk leaves its text", "end = len(source) if at < len(source) else len(text)", "end = len(text)"),
]

# ---------------------------------------------------------------- verification and the loop
EDITS["verify"] = [
    # masks and cache
    ("tree mask transposed", "return seen[:n, :n]", "return seen[:n, :n].T",
     "verify::test_ancestor_mask_against_walking_up"),
    ("a node sees its parent alone", "seen = seen | seen[above]",
     "seen = seen | torch.eye(n + 1, dtype=torch.bool)[above]", "verify::test_ancestor_mask_against_walking_up"),
    ("tree mask ignored", "looks.index_copy_(1, slots, seen)", "looks[:, cached:] = True",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("sliding window off by one", "key_position < window", "key_position <= window",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("sliding window by the place in the cache", "position = cached + seen.sum(1) - 1  ",
     "position = cached + torch.arange(n)  ", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("all layers slide a window", '{kind: window if kind == "sliding_attention" else None for kind in kinds}',
     "{kind: window for kind in kinds}", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("positions by the place in the cache", "(cached + depth)[None]", "(cached + torch.arange(n))[None]",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("rows not moved on commit", "moved = path != list(range(len(path)))", "moved = False",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("values not moved on commit", "for rows in (*self.keys.values(), *self.values.values()):",
     "for rows in self.keys.values():", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("rows are moved from the prefix", "index = index + self.length", "pass",
     "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden rows not moved on commit", "rows[index.to(rows.device) if moved else slice(len(path))]",
     "rows[:len(path)]", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("hidden rows are shown twice", "self.shown, self.hidden = length, {k: [] for k in self.hidden}",
     "self.shown = length",
     "edd::test_capture_costs_nothing_when_nobody_asks verify::test_greedy_output_is_plain_decoding"),
    ("rows are lost when the cache grows", "held[layer] = F.pad(held[layer], ", "held[layer] = F.pad(0 * held[layer], ",
     "verify::test_sync_keeps_the_common_prefix random cascade::test_stages_forward_only_what_is_new"),
    ("prefix not rolled back in sync", "same = next(i for i in range(same) if self.ids[i] != ids[i])", "pass",
     "verify::test_sync_keeps_the_common_prefix"),
    ("prefix rolled back one token too little", "same = next(i for i in range(same) if self.ids[i] != ids[i])",
     "same = next(i for i in range(same) if self.ids[i] != ids[i]) + 1", "verify::test_sync_keeps_the_common_prefix"),
    ("what was shown is not rolled back", "min(self.shown, same)", "self.shown",
     "verify::test_sync_keeps_the_common_prefix"),
    # static shapes and recordings
    ("padded keys are not masked", "looks = (row < cached).repeat(n, 1)", "looks = ((row < cached) | (row >= cached + n)).repeat(n, 1)",
     "padded"),
    ("rows of a padded forward lie one slot late", "self.cache.slots, self.cache.read = cached + torch.arange(n",
     "self.cache.slots, self.cache.read = cached + 1 + torch.arange(n", "padded"),
    ("a tree's padded columns have no keys", "more = max(more, pad[1])", "pass",
     "padded::test_keys_of_several_sizes_and_caches_that_grow"),
    ("a padded forward does not end", "        self.cache.read = None\n", "", "padded"),
    ("rows that pad are returned, too", "return [rows[:n] for rows in self.replay", "return [rows for rows in self.replay",
     "padded"),
    ("a recording replays its own input", "            kept.copy_(x)\n", "            pass\n", "padded"),
    ("a recording of few keys serves more", "key = (run.__name__, keys, place,", "key = (run.__name__, place,", "padded"),
    ("a recording outlives its cache", "self.call.recorded.clear()", "pass", "padded"),
    ("recordings of another cache of the same shape", "self.cache.reserve(keys), self.needs.get(\"hidden\")",
     "None, None", "padded"),
    # acceptance and sampling
    ("of twins the last", "child.setdefault(place, node)", "child[place] = node", "verify::test_twins_and_absent_nodes"),
    ("acceptance ratio x 1.15", "passed = (u < ratio)", "passed = (u < 1.15 * ratio)",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("acceptance ratio x 1.0001", "passed = (u < ratio)", "passed = (u < 1.0001 * ratio)",
     "verify::test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding"),
    ("acceptance ratio reversed", "ratio = rows.gather(1, drawn) / tree.p_draft.gather(1, drawn)",
     "ratio = tree.p_draft.gather(1, drawn) / rows.gather(1, drawn)",
     "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("residual without p_draft", "residual = (p_target - p_draft).clamp(min=0)", "residual = p_target.clamp(min=0)",
     "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("residual without its positive part", "residual = (p_target - p_draft).clamp(min=0)",
     "residual = (p_target - p_draft).abs()", "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("accepted after a rejection", "k = passed.long().cumprod(0).sum()[None]", "k = passed.long().sum()[None]",
     "verify::test_drawn_chain_acceptance_follows_the_target"),
    ("absent nodes are accepted", " & (tree.parents[1:].to(u.device) >= 0)", "", "verify::test_twins_and_absent_nodes"),
    ("one stream for drafting and accepting", 'f"{seed} {purpose}"', 'f"{seed}"',
     "verify::test_drafting_and_accepting_do_not_share_a_random_stream"),
    ("the judge takes the drafting stream", 'self.accepting = stream(seed, "accept", device)',
     'self.accepting = stream(seed, "draft", device)', "drawn"),
    ("keyed noise without position", "stream(seed, position, device)", "stream(seed, 0, device)",
     "verify::test_sampled_text_follows_the_target"),
    ("keyed noise by depth", "noise.append(keyed_noise(self.seed, position, ",
     "noise.append(keyed_noise(self.seed, position - first, ",
     "verify::test_sampling_over_any_tree_is_plain_sampling_with_the_same_seed"),
    ("draws by the race reversed", "(p_target / torch.stack(noise)[depth]).argmax(-1)",
     "(p_target * torch.stack(noise)[depth]).argmax(-1)", "verify::test_sampled_text_follows_the_target"),
    ("warp order: top-p before temperature", "processors.append(logits_process.TopPLogitsWarper(top_p))",
     "processors.insert(0, logits_process.TopPLogitsWarper(top_p))",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    ("warp order: top-p before top-k", "processors.append(logits_process.TopPLogitsWarper(top_p))",
     "processors.insert(1, logits_process.TopPLogitsWarper(top_p))",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    ("top-k is ignored", "    if top_k:\n", "    if False:\n",
     "verify::test_the_warper_is_temperature_then_top_k_then_top_p"),
    # the loop
    ("EOS not included", "return new[:i]\n", "return new[:i - 1]\n",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("the output goes on to the end of the run", "return new[:i]\n", "return new[:limit]\n",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("an end within a run is forgotten", "self.ended = True\n", "self.ended = i == len(new)\n",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path real"),
    ("EOS is not looked for in the prefill's token", "out.tokens = stop.cut(root.tolist(), limit)",
     "out.tokens, stop.ended = root.tolist(), limit == 1",
     "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("limit off by one", "new = stop.cut(new, limit - len(out.tokens))", "new = stop.cut(new, limit - len(out.tokens) + 1)",
     "verify::test_a_builder_that_asks_nobody_is_cut_at_the_limit"),
    ("stop strings look at the new tokens alone", "stop = Stop(list(ids), eos", "stop = Stop([], eos", "real"),
    ("stop strings look at the end of a run alone", "self.ids.append(token)\n            if token in self.eos or self.criteria",
     "self.ids.append(token)\n            if token in self.eos or i == len(new) and self.criteria", "real"),
    ("several ends: the first alone", "set(torch.as_tensor(eos).flatten().tolist())",
     "set(torch.as_tensor(eos).flatten()[:1].tolist())", "real"),
    ("a streamer is not told the end", "        streamer.end()\n", "        pass\n", "real"),
    ("a streamer does not get the first token", "        streamer.put(torch.tensor(out.tokens))\n", "", "real"),
    ("a mask that hides tokens is taken", "if attention_mask is not None and not", "if False and not", "real"),
    ("do_sample=False samples", "if temperature > 0 and do_sample is not False", "if temperature > 0", "real"),
    # vocabularies
    ("what a stage does not know is any logit", 'value=float("-inf")) if missing', "value=9.0) if missing", "real"),
    ("a stage is shown ids that it does not know", "tokens = tokens.clamp(max=self.known - 1) ", "tokens = tokens ", "real"),
    ("a drafter is shown ids that it does not know", "return tokens.clamp(max=self.known - 1) if", "return tokens if", "real"),
    ("the type is the weights'", "self.dtype = model.get_input_embeddings()(token).dtype",
     "self.dtype = next(p for p in model.model.layers[0].mlp.parameters()).dtype", "real"),
    ("drafted beyond the limit", "expand.begin(root, limit - len(out.tokens) - 1)",
     "expand.begin(root, limit - len(out.tokens))", "verify::test_eos_and_the_length_limit_inside_an_accepted_path"),
    ("the deepest nodes may be asked for children", "if max(depths) >= self.room:", "if max(depths) > self.room:",
     "verify::test_what_a_builder_sees_at_the_limit_and_in_sampling"),
    ("confidence is not calibrated", "(logits / self.temperature).softmax(-1)", "logits.softmax(-1)",
     "verify::test_builders_see_calibrated_confidence_in_greedy_decoding_alone"),
    ("sampling shows the drafter unwarped", "probs = self.warp(logits) if self.warp else ",
     "probs = logits.softmax(-1) if self.warp else ", "verify::test_what_a_builder_sees_at_the_limit_and_in_sampling"),
    ("absent nodes keep their numbers", "number = there.cumsum(0) - 1", "number = torch.arange(len(there))", "verify::test_twins_and_absent_nodes"),
    ("the drafter keeps the root alone", "return path[1:]", "return path[1:2]", "verify::test_a_drafter_keeps_all_that_was_accepted"),
    ("what was drafted is overstated", "out.tell(new, min(len(path) - 1, len(new)))", "out.tell(new, len(path))",
     "bench::test_show_brackets_what_was_drafted_and_accepted random"),
    ("tau counts the prefill", "return sum(self.runs) / max(1, len(self.runs))",
     "return (1 + sum(self.runs)) / max(1, len(self.runs))", "bench::test_counts_of_rounds_by_hand"),
]

# ---------------------------------------------------------------- the benchmark
EDITS["bench"] = [
    ("--ask is ignored", "train.question_text(row, a.ask)", "train.question_text(row)", "bench::test_a_form_of_ones_own_asks"),
    ("categories are no groups", ' or about.get("category")', "", "bench::test_a_form_of_ones_own_asks"),
    ("tokens are held against the fastest plain decoding's", "truth = truth or base", "truth = base",
     "bench::test_tokens_are_held_against_the_exact_ones"),
    ("depth counts the root", "depths = [0]\n        for parent", "depths = [1]\n        for parent",
     "bench::test_counts_of_rounds_by_hand"),
    ("absent nodes are counted", "drafted = sum(depth > 0 for depth in depths)", "drafted = len(parents) - 1",
     "bench::test_counts_of_rounds_by_hand"),
    ("what a cut left out was accepted", "accepted = min(len(path) - 1, len(new))", "accepted = len(path) - 1",
     "bench::test_counts_of_rounds_by_hand"),
    ("a rejection is not counted as tested", "tested = accepted + (accepted < len(new) and accepted < drafted)",
     "tested = accepted + (accepted < drafted)", "bench::test_counts_of_rounds_by_hand"),
    ("overlap by the larger", "torch.minimum(p_target[:tested], p_draft[:tested]).sum()",
     "torch.maximum(p_target[:tested], p_draft[:tested]).sum()", "bench::test_counts_of_rounds_by_hand"),
    ("--lenience ignored", "cascade.Cascade(lms, K, lenience, gram", "cascade.Cascade(lms, K, 1.0, gram",
     "bench::test_mistakes_are_one_sentence"),
    ("k ignored", "K = None if k is None else", "K = None if True else", "bench::test_mistakes_are_one_sentence"),
    ("the bigram ignored", "return maxgram.MaxGram(*maxgram.read_bigram(path, vocab, fingerprint))",
     "maxgram.read_bigram(path, vocab, fingerprint)\n        return maxgram.MaxGram()",
     "bench::test_the_checkpoint_s_bigram_is_read"),
    ("`drawn` not drawn", 'drawn=tree.name == "drawn"', "drawn=False",
     "bench::test_sampling_runs_and_says_what_it_can_say"),
    ("measured costs reversed", 'return {"cost": cost, "node_price": price}',
     'return {"cost": price, "node_price": cost}', "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("measured costs without a warm-up", "pct.costs_of(turns[1:])", "pct.costs_of(turns)",
     "bench::test_costs_are_the_middle_of_turns_after_a_warm_up"),
    ("a measured cost that cannot be is taken", "if not 0.005 <= cost <= 1:", "if cost < 0:",
     "bench::test_what_is_measured_is_not_what_is_given"),
    ("costs are measured for each tree", "if label not in run.costs:", "if True:", "bench::test_the_whole_grid"),
    ("fixed counts the chosen token", '/ max(1, total["depth"])) - 1)', '/ max(1, total["depth"])))',
     "bench::test_what_is_measured_is_not_what_is_given"),
    ("the seed is ignored", "eos, a.seed, out=out)", "eos, 0, out=out)",
     "bench::test_flags_of_sampling_reach_the_decoding"),
    ("top-k is ignored", "a.temperature, a.top_k, a.top_p,\n", "a.temperature, None, a.top_p,\n",
     "bench::test_flags_of_sampling_reach_the_decoding"),
    ("EOS is ignored", "eos = self.model.generation_config.eos_token_id", "eos = None",
     "bench::test_flags_of_sampling_reach_the_decoding"),
    ("the raw confidence is not", "drafter.temperature = 1.0 if run.a.raw_confidence else drafter.temperature", "pass",
     "bench::test_raw_confidence"),
    ("another target's drafter is taken",
     'if not train.same_target(about["target"], train.fingerprint(run.model, run.tokenizer)):', "if False:",
     "bench::test_damaged_and_foreign_drafters"),
    ("a second turn forgets the answer", '            said.append({"role": "assistant", "content": answer})\n', "", "bench"),
    ("the file's own answers are answered again", 'asked = message["role"] == "user"\n', "asked = True\n", "bench"),
    ("a system message stands beside the file's own", 'if a.system and chat[0]["role"] != "system" else []', "if a.system else []", "bench"),
    ("Vicuna's turns are parted by a blank", "ASSISTANT: {{ turn.content }}</s>{% endif %}", "ASSISTANT: {{ turn.content }}</s> {% endif %}",
     "bench"),
    ("tokenizers need not agree", "if mine[i] != its[i]:", "if False:", "bench::test_a_stage_that_does_not_fit"),
    ("groups do not take turns", "rows = sorted(rows, key=lambda row: row[0])[:a.limit]", "rows = rows[:a.limit]",
     "bench::test_stand_in_end_to_end_as_a_script"),
    ("a prompt of the context's length is refused", "room = run.target.room(ids)", "room = run.target.room(ids) - 1",
     "bench::test_limits_are_the_context_s"),
    ("the first arm is always first", "first = i % len(arms)", "first = 0",
     "bench::test_arms_take_turns_in_going_first"),
    ("the slower baseline", "base = min(plain, key=", "base = max(plain, key=",
     "bench::test_the_baseline_is_the_faster_plain_arm"),
    ("speedup upside down", "self.results[i].speed() / base.results[i].speed()",
     "base.results[i].speed() / self.results[i].speed()", "bench::test_figures_of_a_row_by_hand"),
    ("speed without the tokens", "return len(self.tokens) / self.seconds", "return 1 / self.seconds",
     "bench::test_figures_of_a_row_by_hand"),
    ("tau counts the prefill's token", "ratio(sum(sum(out.runs) for out in outs), drafted)",
     "ratio(sum(len(out.tokens) for out in outs), drafted)", "bench::test_the_whole_grid"),
    ("alpha over what was drafted", 'ratio(total["accepted"], total["tested"])',
     'ratio(total["accepted"], total["nodes"])', "bench::test_figures_of_a_row_by_hand"),
    ("alpha of trees", 'None if total["trees"] else', "None if False else", "bench::test_the_whole_grid"),
    ("alpha_depth by the nodes", 'ratio(row["tau"], row["depth"])', 'ratio(row["tau"], row["nodes"])',
     "bench::test_the_whole_grid"),
    ("a plain step with its prefill", 'sum(out.seconds - out.total["prefill"] for out in plain)',
     "sum(out.seconds for out in plain)", "bench::test_a_plain_step_is_timed_without_the_prefill"),
    ("c by the rounds", 'ratio(ratio(total["draft"], total["draft_forwards"]), step)',
     'ratio(ratio(total["draft"], rounds), step)', "bench::test_the_whole_grid"),
    ("trigrams for 4-grams", "(out.tokens[i:] for i in range(4))", "(out.tokens[i:] for i in range(3))",
     "bench::test_stages_and_repetitions_by_hand"),
    ("runs without the prefill", "[rounds + len(outs), *stages]", "[rounds, *stages]",
     "bench::test_cascades_in_one_run"),
    ("stages weigh the wrong way round", "lm.num_parameters() / run.model.num_parameters() for lm in lms",
     "run.model.num_parameters() / lm.num_parameters() for lm in lms", "bench::test_cascades_in_one_run"),
    ("quartiles swapped", 'dict(zip(("speedup_low", "speedup", "speedup_high"), quartiles))',
     'dict(zip(("speedup_high", "speedup", "speedup_low"), quartiles))', "bench::test_the_whole_grid"),
    ("a difference is lossless", 'row["lossless"] = not wrong if exact else None',
     'row["lossless"] = True if exact else None', "bench::test_divergence_is_reported_with_its_gap"),
    ("drawn chains must be plain decoding's", 'or arm.build and not total["drawn"]', "or arm.build",
     "bench::test_sampling_runs_and_says_what_it_can_say"),
    ("the gap of another token", "(logits[plain[at]] - logits[ours[at]]).item()",
     "(logits.max() - logits[ours[at]]).item() + 1", "bench::test_divergence_is_reported_with_its_gap"),
    ("own-confidence is pct", '"own-confidence": pct.own_confidence', '"own-confidence": pct.pct',
     "bench::test_the_whole_grid"),
    ("pct-cost is pct", '"pct-cost": pct.pct_cost', '"pct-cost": pct.pct',
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
    ("choices are not asked", '("question choices", CHOICES),', "", "train::test_what_a_row_asks"),
    ("empty fields ask", "if all(row.get(name) for name in names.split())", "if row.keys() >= set(names.split())",
     "train::test_what_a_row_asks"),
    ("GLIDE's layout is unknown", '"conversation", "messages")', '"messages")', "train::test_conversations_in_glides_layout"),
    ("paper: GLIDE's batch", '"glide": (64, 5e-4)',
     '"glide": (32, 5e-4)', 'train::test_defaults_are_the_papers_recipes'),
    ("paper: GLIDE's learning rate", '"glide": (64, 5e-4)',
     '"glide": (64, 1e-4)', 'train::test_defaults_are_the_papers_recipes'),
    ("paper: EDD's batch", '"edd": (8, 1e-4)',
     '"edd": (16, 1e-4)', 'train::test_defaults_are_the_papers_recipes'),
    ("paper: EDD's learning rate", '"edd": (8, 1e-4)',
     '"edd": (8, 5e-4)', 'train::test_defaults_are_the_papers_recipes'),
    ("paper: warm-up", '("warmup", float, 0.025,', '("warmup", float, 0.25,',
     "train::test_defaults_are_the_papers_recipes"),
    ("paper: block length", '("block", int, 5,', '("block", int, 4,', "train::test_what_a_resumed_run_may_change"),
    ("paper: one layer", '("layers", int, 1,', '("layers", int, 2,', "train::test_defaults_are_the_papers_recipes"),
    ("paper: the layer that EDD reads", '("hidden", int, edd.HIDDEN,', '("hidden", int, -3,',
     "train::test_defaults_are_the_papers_recipes"),
    ("paper: AdamW's betas", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)",
     "train::test_an_update_is_adamws_of_the_clipped_gradient"),
    ("paper: AdamW", '"adamw", "muon: for hidden matrices"', '"muon", "muon: for hidden matrices"',
     "train::test_defaults_are_the_papers_recipes"),
    ('gradients are not clipped', 'module.parameters(), a.clip).item()',
     'module.parameters(), 1e9).item()', 'train::test_an_update_is_adamws_of_the_clipped_gradient'),
    ("half a cosine ends at half the rate", "return 0.5 * (1 + math.cos(math.pi *",
     "return 0.5 * (1 + math.cos(0.5 * math.pi *", "train::test_learning_rate_schedule"),
    ("no warm-up", "    if step < ramp:\n", "    if False:\n", "train::test_a_second_stage_starts_from_the_first"),
    ("the rate is that of the first step", 'group["lr"] = a.lr * cosine(step, a.steps, a.warmup)',
     'group["lr"] = a.lr * cosine(0, a.steps, a.warmup)', "train::test_the_rate_of_each_step_is_the_schedules"),
    ('saved after the update', 'state = {"step": step, "tokens"',
     'state = {"step": step + 1, "tokens"', 'train::test_resumed_is_bit_for_bit_uninterrupted'),
    ("a resumed run forgets its learners", "learner.load_state_dict(kept)", "pass",
     "train::test_resumed_is_bit_for_bit_uninterrupted"),
    ('a resumed run may change its seed', 'FREE = set("lr ',
     'FREE = set("seed lr ', 'train::test_what_a_resumed_run_may_change'),
    ("a loss that is not finite goes on", "if not math.isfinite(loss + norm):", "if not math.isfinite(loss):",
     "train::test_no_update_where_a_loss_or_a_gradient_is_not_finite"),
    ('Ctrl-C does not save', 'if step % a.every == 0 or stopped:',
     'if step % a.every == 0:', 'train::test_resumed_is_bit_for_bit_uninterrupted'),
    ('the order is that of the first epoch', 'rng = np.random.default_rng([seed, epoch])',
     'rng = np.random.default_rng([seed])', 'parallel::test_an_epoch_has_every_window_once_in_an_order_of_its_own'),
    ('a piece is as long as its document', 'np.minimum(size, length)), 1)',
     'size), 1)', 'parallel::test_windows_are_documents_or_pieces_of_them'),
    ("blocks by the seed alone", "np.random.default_rng([a.seed + 3, step])", "np.random.default_rng([a.seed + 3])",
     "train::test_what_drafters_are_shown_and_how_they_are_measured"),
    ('validation on what is trained on', 'order(held, few,',
     'order(windows, few,', 'train::test_what_drafters_are_shown_and_how_they_are_measured'),
    ("validation draws its blocks", '| {"block": a.block}', '| {"block": None, "random": np.random.default_rng(0)}',
     "train::test_what_drafters_are_shown_and_how_they_are_measured"),
    ('alpha counts the first block', 'counted[:a.block] = False',
     'pass', 'train::test_what_drafters_are_shown_and_how_they_are_measured'),
    ('a temperature of 1', 't = greedy_temperature(torch.cat(logits), torch.cat(choice))',
     't = 1.0', 'train::test_training_learns_and_the_saved_drafter_is_the_trained_one'),
    ("temperatures up to 1.5 alone", "for i in range(89)]", "for i in range(55)]",
     "train::test_greedy_temperature_is_found_again"),
    ('held-out documents are trained on', 'chosen = index[index[:, 2] == held]',
     'chosen = index', 'parallel::test_windows_are_documents_or_pieces_of_them'),
    ("every hundredth document is held out", "HELD_OUT = 50 ", "HELD_OUT = 100 ",
     "train::test_every_fiftieth_document_is_held_out_unless_its_row_says"),
    ('documents without their end', 'ids = np.append(ids, eos if ids[-1] >= 0 else ~eos)',
     'pass', 'train::test_rows_without_text_are_named_and_not_trained_on'),
    ("a row's `times` is ignored", 'row.get("times", 1))',
     '1)', 'train::test_every_fiftieth_document_is_held_out_unless_its_row_says'),
    ("the token file's key ignores content", '                content.update(block)',
     '                pass', 'train::test_tokens_are_those_of_the_files_as_they_are'),
    ("the token file's key ignores the tokenizer", 'about = f"{vocabulary_fingerprint(tokenizer)} ',
     'about = f"', 'train::test_tokens_are_those_of_the_files_as_they_are'),
    ('U+2028 ends a line', 'lines = text.split("\\n") if',
     'lines = text.splitlines() if', 'train::test_rows_of_files'),
    ('a killed write leaves half a file', '        write(part)\n        os.replace(part, path)',
     '        write(path)', 'train::test_a_killed_write_leaves_the_last_checkpoint'),
    ("the fingerprint looks at shapes alone", "return bool(close) and all(", "return all(",
     "train::test_drafters_of_another_target_are_refused"),
    ("weights of two names are compared", "both = [name for name in a[\"probe\"] if name in b[\"probe\"]]",
     "both = list(a[\"probe\"])", "real"),
    ("a gated model is looked for here", "if isinstance(why.__cause__, huggingface_hub.errors.GatedRepoError):", "if False:", "real"),
    ("remote code runs unasked", '"trust_remote_code": trust', '"trust_remote_code": True', "real"),
    ("the revision is forgotten", '{"revision": revision,', '{"revision": None,', "real"),
    ("the fingerprint ignores the vocabulary", 'for key in a if key in b and key != "probe")',
     'for key in a if key in b and key not in ("probe", "vocabulary"))',
     "train::test_drafters_of_another_target_are_refused"),
    ("muon takes embedding and head", 'matrix = weight.ndim == 2 and "embed" not in name and "head" not in name',
     "matrix = weight.ndim == 2", "train::test_muon_gets_the_hidden_matrices_alone"),
    ("a drafter is saved in float32", 'w.to("cpu", torch.bfloat16)', 'w.to("cpu", torch.float32)',
     "train::test_training_learns_and_the_saved_drafter_is_the_trained_one"),
    ("the target's choices are the text", 'choice = batch["logits"][0].argmax(-1)',
     'choice = batch["ids"][0]', 'train::test_what_drafters_are_shown_and_how_they_are_measured'),
    ("what people and models say is swapped", '{"human": "user", "gpt": "assistant"}',
     '{"human": "assistant", "gpt": "user"}', "train::test_conversations"),
    ('tokens are counted anew after --resume', 'else (0, 0)\n    autocast',
     'else (0, 0)\n    seen = 0\n    autocast', 'parallel::test_tokens_seen_go_on'),
    ('the loss of each process is for its own rows', '.sum().item()) / processes',
     '.sum().item())', 'parallel::test_two_processes_are_one'),
    ('each process takes all windows', 'mine = chosen[rank::processes]',
     'mine = chosen', 'parallel::test_two_processes_are_one'),
    ('a part of a batch is divided by its own rows', 'batch = frozen(mine[i:i + micro], count=count)',
     'batch = frozen(mine[i:i + micro])', 'parallel::test_two_processes_are_one'),
    ('Ctrl-C in one process stops that one', 'if stopped:\n                stop(',
     'if asked:\n                stop(', 'parallel::test_two_processes_are_one'),
    ('padding is learned from', 'F.pad(found[:, 1:] >= 0, (0, 1))',
     'F.pad(found[:, 1:] >= -1, (0, 1))', 'parallel::test_padding_and_other_documents_change_no_gradient'),
    ('rows that were not chosen count', 'zip(x[learn].split(CHUNK), rows.split(CHUNK))',
     'zip(x.flatten(0, 1).split(CHUNK), rows.split(CHUNK))', 'parallel::test_a_loss_in_chunks_is_the_whole_one'),
    ('logits of all rows at once', 'zip(x[learn].split(CHUNK), rows.split(CHUNK))',
     'zip([x[learn]], [rows])', 'parallel::test_a_loss_in_chunks_is_the_whole_one'),
    ('questions are learned from', 'return np.where(learn, ids, np.invert(ids))',
     'return np.array(ids)', 'parallel::test_answers_alone_are_learned_from'),
    ('the key ignores what is learned from', '{tokenizer.chat_template} {a.loss_on}"',
     '{tokenizer.chat_template}"', 'parallel::test_answers_alone_are_learned_from'),
    ('all layers are kept', 'if self.wanted is None or layer_idx in self.wanted:',
     'if True:', 'parallel::test_the_target_keeps_what_somebody_reads'),
    ('a run goes on after a wrong choice', 'return rounds.long().cumprod(1)',
     'return rounds.long()', 'parallel::test_runs_of_right_choices'),
    ('windows of all sizes in a batch', 'some[np.argsort(some[:, 1], kind="stable")]',
     'some', 'parallel::test_an_epoch_has_every_window_once_in_an_order_of_its_own'),
    ('the file is read whole', '        while some := list(islice(entries, 64)):',
     '        while some := list(entries):', 'parallel::test_memory_does_not_grow_with_the_corpus'),
    ('a drafter starts where the one before ended', '            torch.manual_seed(a.seed)                    # each',
     '            pass                    # each', 'parallel::test_each_drafter_is_the_one_of_its_own_run'),
    ('measuring changes the drafter', 'copy.deepcopy(module, {id(own): own}).to(decoding.dtype)',
     'module.to(decoding.dtype)', 'parallel::test_a_measured_cost_leaves_the_drafter_as_it_was'),
]

# ---------------------------------------------------------------- making the stand-in
EDITS["checkpoints/convert"] = [
    ("EAGLE's weights of another target", "if other:", "if False:", "convert"),
    ("what is missing is not named", "    for key, shape in shapes.items():\n        if key not in weights:",
     "    for key, shape in shapes.items():\n        if False:", "convert"),
    ("settings are not compared", "if theirs[name] != value:", "if False:", "convert"),
    ("GLIDE's keys are not repeated", "if \".k_proj.\" in key or \".v_proj.\" in key:", "if False:", "convert"),
    ("repeated head after head", "rows.repeat_interleave(config.heads // key_heads, 0)",
     "rows.repeat(config.heads // key_heads, 1, 1)", "convert"),
    ("MEDUSA's heads as config.json says", "heads=len(heads)", "heads=int(settings.get('medusa_num_heads', 2))", "convert"),
    ("code in pickles runs", "weights_only=True", "weights_only=False", "convert"),
    ("the glimpse's base is the target's", "config.glimpse_theta = GLIMPSE_THETA", "pass", "convert"),
    ("the epsilon is not taken", 'settings["num_attention_heads"], settings["rms_norm_eps"]', 'settings["num_attention_heads"], 1e-6', "convert"),
]

EDITS["checkpoints/make"] = [
    ("held-out documents are counted into the bigram", "            else:\n                yield ids\n",
     "            if True:\n                yield ids\n", "make"),
]

# ---------------------------------------------------------------- the papers' tables, claims
EDITS["figures/tabular"] = [
    ("the paper's values on our side", "cells.append(said.get(heading, \"–\"))\n            cells.append(cell(row) if row else \"–\")",
     "cells.append(cell(row) if row else \"–\")\n            cells.append(said.get(heading, \"–\"))", "paper::test_the_paper_s_values_by_hand"),
    ("the paper's rows without one of ours are lost", 'if said.get("arm") not in ours:', "if False:", "paper::test_the_paper_s_values_by_hand"),
    ("signs are not drawn", "difference if generator.getrandbits(1) else -difference", "difference", "paper::test_drawn_signs_give_the_exact_p"),
    ("one-sided", "as_far += abs(drawn) >= found - 1e-12", "as_far += drawn >= found - 1e-12", "paper::test_drawn_signs_give_the_exact_p"),
    ("differences upside down", "return [x - y for x, y in pairs] or None", "return [y - x for x, y in pairs] or None", "paper::test_a_pair_of_arms_in_words"),
    ("a label is not shown", 'name += f", {row[\'label\']}"', "pass", "paper::test_runs_of_a_table_become_one_file_and_a_command_runs_once"),
    ("a position counts from 0", 'row["positions"][number - 1:number]', 'row["positions"][number:number + 1]', "paper::test_values_inside_lists_of_a_row"),
    ("what is not shipped is not said", "        if name not in there:\n", "        if False:\n", "paper::test_a_table_that_waits_says_what_the_paper_has_and_what_makes_it"),
]
EDITS["figures/claims"] = [
    ("as much is more", "true = left > times * right + by", "true = left >= times * right + by", "paper::test_comparisons_by_hand"),
    ("the margin is ignored", "true = left > times * right + by", "true = left > times * right", "paper::test_comparisons_by_hand"),
    ("the factor is ignored", "true = left > times * right + by", "true = left > right + by", "paper::test_comparisons_by_hand"),
    ("one true comparison is enough", "if any(true is False for true, _ in found):",
     "if found and all(true is False for true, _ in found):", "paper::test_verdicts_are_computed_and_counted"),
    ("what is missing held", "    if lacking or not found:\n", "    if not found:\n", "paper::test_verdicts_are_computed_and_counted"),
    ("what cannot be said here is judged", '    if claim.get("cannot"):\n', "    if False:\n", "paper::test_verdicts_are_computed_and_counted"),
    ("worse, too, is significant", 'return mean > 0 and p < spec["below"], words', 'return p < spec["below"], words', "paper::test_comparisons_by_hand"),
    ("the group is ignored", 'row.get("group", group) == group:', "True:", "paper::test_comparisons_by_hand"),
    ("one lossless row is enough", "return all(values), f", "return any(values), f", "paper::test_comparisons_by_hand"),
]
EDITS["figures/paper"] = [
    ("a command's own flags win", "    arguments = arguments + flags\n", "    arguments = flags + arguments\n", "paper::test_flags_given_here_win"),
    ("folders of one's own are not asked", 'own.startswith("work/")', "False", "paper::test_flags_given_here_win"),
    ("a command runs for each table", "    if key not in done:\n", "    if True:\n", "paper::test_runs_of_a_table_become_one_file_and_a_command_runs_once"),
    ("an interruption is a refusal", "if status == INTERRUPTED:", "if False:", "paper::test_an_interruption_loses_only_the_table_under_way"),
    ("baselines of every run", "if first or drafted:", "if True:", "paper::test_runs_of_a_table_become_one_file_and_a_command_runs_once"),
    ("a label is lost", 'row = {**row, "label": label}', "pass", "paper::test_runs_of_a_table_become_one_file_and_a_command_runs_once"),
    ("only the last stage of training counts", 'stage = stage.get("init")', "stage = None", "paper::test_training_is_summed_over_its_stages"),
    ("a missing stage is there", 'if stage != "maxgram" and not inside.exists()', 'if stage == "" and not inside.exists()', "paper::test_what_is_not_there_is_left_out_with_one_sentence"),
]
EDITS["figures/ewif"] = [
    ("a model that reviews is horizontal", 'not any(any(counts) for counts in row["K"][1:])', "True", "paper::test_a_prediction_by_hand"),
    ("tokens of the first model alone", "writers += [name] * count", "writers += [names[0]] * count", "paper::test_a_prediction_by_hand"),
]
EDITS["figures/repeated"] = [
    ("the target is not repeated", '["input_ids"].expand(copies, -1)', '["input_ids"].expand(1, -1)', "paper::test_copies_of_a_prompt_give_its_tokens"),
    ("the drafter is not repeated", "return x.expand(copies, -1, -1), *others", "return x, *others", "paper::test_copies_of_a_prompt_give_its_tokens"),
    ("the cache keeps its copies", "        run.drafters = own\n        run.target.empty()\n", "        run.drafters = own\n", "paper::test_copies_of_a_prompt_give_its_tokens"),
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
