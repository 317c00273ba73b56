r"""What drafters know of themselves, how good trees are, what theory predicts, and which layer to read.

    python figures/probe.py calibration --drafter edd glide --json rows.jsonl
    python figures/probe.py positions --drafter glide "cascade(base, k=30)" "cascade(small, k=30)"
    python figures/probe.py optimality --drafter glide edd --tree chain cape "beam(width=8)" pct eagle2
    python figures/probe.py ewif \
        --drafter "cascade(base, k=5)" "cascade(small, k=5)" "cascade(base, small, k=(3, 5, 0))"
    python figures/probe.py lookup --target Qwen/Qwen2.5-7B-Instruct --prompts mt_bench.jsonl --dtype auto

calibration  Is a drafter's confidence the probability that its token is accepted?  EDD and PCT (ACL 2025),
             section 3.2, Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), section 4.2, Figure 1(b).  Chains
             of ten; tokens after a chain's first rejection are left out: they depend on it.
positions    How likely is the i-th token of a chain of thirty to be accepted?  Cascade Speculative Drafting
             (arXiv 2312.11462), section 3.2, Figures 2, 3.  A cascade and Max-Gram write their own chains.
optimality   The joint probabilities of a tree's nodes, over those of the best as many among all that the
             drafter was asked about: each child, in the whole vocabulary, of each expanded node.
ewif         Does Theorem 4.5 of Cascade say how much faster decoding will be?  Its Table 1, then the arms
             named beside their SWI, which counts the models' runs alone, and their speedup.
lookup       Which layer should a drafter read?  Of each layer of the target the head that attends most to
             what followed the current token before: GLIDE reads such a layer.  And how often a linear map of
             hidden_states[k] names the token before: EDD reads where they still do.  Texts: continuations.

    paper                         name here
    c_i                           confidence: the drafter's largest probability, that of the token it drafts
    ECE                           sum over bins of (count / all) |acceptance - confidence|  (Guo et al. 2017)
    P(accepted), token index      accepted / drafted at a position, from 1: accepted with all before it
    p_j = c_1 c_2 ... c_j         joint, along the path to node j (EDD, section 3.2)
    alpha_i, c_i                  measured in speculative decoding with that model alone

Other flags are bench.py's; --tree is for optimality alone.
"""
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import compare  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ewif import ewif_of, table_1  # noqa: E402
from rounds import listening, nodes_of  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402
import cascade  # noqa: E402
import verify  # noqa: E402
from runtime import parts  # noqa: E402
from verify import UserError  # noqa: E402

CHAIN, BINS = 10, 10                       # calibration: tokens of a chain; bins of confidence
LONG_CHAIN = 30                            # positions
SHOWN = "position 1", "position 2", "position 3", "position 5", "position 10", "position 20"
PROMPTS, TOKENS = 4, 48                    # optimality
TEXTS, LONGEST = "36", 512                 # lookup: texts, and tokens of one
RIDGE, NEAR = 0.01, 0.02                   # lookup: of the rows; shares that are as good as the best
BY_PROMPT = ("speedup", "tau", "alpha", "alpha_overlap", "alpha_depth", "nodes", "c", "expected_speedup",
             "draft_ms", "share_draft", "swi_ms", "swi_measured")

def about(run, label):
    """What every row of these measurements says of its run."""
    a = run.a
    return {"target": a.target, "drafter": label, "temperature": a.temperature, "seed": a.seed}

def each_prompt(run, work):
    """-> [work(ids, limit)] of each prompt"""
    bar = tqdm(run.prompts, unit="prompt", leave=False, disable=None)
    return [work(ids, limit) for _, ids, limit in bar]

def measured(run, arms):
    """What bench.py measures -> its rows; those of all prompts with {key: a value for each prompt}."""
    finished = bench.measure(run, arms)
    if finished < len(run.prompts):
        raise KeyboardInterrupt
    rows = bench.tables(run, arms, finished)
    for row in rows:
        row.pop("by_prompt", None)
    whole = rows[:len(arms)]               # the rows of all prompts come first
    base = arms[whole.index(compare.baseline(whole))]
    generate = next(arm for arm in arms if arm.drafter == "generate()")
    for arm, row in zip(arms, whole):
        row["by_prompt"] = {"group": [group for group, *_ in run.prompts]}
        each = [bench.row_of(run, arm, base, generate, "", [i]) for i in range(finished)]
        for key in BY_PROMPT:
            values = [found.get(key) for found in each]
            if any(value is not None for value in values):
                row["by_prompt"][key] = values
    return rows

# ---------------------------------------------------------------- calibration
def judged_tokens(run, drafter, ids, limit):
    """Decode one prompt by chains -> [(confidence, accepted?)] of every judged token."""
    heard, judged = [], []
    out = run.decode(drafter, listening(partial(cape.chain, gamma=CHAIN), heard), ids, limit)
    for one, (_, calls) in zip(out.rounds, heard):
        # A chain asks for one row after the other.
        confidences = [row.max().item() for _, _, row in calls]
        # A round's new tokens end with the target's own, where the draft was first rejected.
        for token, confidence, true in zip(one.tokens[1:], confidences, one.new):
            judged.append((confidence, token == true))
    return judged

def mean(values):
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None

def reliability(judged, bins=BINS):
    """-> ([{low, high, confidence, acceptance, count} of each bin], expected calibration error).

    Bins are closed on the right, the first one on the left too.
    """
    rows, error = [], 0.0
    for b in range(bins):
        inside = [(p, ok) for p, ok in judged if b < p * bins <= b + 1 or p == b == 0]
        confidence = mean([p for p, _ in inside])
        acceptance = mean([ok for _, ok in inside])
        rows.append({
            "low": b / bins,
            "high": (b + 1) / bins,
            "count": len(inside),
            "confidence": confidence,
            "acceptance": acceptance})
        if inside:
            # ECE = sum_b |B_b| / n |acc(B_b) - conf(B_b)|
            error += len(inside) / len(judged) * abs(acceptance - confidence)
    return rows, error

def calibration(run):
    rows = []
    for label, drafter in run.drafters.items():
        found = each_prompt(run, partial(judged_tokens, run, drafter))
        bins, error = reliability(sum(found, []))
        by_prompt = {}
        for each in bins:
            low, high = each["low"], each["high"]
            shares = []
            for judged in found:
                inside = [ok for p, ok in judged if low < p <= high]
                shares.append(mean(inside))
            by_prompt[f"bin {low:g}"] = shares
        rows.append({**about(run, label), "ece": error, "bins": bins, "by_prompt": by_prompt})
    columns = ["arm", "ECE"]
    for number in range(BINS):
        columns.append(f"bin {number / BINS:g}")
    return rows, columns

# ---------------------------------------------------------------- acceptance by position
def position_counts(rounds):
    """verify.Rounds of chains -> [[drafted, accepted]] by position."""
    found = []
    for one in rounds:
        drafted = len(one.tokens) - 1
        accepted = min(len(one.path) - 1, len(one.new))
        # Where the output ended within the accepted run, later positions were not judged.
        judged = drafted if len(one.new) > accepted else accepted
        for i in range(judged):
            if i == len(found):
                found.append([0, 0])
            found[i][0] += 1
            found[i][1] += i < accepted
    return found

def positions(run):
    rows = []
    for label, drafter in run.drafters.items():
        build = partial(cape.chain, gamma=LONG_CHAIN)
        if bench.writes_itself(drafter):
            build = cascade.proposal
        outs = each_prompt(run, partial(run.decode, drafter, build))
        rounds = [out.rounds for out in outs]
        counts = position_counts(sum(rounds, []))
        listed = [{"position": i, "drafted": n, "accepted": ok} for i, (n, ok) in enumerate(counts, 1)]
        by_prompt = {f"position {i}": [] for i in range(1, len(counts) + 1)}
        for found in map(position_counts, rounds):
            shares = [ok / n for n, ok in found] + [None] * (len(counts) - len(found))
            for i, share in enumerate(shares, 1):
                by_prompt[f"position {i}"].append(share)
        rows.append({**about(run, label), "positions": listed, "by_prompt": by_prompt})
    return rows, ["arm", *SHOWN]

# ---------------------------------------------------------------- tree optimality
def told(calls):
    """What a builder was told in one round: of each node that it asked about, in the order of expand,

    the joint probabilities (V,) of all its children.
    """
    children = []
    for tokens, parents, rows in calls:
        for token, parent, row in zip(tokens.tolist(), parents, rows):
            joint = children[parent][token].item() if parent >= 0 else 1.0
            # p_j = p_parent c_j
            children.append(joint * row.double())
    return children

@torch.inference_mode()
def tree_optimality(decode, build, prompts):
    """-> tree_optimality; None where no node was ever drafted.  decode(build, ids, limit): of one prompt."""
    heard = []
    for _, ids, limit in prompts:
        decode(listening(build, heard), ids, min(limit, TOKENS))
    kept = best = 0.0
    for tree, calls in heard:
        nodes, joint = nodes_of(tree, calls), [1.0]
        for parent, p in zip(nodes["parents"][1:nodes["verified"]], nodes["p"][1:]):
            joint.append(joint[parent] * p)
        if joint[1:]:
            best_as_many = torch.cat(told(calls)).topk(len(joint) - 1).values
            kept += sum(joint[1:])
            best += best_as_many.sum().item()
    return kept / best if best else None

def optimality(run):
    rows = []
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            if bench.writes_itself(drafter, tree.name):
                continue                   # it writes its own chains, and tells nobody of distributions
            build = bench.builder(run, label, tree)
            found = tree_optimality(partial(run.decode, drafter), build, run.prompts[:PROMPTS])
            rows.append({**about(run, label), "tree": tree.label, "tree_optimality": found})
    return rows, ["arm", "optimality"]

# ---------------------------------------------------------------- expected walltime improvement
def predicted(rows):
    """bench.py's rows of cascades -> the same with "ewif"; None where Theorem 4.5 does not say it."""
    alone = {row["stages"][0]: row for row in rows if len(row["stages"]) == 1}
    alphas = {name: row["alpha"] for name, row in alone.items()}
    costs = {name: row["c"] for name, row in alone.items()}
    found = []
    for row in rows:
        counts, value = dict(zip(row["stages"], row["K"][0])), None
        # A horizontal cascade: no model reviews another, and Max-Gram is not in it.
        if "maxgram" not in counts and not any(any(tokens) for tokens in row["K"][1:]):
            for name in counts:
                if name not in alone:
                    raise UserError(f"{row['drafter']} needs its models alone beside it: add "
                                    f'"cascade({name}, k=5)"')
            value = ewif_of(counts, alphas, costs)
        k1, k2 = [*counts.values(), None][:2]
        found.append({**row, "k1": k1, "k2": k2, "ewif": value})
    return found

def ewif(run):
    for label, drafter in run.drafters.items():
        if not hasattr(drafter, "names"):
            raise UserError(f"{label} is no cascade: Theorem 4.5 is about cascades")
    run.trees = [bench.read_call("chain", bench.TREES, "tree")]
    rows = [row for row in measured(run, bench.arms_of(run)) if row["tree"] and row["group"] == "all"]
    columns = ["arm", "k1=k1:d", "k2=k2:d", "EWIF", "SWI", "speedup=speedup:.2f"]
    return table_1() + predicted(rows), columns

# ---------------------------------------------------------------- where a target looks things up
@torch.inference_mode()
def layers_of(model, ids):
    """ids (T,) -> the attention [(h, T, T)] of all layers, and hidden_states [(T, D)], one more."""
    try:
        model.set_attn_implementation("eager")                 # other kernels tell nobody
        out = model(ids[None].to(parts.place_of(model)), use_cache=False, output_attentions=True,
                    output_hidden_states=True)
        attention = [each[0].float().cpu() for each in out.attentions]
        assert len(attention) == len(out.hidden_states) - 1, "not each layer has attention"
        assert all(each.shape[1:] == (len(ids), len(ids)) for each in attention), "not over all keys"
    except Exception as why:
        said = " ".join(f"{type(model).__name__} does not say what its layers attend to: {why}".split())
        raise UserError(said[:150]) from None
    return attention, [each[0].cpu() for each in out.hidden_states]

def mass_there(attention, ids, new):
    """Of the last `new` tokens x_i that occurred before: the mass on keys j <= i with x_{j-1} = x_i.

    -> [(h, rows)] of each layer; of uniform attention (rows,).
    """
    same = ids[:, None] == ids
    there = F.pad(same[:, :-1], (1, 0)).tril()                             # (T, T)
    there[:-new] = False
    rows = there.any(1)
    uniform = there.sum(1) / torch.arange(1, len(ids) + 1)
    return [(each * there).sum(-1)[:, rows] for each in attention], uniform[rows]

def named_before(states, texts):
    """How often a linear map of hidden states names the token before, in every fourth text -> a share.

    states [(T, D)], texts [(T,)].  Fitted to the other texts: least squares to one-hot tokens, and a ridge.
    """
    pairs = [(rows[1:].double(), ids[:-1]) for rows, ids in zip(states, texts)]
    its, truth = map(torch.cat, zip(*pairs[3::4]))
    del pairs[3::4]
    x, before = map(torch.cat, zip(*pairs))                                # (n, D), (n,)
    middle, spread = x.mean(0), x.std(0).clamp(min=1e-6)
    x = (x - middle) / spread
    tokens, which = before.unique(return_inverse=True)                     # (C,), (n,)
    # W = (X^T X + r n I)^-1 X^T Y
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * len(x))
    targets = x.new_zeros(len(tokens), x.shape[1]).index_add(0, which, x)  # Y^T X
    weights = torch.linalg.solve(gram, targets.T)                          # (D, C)
    scores = (its - middle) / spread @ weights + which.bincount() / len(x)
    named = tokens[scores.argmax(-1)]
    return (named == truth).double().mean().item()

def lookup(run):
    if run.target.encoder_decoder or len(run.prompts) < 4:
        raise UserError("lookup wants a decoder-only target, and at least four prompts")
    cached = len(parts.cached_rows(run.model))                 # layers that GLIDE can read
    outs = each_prompt(run, partial(run.decode, None, verify.root_only))
    found = []
    for (_, ids, _), out in zip(run.prompts, outs):
        text = torch.tensor((ids + out.tokens)[-LONGEST:])
        attention, states = layers_of(run.model, text)
        found.append((text, states, *mass_there(attention, text, len(out.tokens))))
    texts, states, masses, uniform = zip(*found)
    rows, alike = [], torch.cat(uniform).mean().item()
    for layer, its in enumerate(zip(*states)):
        row = {"target": run.a.target, "drafter": str(layer), "before": named_before(its, texts)}
        if layer < cached:
            heads = torch.cat([mass[layer] for mass in masses], 1).mean(1)                 # (h,)
            row |= {"mass": heads.max().item(), "head": heads.argmax().item(), "uniform": alike}
        rows.append(row)
    best = max(rows[:cached], key=lambda row: row["mass"])
    most = max(row["before"] for row in rows[1:])
    near = [row["drafter"] for row in rows[1:] if row["before"] > most - NEAR]
    run.notes = [f"GLIDE: --layer {best['drafter']}, whose head {best['head']} puts {best['mass']:.3f} "
                 f"there; uniform attention would put {alike:.3f}",
                 f"EDD: --hidden, one of {' '.join(near)}: there the token before is still named; what the "
                 f"token itself tells of it: {rows[0]['before']:.2f} (hidden_states[0], the embedding)"]
    return rows, ["layer=name", "head=head:d", "mass on what followed=mass:.3f",
                  "hidden_states[layer] names the token before=before:.2f"]

# ---------------------------------------------------------------- the command line
MEASUREMENTS = {"calibration": calibration, "positions": positions, "optimality": optimality, "ewif": ewif,
                "lookup": lookup}

def rows_of(argv):
    """["calibration", bench.py's flags ...] -> rows, printed as a table"""
    name = argv[0] if argv else "nothing"
    if name not in MEASUREMENTS:
        raise UserError(f"there is no measurement called {name!r}: choose among {' '.join(MEASUREMENTS)}")
    flags = argv[1:]
    if name == "lookup":                       # it asks no drafter; Max-Gram goes with any target
        flags = ["--limit", TEXTS, *flags, "--drafter", "maxgram"]
    run = bench.Run(flags)
    rows, columns = MEASUREMENTS[name](run)
    print(f"\n{compare.grid(rows, columns)}\n", *run.notes, sep="\n")
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return rows

def work(argv):
    rows_of(sys.argv[1:] if argv is None else argv)
    return 0

main = partial(bench.main, work=work, name="figures/probe.py")

if __name__ == "__main__":
    sys.exit(main())
