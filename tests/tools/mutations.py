# ruff: noqa: E501
"""Deliberate edits of the code, and whether a test notices each.

    python tests/tools/mutations.py                           # all: some minutes
    python tests/tools/mutations.py --only cape "block mask"  # those whose file or note says so

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
import contextlib
import importlib
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
    ("block mask: >= for >", "return block_of[:, None] > block_of[None, :]", "return block_of[:, None] >= block_of[None, :]"),
    ("late tokens glimpse all that is there", "delayed = key < block_start[:, None]", "delayed = key < self.t + 0 * block_start[:, None]"),
    ("blocks counted from 0 in decoding", "(position - self.last_root) % c.block", "position % c.block"),
    ("nodes glimpse one key too few", "k, v = kv[self.target_layer]", "k, v = [x[:, :, :-1] if mask is None else x for x in kv[self.target_layer]]"),
    ("the target's first layers for its last", "tuple(range(top - layers + 1, top + 1))", "tuple(range(layers))"),
    ("queries of the glimpse have no RoPE", "q = self.query_rope(q, *rope)", "q = q + 0", "convert::test_drafts_are_those_of_the_published_forward"),
    ("the other half is negative", "torch.cat((-b, a), -1)", "torch.cat((b, -a), -1)"),
    ("the loss predicts its own input", 'batch["ids"].roll(-1, 1)', 'batch["ids"]'),
    ("a node does not see its ancestors", "self.visible.append(ancestors + others + [True])", "self.visible.append([False] * len(self.visible) + [True])", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
    ("accepted entries are not moved", "self.store[..., self.t:self.context, :] = kept", "pass", "edd::test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone"),
]

# ---------------------------------------------------------------- CAPE
EDITS["cape"] = [
    ('bins closed on the left', 'torch.bucketize(p, edges)', 'torch.bucketize(p, edges, right=True)'),
    ('one extra too many', 'outside = rank >= K_i[:, None]', 'outside = rank > K_i[:, None]'),
    ('the cap looks at the parent alone', 'ancestors = before.cumprod(0)', 'ancestors = before'),
    ('beam search forgets the score so far', 'score = score + p.log()', 'score = p.log() + 0 * score'),
    ('deeper than what remains', 'return min(gamma, remaining)', 'return gamma', "pct"),
]

# ---------------------------------------------------------------- EDD and its baselines
EDITS["edd"] = [
    ("tokens of other blocks are seen", "tokens = j[:, None] == j[None, :]", "tokens = j[:, None] >= j[None, :]"),
    ("KL reversed", "F.kl_div(log_p_draft, p_target, reduction", "F.kl_div((p_target + 1e-9).log(), log_p_draft.exp(), reduction"),
    ("the soft prompt comes last", "return torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)", "return torch.cat((k, self.k), 2), torch.cat((v, self.v), 2)"),
    ("the soft prompt's keys do not rotate", "k = k * cos[:, None] + rotate_half(k) * sin[:, None]", "k = k + 0"),
    ("the last block length is never drawn", "integers(low, high + 1)", "integers(low, high)"),
    ("a node's position counts from one", "position = self.t + sees.sum(1) - 1", "position = self.t + sees.sum(1)"),
    ("nodes of the last round stay", "        self.length = view.length\n        self.paths = []\n", "        self.length = view.length\n"),
]
EDITS["beyond/eagle"] = [
    ("the target's head learns", "weight = model.get_output_embeddings().weight.detach()", "weight = model.get_output_embeddings().weight", "edd"),
    ("it reads the feature that it predicts", "self.inputs(ids[:, 1:], feature[:, :-1])", "self.inputs(ids[:, 1:], feature[:, 1:])", "edd"),
    ("it drafts from the parent's parent", "[parent + 1 for parent in parents[:count]]", "[max(parent, 0) for parent in parents[:count]]", "convert::test_drafts_are_those_of_the_published_forward"),
]
EDITS["beyond/medusa"] = [
    ("labels are shifted by one less", "roll(-2 - k, 1)", "roll(-1 - k, 1)", "edd"),
]

# ---------------------------------------------------------------- PCT and its baselines
EDITS["pct"] = [
    ('a node on the threshold is not expanded', 'if candidates.p[j] >= cost]', 'if candidates.p[j] > cost]'),
    ("pct expands by the node's own confidence", 'if candidates.p[j] >= cost]', 'if candidates.c[j] >= cost]'),
    ("joint confidence is the node's own", 'self.p.append(self.p[node] * c_j)', 'self.p.append(c_j)'),
    ('parents are numbered as they were drafted', 'self.expand_index[node] = first_index + i', 'self.expand_index[node] = node'),
]

# ---------------------------------------------------------------- beyond the papers: prices, and a tree of two drafters
EDITS["beyond/priced"] = [
    ('a forward must gain what it takes of plain steps', 'worth = gain >= time * before.E / before.T', 'worth = gain >= time'),
    ('expands what its children cannot pay', 'if s * p[j] >= price]', 'if p[j] >= price]'),
]
EDITS["beyond/graft"] = [
    ('what was missed is forgotten', 'self.drafter.begin(merged(self.views))', 'self.drafter.begin(self.views[-1])'),
    ('the chain hangs from the first of the frontier', 'index_of_best = first_index + len(nodes) - 1', 'index_of_best = first_index', 'priced'),
    ('the parent is forgotten', 'above = self.gram.here() if parent < 0 else self.places[parent]', 'above = self.gram.here()'),
    ('the committed text is not shown', '        self.gram.commit(view.tokens if ids is None else ids)\n', ''),
]

# ---------------------------------------------------------------- Cascade
EDITS["cascade"] = [
    ("an inner limit of the output's", 'cur_limit = min(limit - 1, cur_target.capacity)', 'cur_limit = min(limit, cur_target.capacity)'),
    ('the count restarts, as it is printed', 'cur_prefix = len(gen.tokens)\n', 'cur_prefix = prefix\n'),
    ('Max-Gram does not see the first draft', 'uncommitted = gen.tokens[gen.committed:]', 'uncommitted = gen.tokens[gen.committed + 1:]'),
    ('lenience is ignored, greedy', '(n + 1,)\n    if lenience > 1:\n', '(n + 1,)\n    if False:\n'),
    ('lenience on the wrong side', 'accepted = torch.minimum(p_draft, l * p_reviewer)', 'accepted = torch.minimum(l * p_draft, p_reviewer)'),
    ('a confidence that does not sum to one', 'row.fill_((1 - p) / (self.vocab - 1))', 'row.fill_((1 - p) / self.vocab)'),
    ("the decoder's cache outlives its encoder", '        self.reset()\n        ids = torch.tensor([ids], device=self.device)', '        ids = torch.tensor([ids], device=self.device)'),
    ("p_draft is p, not q'", 'p_new = torch.cat((lenient, p_reviewer[-1:]))', 'pass'),
    ('off its path it goes on', 'if chain[:n] != path or n == len(chain):', 'if n >= len(chain):'),
]

# ---------------------------------------------------------------- Max-Gram
EDITS["maxgram"] = [
    ("of equals the generation's match", 'if other_length > length:', 'if other_length >= length:'),
    ('the last place, not the first', 'length, self.link[following], self.first[following])', 'length, self.link[following], len(self.text))'),
    ('the bigram is ignored', 'follower = self.bigram[place.last] if place.last < len(self.bigram) else 0', 'follower = 0'),
    ('confidence of one less', 'self.confidence[min(length, len(self.confidence) - 1)]', 'self.confidence[min(max(0, length - 1), len(self.confidence) - 1)]'),
]

# ---------------------------------------------------------------- verification and the loop
EDITS["verify"] = [
    ("tree mask transposed", "    return seen\n", "    return seen.T\n"),
    ("positions by the place in the cache", "position = cached + depth\n", "position = slots\n"),
    ("entries not moved on commit", "if path != list(range(len(path))):", "if False:"),
    ("hidden states of the layer before", "out.hidden_states[index][0]", "out.hidden_states[index - 1][0]"),
    ("prefix not rolled back in sync", "while common < longest and self.ids[common] == ids[common]:\n            common += 1", "common = longest"),
    ("of duplicates the last", "child.setdefault((parent, token), node)", "child[parent, token] = node"),
    ("acceptance ratio x 1.0001", "value=torch.inf) < ratio", "value=torch.inf) < 1.0001 * ratio"),
    ("keyed noise without position", "stream(seed, position, device)", "stream(seed, 0, device)"),
    ("warp order: top-p before temperature", "processors.append(warper(value))", "processors.insert(0, warper(value))"),
    ("drafted beyond the limit", "remaining = limit - len(out.tokens) - 1", "remaining = limit - len(out.tokens)"),
    ("confidence is not calibrated", "return (logits / temperature).softmax(-1)", "return logits.softmax(-1)"),
    ("the drafter keeps the tree's numbers", "drafter.keep(expand.path(numbers[3 * n:], accepted))", "drafter.keep(path)"),
]

# ---------------------------------------------------------------- any family, static shapes
EDITS["beyond/longspec"] = [
    ("a window one token short", "later <= self.c.window", "later < self.c.window", "convert::test_drafts_are_those_of_the_published_forward"),
]

EDITS["runtime/drafters"] = [
    ("another target's drafter is taken", "if config.glimpse and found != [wanted]:", "if False:", "glide"),
    ("a latent's parts change places", "return torch.cat((v, k), -1), k", "return torch.cat((k, v), -1), k", "glide"),
]
EDITS["runtime/anydraft"] = [
    ("weights of the target learn", "weights = {name: p.detach() for name, p in self.module.named_parameters()}", "weights = dict(self.module.named_parameters())", "edd"),
]
EDITS["runtime/targets"] = [
    ("sliding window off by one", "mask & (distance < window)", "mask & (distance <= window)", "verify::test_tree_logits_and_commit_equal_each_path_alone"),
    ("trees for chains", "if not self.verifies_trees and parents is not None and not is_chain(parents):", "if False:"),
    ("a node beyond the turning point turns its tree", "self.capacity = min(own, self.short)", "pass"),
]
EDITS["runtime/static"] = [
    ("padded keys are not masked", "padded = torch.zeros(size, total, dtype=torch.bool", "padded = torch.ones(size, total, dtype=torch.bool"),
    ("a recording replays its own input", "            kept.copy_(x)\n", "            pass\n"),
]

# ---------------------------------------------------------------- the benchmark
EDITS["bench"] = [
    ("tokens are held against the fastest plain decoding's", "report.losses(run, arm, truth or base, which)", "report.losses(run, arm, base, which)"),
]

# ---------------------------------------------------------------- training
EDITS["train"] = [
    ("a loss that is not finite goes on", "if not math.isfinite(loss + norm):", "if not math.isfinite(loss):", "train::test_no_update_where_a_loss_or_a_gradient_is_not_finite"),
    ('Ctrl-C does not save', 'if step % a.every == 0 or stopped:', 'if step % a.every == 0:', 'train::test_resumed_is_bit_for_bit_uninterrupted'),
    ("an idle process learns", "learn[:] = False                       # the others", "pass                                   # the others", "parallel"),
]

# ---------------------------------------------------------------- beside the nine files
EDITS["data/read"] = [
    ("an answer is learned one character late", "np.searchsorted(ends, len(before),", "np.searchsorted(ends, len(before) + 9,", "data"),
    ("a killed write leaves half a file", "        write(part)\n        os.replace(part, path)", "        write(path)", "parallel::test_a_full_disk_leaves_the_last_checkpoint"),
]
EDITS["runtime/report"] = [
    ("a difference is lossless", "if ours != plain:", "if False:", "bench::test_tokens_are_held_against_the_exact_ones"),
]
EDITS["runtime/load"] = [
    ("EOS is ignored", "eos = self.model.generation_config.eos_token_id", "eos = None", "bench calls train real"),
]
EDITS["training/state"] = [
    ("a resumed run forgets its learners", "learner.load_state_dict(its)", "pass", "train parallel"),
    ("a resumed run may change its seed", 'FREE = set("lr ', 'FREE = set("seed lr ', "train parallel"),
]
EDITS["training/write"] = [
    ("a resumed file keeps half a batch", "os.truncate(self.path, self.ends[rows - 1] if rows else 0)", "pass", "make"),
]
EDITS["data/prepare"] = [
    ("what is only read is learned from", "learn[:, :-1] = found[:, 1:] >= 0", "learn[:, :-1] = True", "data train corpus"),
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
    a = p.parse_args()
    chosen = edits(a.only)
    preload()
    tests = sorted({test for *_, tests in chosen for test in tests})
    _, result, why = trial("no edit", None, "", "", tests)
    if result != "survived":
        print(f"without any edit: {why}", file=sys.stderr)
        return 2
    found, lines, start = [], [], time.monotonic()
    for edit in chosen:
        name, result, why = trial(*edit)
        found.append(result)
        lines.append(f"{result:9} {name}   {why}")
        print(lines[-1], flush=True)
    counts = ", ".join(f"{found.count(result)} {result}" for result in ("noticed", "survived", "stale"))
    print(f"\n{len(chosen)} edits: {counts}; {(time.monotonic() - start) / 60:.1f} minutes")
    print(*(line for line in lines if not line.startswith("noticed")), sep="\n")
    return 0 if found.count("noticed") == len(chosen) else 1

if __name__ == "__main__":
    sys.exit(main())
