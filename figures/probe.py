r"""Is a drafter's confidence right?  Is theory?  Which layer of the target should be read?

    python figures/probe.py calibration --drafter edd glide --json rows.jsonl
    python figures/probe.py positions --drafter glide "cascade(base, k=30)" "cascade(small, k=30)"
    python figures/probe.py ewif \
        --drafter "cascade(base, k=5)" "cascade(small, k=5)" "cascade(base, small, k=(3, 5, 0))"
    python figures/probe.py lookup --target Qwen/Qwen2.5-7B-Instruct --prompts mt_bench.jsonl

calibration  Is a drafter's confidence the probability that its token is accepted?  EDD and PCT (ACL
             2025), section 3.2, Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), section 4.2,
             Figure 1(b).  Chains of ten.  Tokens after the first rejection in a chain are left out,
             since the target has not scored them.  "ece" is the error of the confidence that trees
             see, after the drafter's calibration temperature; "ece_raw" that of its plain softmax.
positions    How likely is the i-th token of a chain of thirty to be accepted?  Cascade Speculative
             Drafting (arXiv 2312.11462), section 3.2, Figures 2, 3.  Cascades and Max-Gram write
             chains of their own length.
ewif         Do Theorems 4.5 and 4.3 of Cascade predict how much faster decoding is?  Its Table 1;
             then the named arms: their SWI, which counts the models' forwards alone, and speedup.
lookup       Which layer of the target should a drafter read?  For GLIDE one with induction heads,
             which attend to what followed the current token earlier in the text.  For EDD one whose
             hidden states still name the token before, by a linear map.  Texts: the target's own.

    paper                         name here
    c_i                           confidence: the drafter's largest probability, its token's
    ECE                           sum over bins of (count / all) |acceptance - confidence|
    P(accepted), token index      accepted / drafted at a position, from 1: it and all before it
    alpha_i, c_i                  measured in speculative decoding with that model alone

Other flags are bench.py's.
"""
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from ewif import ewif_of, ewif_vertical, geometric, table_1  # noqa: E402
from rounds import listening  # noqa: E402
from tables import grid, with_by_prompt  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402
import cascade  # noqa: E402
import verify  # noqa: E402
from runtime import drafters  # noqa: E402
from verify import UserError  # noqa: E402

CHAIN, BINS = 10, 10                       # calibration: tokens of a chain; bins of confidence
LONG_CHAIN = 30                            # positions
TEXTS, LONGEST = "36", 512                 # lookup: texts, and tokens of each
RIDGE = 0.01                               # lookup: of the linear map, over the number of tokens

def each_prompt(run, work):
    """-> [work(ids, limit) of each prompt]"""
    bar = tqdm(run.prompts, unit="prompt", leave=False, disable=None)
    return [work(ids, limit) for _, ids, limit in bar]

def row_of(run, label, each, figures):
    """A drafter's row: the figures of all prompts together, and as "by_prompt" of each.

    each: [what was measured of a prompt, a list]; figures(a list) -> {key: value}
    """
    found = figures(sum(each, []))
    of_prompts = [figures(one) for one in each]
    by_prompt = {key: [one.get(key) for one in of_prompts] for key in found}
    a = run.a
    about = {"target": a.target, "drafter": label, "temperature": a.temperature, "seed": a.seed}
    return {**about, **found, "by_prompt": by_prompt}

# ---------------------------------------------------------------- calibration
def scored_tokens(run, drafter, ids, limit):
    """Decode a prompt by chains -> [(confidence, raw confidence, accepted?)] of scored tokens"""
    drafts = []
    scored = []
    temperature = getattr(drafter, "temperature", 1.0)
    build = listening(partial(cape.chain, gamma=CHAIN), drafts)
    out = run.decode(drafter, build, ids, limit)
    for one, (_, rows) in zip(out.rounds, drafts):
        # one.new: the accepted tokens, then the target's own, where the first draft was rejected.
        # rows: the probabilities after the root, after the first drafted token, and so on.
        for drafted, true, probs in zip(one.tokens[1:], one.new, rows.values()):
            # softmax(z / T) gives log p = z / T - constant, so softmax(T log p) = softmax(z).
            raw = (temperature * probs.log()).softmax(-1)
            scored.append((probs.max().item(), raw.max().item(), drafted == true))
    return scored

def reliability(pairs):
    """[(confidence, accepted?)] -> [share accepted in each bin, or None], calibration error

    Bins are closed on the right, (0, .1] ... (.9, 1].
    """
    shares = []
    error = 0.0
    for b in range(BINS):
        inside = [pair for pair in pairs if b < pair[0] * BINS <= b + 1]
        shares.append(None)
        if inside:
            confidence = fmean(confidence for confidence, _ in inside)
            shares[b] = fmean(accepted for _, accepted in inside)
            # ECE = sum_b |B_b| / n |acc(B_b) - conf(B_b)|
            error += len(inside) / len(pairs) * abs(shares[b] - confidence)
    return shares, error

def calibration_of(scored):
    """"bin 90": the share accepted of the tokens with a confidence above .9, and so on."""
    shares, error = reliability([(p, accepted) for p, _, accepted in scored])
    _, raw_error = reliability([(p, accepted) for _, p, accepted in scored])
    bins = {f"bin {100 * b // BINS}": share for b, share in enumerate(shares)}
    return {"ece": error, "ece_raw": raw_error, **bins}

def calibration(run):
    rows = []
    for label, drafter in run.drafters.items():
        each = each_prompt(run, partial(scored_tokens, run, drafter))
        rows.append(row_of(run, label, each, calibration_of))
    bins = [f"bin {b}=bin {b}:.2f" for b in (10, 30, 50, 70, 90)]
    return rows, ["arm", "ECE, raw", "ECE", *bins]

# ---------------------------------------------------------------- acceptance by position
def positions_of(rounds):
    """verify.Rounds of chains -> {"position 5": the share of fifth tokens that were accepted}"""
    drafted, accepted = Counter(), Counter()
    for one in rounds:
        count = min(len(one.path) - 1, len(one.new))
        # Where the output ended within the accepted tokens, the target did not score the rest.
        ended = len(one.new) == count
        drafted.update(range(count if ended else len(one.tokens) - 1))
        accepted.update(range(count))
    return {f"position {i + 1}": accepted[i] / drafted[i] for i in range(len(drafted))}

def positions(run):
    rows = []
    for label, drafter in run.drafters.items():
        build = partial(cape.chain, gamma=LONG_CHAIN)
        if hasattr(drafter, "chain"):
            build = cascade.proposal           # it writes a chain of its own
        outs = each_prompt(run, partial(run.decode, drafter, build))
        rows.append(row_of(run, label, [out.rounds for out in outs], positions_of))
    columns = [f"position {i}=position {i}:.2f" for i in (1, 2, 3, 5, 10, 20)]
    return rows, ["arm", *columns]

# ---------------------------------------------------------------- expected walltime improvement
def predicted(rows):
    """bench.py's rows of cascades -> the same with "ewif", None where no theorem applies.

    The rows of the models alone, "cascade(base, k=5)", give alpha(M_t, M_i) and c(M_t, M_i).
    """
    alone = {row["stages"][0]: row for row in rows if len(row["stages"]) == 1}
    found = []
    for row in rows:
        missing = [name for name in row["stages"] if name not in alone]
        if missing:
            raise UserError(f"{row['drafter']} needs its models alone beside it: add "
                            f'"cascade({missing[0]}, k=5)"')
        counts = dict(zip(row["stages"], row["K"][0]))
        k1, k2 = [*counts.values(), None][:2]
        found.append({**row, "k1": k1, "k2": k2, "ewif": ewif_of_row(row, counts, alone)})
    return found

def ewif_of_row(row, counts, alone):
    """Theorem 4.5 where no model reviews another one, 4.3 where the first reviews the second."""
    if "maxgram" in row["stages"]:
        return None                            # its acceptance depends on the length of a match
    alphas = {name: of_one["alpha"] for name, of_one in alone.items()}
    costs = {name: of_one["c"] for name, of_one in alone.items()}
    if not any(any(drafted) for drafted in row["K"][1:]):
        return ewif_of(counts, alphas, costs)
    if len(counts) != 2 or row["K"][0][1]:
        return None                            # a cascade both vertical and horizontal
    first, second = row["stages"]
    k = row["K"][1][1]
    target_runs, first_runs, _ = row["runs"]
    # The tokens of an inner round are 1 + alpha' + ... + alpha'^k, from which follows alpha'.
    tokens = row["nodes"] * target_runs / first_runs
    grid_of_alphas = np.linspace(0, 1, 1001)
    alpha_inner = np.interp(tokens, geometric(grid_of_alphas, k), grid_of_alphas)
    n = round(first_runs / target_runs)
    return ewif_vertical(alphas[first], alpha_inner, costs[first], costs[second], n, k)

def ewif(run):
    run.trees = [bench.read_call("chain", bench.TREES, "tree")]
    arms = bench.arms_of(run)
    if bench.measure_all(run, arms) < len(run.prompts):
        raise KeyboardInterrupt
    rows = with_by_prompt(bench.tables(run, arms, len(run.prompts)), run.prompts)
    rows = [row for row in rows if row["tree"] and row["group"] == "all"]
    columns = ["arm", "k1=k1:d", "k2=k2:d", "EWIF", "SWI", "speedup=speedup:.2f"]
    return table_1() + predicted(rows), columns

# ---------------------------------------------------------------- induction heads
@torch.inference_mode()
def layers_of(model, ids):
    """ids (T,) -> the attention [(h, T, T)] of all layers, and hidden_states [(T, D)], one more."""
    model.set_attn_implementation("eager")                     # other kernels give no weights
    device = model.get_input_embeddings().weight.device
    out = model(ids[None].to(device), use_cache=False, output_attentions=True,
                output_hidden_states=True)
    states = [hidden[0].cpu() for hidden in out.hidden_states]
    attention = [weights[0].float().cpu() for weights in out.attentions]
    return attention, states

def mass_there(attention, ids, new):
    """The attention mass on keys j <= i with x_{j-1} = x_i, what followed x_i earlier in the text.

    Of those of the last `new` tokens x_i that did occur before, m in number.
    -> [(h, m)] of each layer
    """
    same = ids[:, None] == ids                                 # (T, T)
    followed = F.pad(same[:, :-1], (1, 0)).tril()              # (i, j): x_{j-1} = x_i and j <= i
    followed[:-new] = False
    counted = followed.any(1)                                  # (T,)
    return [(weights * followed).sum(-1)[:, counted] for weights in attention]

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
    readable = len(drafters.cached_kv(run.model))              # layers that GLIDE can read
    outs = each_prompt(run, partial(run.decode, None, verify.root_only))
    texts, states, masses = [], [], []                         # of each prompt
    for (_, ids, _), out in zip(run.prompts, outs):
        text = torch.tensor((ids + out.tokens)[-LONGEST:])
        attention, of_layers = layers_of(run.model, text)
        texts.append(text)
        states.append(of_layers)
        masses.append(mass_there(attention, text, len(out.tokens)))
    rows = []
    for layer in range(len(states[0])):
        of_layer = [of_layers[layer] for of_layers in states]
        before = named_before(of_layer, texts)
        row = {"target": run.a.target, "drafter": str(layer), "before": before}
        if layer < readable:
            heads = torch.cat([mass[layer] for mass in masses], 1).mean(1)      # (h,)
            row |= {"mass": heads.max().item(), "head": heads.argmax().item()}
        rows.append(row)
    columns = ["layer=name", "head=head:d", "mass on what followed=mass:.3f",
               "hidden_states[layer] names the token before=before:.2f"]
    return rows, columns

# ---------------------------------------------------------------- the command line
MEASUREMENTS = {"calibration": calibration, "positions": positions, "ewif": ewif, "lookup": lookup}

def show(run, rows, columns):
    """Print rows as a table, with the run's notes, and write them to --json."""
    print(f"\n{grid(rows, columns)}\n", *run.notes, sep="\n")
    if run.a.json:
        bench.write_json(run.a.json, rows)

def rows_of(argv):
    """["calibration", bench.py's flags ...] -> rows, printed as a table"""
    name, flags = argv[0] if argv else "nothing", argv[1:]
    if name not in MEASUREMENTS:
        known = " ".join(MEASUREMENTS)
        raise UserError(f"there is no measurement called {name!r}: choose among {known}")
    if name == "lookup":                       # it needs no drafter; Max-Gram goes with any target
        flags = ["--limit", TEXTS, *flags, "--drafter", "maxgram"]
    run = bench.Run(flags)
    rows, columns = MEASUREMENTS[name](run)
    show(run, rows, columns)
    return rows

def work(argv, rows_of=rows_of):
    rows_of(sys.argv[1:] if argv is None else argv)
    return 0

main = partial(bench.main, work=work, name="figures/probe.py")

if __name__ == "__main__":
    sys.exit(main())
