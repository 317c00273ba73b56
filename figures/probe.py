r"""Is a drafter's confidence right?  How good are trees, and theory?  Which layer should be read?

    python figures/probe.py calibration --drafter edd glide --json rows.jsonl
    python figures/probe.py positions --drafter glide "cascade(base, k=30)" "cascade(small, k=30)"
    python figures/probe.py optimality --drafter glide edd --tree chain cape "beam(width=8)" pct
    python figures/probe.py ewif \
        --drafter "cascade(base, k=5)" "cascade(small, k=5)" "cascade(base, small, k=(3, 5, 0))"
    python figures/probe.py lookup --target Qwen/Qwen2.5-7B-Instruct --prompts mt_bench.jsonl

calibration  Is a drafter's confidence the probability that its token is accepted?  EDD and PCT (ACL
             2025), section 3.2, Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), section 4.2,
             Figure 1(b).  Chains of ten.  Tokens after the first rejection in a chain are left out:
             no target has judged them.
positions    How likely is the i-th token of a chain of thirty to be accepted?  Cascade Speculative
             Drafting (arXiv 2312.11462), section 3.2, Figures 2, 3.  Cascades and Max-Gram write
             chains of their own length.
optimality   The joint probabilities of a tree's nodes, over those of the best tree of that size.
             Its candidates are all tokens of the vocabulary after each node that expand was given.
ewif         Does Theorem 4.5 of Cascade predict how much faster decoding is?  Its Table 1; then
             the named arms: their SWI, which counts the models' forwards alone, and their speedup.
lookup       Which layer of the target should a drafter read?  For GLIDE one with induction heads,
             which attend to what followed the current token earlier in the text.  For EDD one whose
             hidden states still name the token before, by a linear map.  Texts: the target's own.

    paper                         name here
    c_i                           confidence: the drafter's largest probability, its token's
    ECE                           sum over bins of (count / all) |acceptance - confidence|
    P(accepted), token index      accepted / drafted at a position, from 1: it and all before it
    p_j = c_1 c_2 ... c_j         joint probability of node j (EDD, section 3.2)
    alpha_i, c_i                  measured in speculative decoding with that model alone

Other flags are bench.py's; --tree is for optimality alone.
"""
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tables as compare  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ewif import ewif_of, table_1  # noqa: E402
from rounds import listening, nodes_of  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402
import cascade  # noqa: E402
import verify  # noqa: E402
from runtime import drafters as runtime_drafters  # noqa: E402
from verify import UserError  # noqa: E402

CHAIN, BINS = 10, 10                       # calibration: tokens of a chain; bins of confidence
LONG_CHAIN = 30                            # positions
SHOWN = "position 1", "position 2", "position 3", "position 5", "position 10", "position 20"
PROMPTS, TOKENS = 4, 48                    # optimality
TEXTS, LONGEST = "36", 512                 # lookup: texts, and tokens of one
RIDGE = 0.01                               # lookup: of the linear map, over the number of tokens
NEAR = 0.02                                # lookup: shares that are as good as the best
BY_PROMPT = ("speedup", "tau", "alpha", "alpha_overlap", "alpha_depth", "nodes", "c",
             "expected_speedup", "draft_ms", "share_draft", "swi_ms", "swi_measured")

def about(run, label):
    """What every row of these measurements tells about its run."""
    a = run.a
    return {"target": a.target, "drafter": label, "temperature": a.temperature, "seed": a.seed}

def each_prompt(run, work):
    """-> [work(ids, limit)] of each prompt"""
    bar = tqdm(run.prompts, unit="prompt", leave=False, disable=None)
    return [work(ids, limit) for _, ids, limit in bar]

def mean(values):
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None

def measured(run, arms, after=None):
    """What bench.py measures -> its rows; those of all prompts have {key: values by prompt}."""
    finished = bench.measure(run, arms, after)
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
            values = [one.get(key) for one in each]
            if any(value is not None for value in values):
                row["by_prompt"][key] = values
    return rows

# ---------------------------------------------------------------- calibration
def judged_tokens(run, drafter, ids, limit):
    """Decode one prompt by chains -> [(confidence, accepted?)] of all tokens that were judged."""
    drafts = []
    judged = []
    build = listening(partial(cape.chain, gamma=CHAIN), drafts)
    out = run.decode(drafter, build, ids, limit)
    for one, (_, calls) in zip(out.rounds, drafts):
        # A chain calls expand with one node after the other.
        confidences = [probs.max().item() for _, _, probs in calls]
        # one.new: the accepted tokens, then the target's own, where the first draft was rejected.
        for drafted, confidence, true in zip(one.tokens[1:], confidences, one.new):
            judged.append((confidence, drafted == true))
    return judged

def accepted_in(judged, low, high):
    """Of the judged tokens in the bin (low, high], whether each was accepted."""
    return [accepted for confidence, accepted in judged if low < confidence <= high]

def reliability(judged, bins=BINS):
    """-> ([{low, high, confidence, acceptance, count} of each bin], expected calibration error).

    Bins are closed on the right, the first one on the left too.
    """
    rows = []
    error = 0.0
    for b in range(bins):
        inside = []
        for confidence, accepted in judged:
            in_bin = b < confidence * bins <= b + 1
            if in_bin or (b == 0 and confidence == 0):
                inside.append((confidence, accepted))
        confidence = mean([confidence for confidence, _ in inside])
        acceptance = mean([accepted for _, accepted in inside])
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
        by_text = each_prompt(run, partial(judged_tokens, run, drafter))
        bins, error = reliability(sum(by_text, []))
        by_prompt = {}
        for one in bins:
            shares = [mean(accepted_in(judged, one["low"], one["high"])) for judged in by_text]
            by_prompt[f"bin {one['low']:g}"] = shares
        rows.append({**about(run, label), "ece": error, "bins": bins, "by_prompt": by_prompt})
    columns = ["arm", "ECE"]
    for number in range(BINS):
        columns.append(f"bin {number / BINS:g}")
    return rows, columns

# ---------------------------------------------------------------- acceptance by position
def position_counts(rounds):
    """verify.Rounds of chains -> [[drafted, accepted]] by position."""
    counts = []
    for one in rounds:
        drafted = len(one.tokens) - 1
        accepted = min(len(one.path) - 1, len(one.new))
        # Where the output ended within the accepted tokens, later positions were not judged.
        ended = len(one.new) == accepted
        judged = accepted if ended else drafted
        for i in range(judged):
            if i == len(counts):
                counts.append([0, 0])
            counts[i][0] += 1
            counts[i][1] += i < accepted
    return counts

def positions(run):
    rows = []
    for label, drafter in run.drafters.items():
        build = partial(cape.chain, gamma=LONG_CHAIN)
        if bench.writes_itself(drafter):
            build = cascade.proposal
        outs = each_prompt(run, partial(run.decode, drafter, build))
        rounds = [out.rounds for out in outs]
        counts = position_counts(sum(rounds, []))
        listed = []
        by_prompt = {}
        for i, (n, accepted) in enumerate(counts, 1):
            listed.append({"position": i, "drafted": n, "accepted": accepted})
            by_prompt[f"position {i}"] = []
        for of_prompt in rounds:
            shares = [accepted / n for n, accepted in position_counts(of_prompt)]
            shares += [None] * (len(counts) - len(shares))
            for i, share in enumerate(shares, 1):
                by_prompt[f"position {i}"].append(share)
        rows.append({**about(run, label), "positions": listed, "by_prompt": by_prompt})
    return rows, ["arm", *SHOWN]

# ---------------------------------------------------------------- tree optimality
def candidates_of(calls):
    """The calls of expand in a round -> for each node, the joint probability (V,) of any child."""
    children = []
    for tokens, parents, probs in calls:
        for token, parent, after in zip(tokens.tolist(), parents, probs):
            joint = children[parent][token].item() if parent >= 0 else 1.0
            # p_j = p_parent c_j
            children.append(joint * after.double())
    return children

@torch.inference_mode()
def tree_optimality(decode, build, prompts):
    """-> a share; None where no node was drafted.  decode(build, ids, limit) decodes one prompt."""
    rounds = []
    for _, ids, limit in prompts:
        decode(listening(build, rounds), ids, min(limit, TOKENS))
    kept = best = 0.0
    for tree, calls in rounds:
        nodes = nodes_of(tree, calls)
        verified = nodes["verified"]
        joint = [1.0]
        for parent, p in zip(nodes["parents"][1:verified], nodes["p"][1:]):
            joint.append(joint[parent] * p)
        drafted = len(joint) - 1
        if drafted:
            candidates = torch.cat(candidates_of(calls))
            kept += sum(joint[1:])
            best += candidates.topk(drafted).values.sum().item()
    return kept / best if best else None

def optimality(run):
    rows = []
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            if bench.writes_itself(drafter, tree.name):
                continue                   # it writes its own chain, without expand
            build = bench.builder(run, label, tree)
            share = tree_optimality(partial(run.decode, drafter), build, run.prompts[:PROMPTS])
            rows.append({**about(run, label), "tree": tree.label, "tree_optimality": share})
    return rows, ["arm", "optimality"]

# ---------------------------------------------------------------- expected walltime improvement
def is_horizontal(row):
    """Whether no model of a cascade reviews another one, and Max-Gram is not in it."""
    reviews = any(any(counts) for counts in row["K"][1:])
    return not reviews and "maxgram" not in row["stages"]

def predicted(rows):
    """bench.py's rows of cascades -> the same with "ewif", None if Theorem 4.5 does not apply."""
    alone = {row["stages"][0]: row for row in rows if len(row["stages"]) == 1}
    alphas = {name: row["alpha"] for name, row in alone.items()}
    costs = {name: row["c"] for name, row in alone.items()}
    found = []
    for row in rows:
        counts = dict(zip(row["stages"], row["K"][0]))
        value = None
        if is_horizontal(row):
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
    rows = measured(run, bench.arms_of(run))
    rows = [row for row in rows if row["tree"] and row["group"] == "all"]
    columns = ["arm", "k1=k1:d", "k2=k2:d", "EWIF", "SWI", "speedup=speedup:.2f"]
    return table_1() + predicted(rows), columns

# ---------------------------------------------------------------- induction heads
@torch.inference_mode()
def layers_of(model, ids):
    """ids (T,) -> the attention [(h, T, T)] of all layers, and hidden_states [(T, D)], one more."""
    try:
        model.set_attn_implementation("eager")                 # other kernels give no weights
        out = model(ids[None].to(parts.place_of(model)), use_cache=False, output_attentions=True,
                    output_hidden_states=True)
        attention = [weights[0].float().cpu() for weights in out.attentions]
        states = [rows[0].cpu() for rows in out.hidden_states]
        assert len(attention) == len(states) - 1, "not each layer has attention"
        T = len(ids)
        assert all(weights.shape[1:] == (T, T) for weights in attention), "not over all keys"
    except Exception as why:
        reason = " ".join(str(why).split())
        text = f"{type(model).__name__} does not say what its layers attend to: {reason}"
        raise UserError(text[:150]) from None
    return attention, states

def mass_there(attention, ids, new):
    """The attention mass on keys j <= i with x_{j-1} = x_i, what followed x_i earlier in the text.

    Of those of the last `new` tokens x_i that did occur before, m in number.
    -> [(h, m)] of each layer; (m,) of uniform attention.
    """
    same = ids[:, None] == ids                                 # (T, T)
    followed = F.pad(same[:, :-1], (1, 0)).tril()              # (i, j): x_{j-1} = x_i and j <= i
    followed[:-new] = False
    counted = followed.any(1)                                  # (T,)
    uniform = followed.sum(1) / torch.arange(1, len(ids) + 1)
    mass = [(weights * followed).sum(-1)[:, counted] for weights in attention]
    return mass, uniform[counted]

def named_before(states, texts):
    """How often a linear map of hidden states predicts the token before, in every fourth text.

    states [(T, D)], texts [(T,)].  Fitted to the other texts: least squares to one-hot tokens, and
    a ridge.  -> a share
    """
    fitted = []
    held_out = []
    for number, (rows, ids) in enumerate(zip(states, texts)):
        part = held_out if number % 4 == 3 else fitted
        part.append((rows[1:].double(), ids[:-1]))
    x = torch.cat([rows for rows, _ in fitted])                # (n, D)
    before = torch.cat([ids for _, ids in fitted])             # (n,)
    x_held_out = torch.cat([rows for rows, _ in held_out])
    truth = torch.cat([ids for _, ids in held_out])
    middle, spread = x.mean(0), x.std(0).clamp(min=1e-6)
    x = (x - middle) / spread
    tokens, which = before.unique(return_inverse=True)         # (C,), (n,)
    # W = (X^T X + r n I)^-1 X^T Y
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * len(x))
    YTX = x.new_zeros(len(tokens), x.shape[1]).index_add(0, which, x)
    W = torch.linalg.solve(gram, YTX.T)                        # (D, C)
    share_of_each = which.bincount() / len(x)
    scores = (x_held_out - middle) / spread @ W + share_of_each
    predicted_tokens = tokens[scores.argmax(-1)]
    return (predicted_tokens == truth).double().mean().item()

def lookup(run):
    if run.target.encoder_decoder or len(run.prompts) < 4:
        raise UserError("lookup wants a decoder-only target, and at least four prompts")
    readable = len(runtime_drafters.cached_kv(run.model))                 # layers that GLIDE can read
    outs = each_prompt(run, partial(run.decode, None, verify.root_only))
    texts, states, masses, uniforms = [], [], [], []           # of each prompt
    for (_, ids, _), out in zip(run.prompts, outs):
        text = torch.tensor((ids + out.tokens)[-LONGEST:])
        attention, of_layers = layers_of(run.model, text)
        mass, uniform = mass_there(attention, text, len(out.tokens))
        texts.append(text)
        states.append(of_layers)
        masses.append(mass)
        uniforms.append(uniform)
    uniform = torch.cat(uniforms).mean().item()
    rows = []
    for layer in range(len(states[0])):
        of_layer = [of_layers[layer] for of_layers in states]
        before = named_before(of_layer, texts)
        row = {"target": run.a.target, "drafter": str(layer), "before": before}
        if layer < readable:
            heads = torch.cat([mass[layer] for mass in masses], 1).mean(1)      # (h,)
            row |= {"mass": heads.max().item(), "head": heads.argmax().item(), "uniform": uniform}
        rows.append(row)
    run.notes = advice(rows, readable)
    return rows, ["layer=name", "head=head:d", "mass on what followed=mass:.3f",
                  "hidden_states[layer] names the token before=before:.2f"]

def advice(rows, readable):
    """lookup's rows -> the layer for GLIDE, those for EDD, a sentence each."""
    best = max(rows[:readable], key=lambda row: row["mass"])
    most = max(row["before"] for row in rows[1:])
    near = [row["drafter"] for row in rows[1:] if row["before"] > most - NEAR]
    return [
        f"GLIDE: --layer {best['drafter']}, whose head {best['head']} puts {best['mass']:.3f} there"
        f" (uniform attention: {best['uniform']:.3f})",
        f"EDD: --hidden, one of {' '.join(near)}: there the token before is still named; from the "
        f"token itself one can tell {rows[0]['before']:.2f} (hidden_states[0], the embedding)"]

# ---------------------------------------------------------------- the command line
MEASUREMENTS = {"calibration": calibration, "positions": positions, "optimality": optimality,
                "ewif": ewif, "lookup": lookup}

def rows_of(argv):
    """["calibration", bench.py's flags ...] -> rows, printed as a table"""
    name = argv[0] if argv else "nothing"
    if name not in MEASUREMENTS:
        known = " ".join(MEASUREMENTS)
        raise UserError(f"there is no measurement called {name!r}: choose among {known}")
    flags = argv[1:]
    if name == "lookup":                       # it needs no drafter; Max-Gram goes with any target
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
