"""Is a drafter's confidence right?  Which tokens are accepted?  Which layer should be read?

    python figures/probe.py calibration --drafter edd "edd(temperature=1)"
    python figures/probe.py positions --drafter glide "cascade(base, k=30)" --limit 12
    python figures/probe.py ewif
    python figures/probe.py lookup --target Qwen/Qwen2.5-7B-Instruct --prompts mt_bench.jsonl

calibration  Is a drafter's confidence the probability that its token is accepted?  EDD and PCT (ACL
             2025), section 3.2, Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), section 4.2,
             Figure 1(b).  Chains of ten.  Tokens after the first rejection in a chain are left out,
             since the target has not scored them.  temperature=1 gives raw confidences.
positions    How likely is the i-th token of a chain of thirty to be accepted, and so all before it?
             Cascade Speculative Drafting (arXiv 2312.11462), section 3.2, Figures 2, 3.  Cascades
             and Max-Gram write chains of their own length.
ewif         Table 1 of Cascade by Theorem 4.5; see figures/ewif.py.  It decodes nothing.
lookup       Which layer of the target should a drafter read?  For GLIDE one with induction heads,
             which attend to what followed the current token earlier in the text.  For EDD one whose
             hidden states still name the token before, by a linear map.  Texts: the target's own.

    paper                         name here
    c_i                           confidence: the drafter's largest probability, its token's
    ECE                           sum over bins of (count / all) |acceptance - confidence|
    P(accepted), token index      accepted / drafted at a position, from 1

Decoding is greedy.
"""
import inspect
import json
import shlex
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import EosTokenCriteria

import bench
import cape
import verify
from ewif import table_1
from runtime import families, load, report
from runtime.errors import UserError
from runtime.program import Parser, program

CHAIN, BINS = 10, 10                       # calibration: tokens of a chain; bins of confidence
LONG_CHAIN = 30                            # positions
TEXTS, LONGEST = 36, 512                   # lookup: texts, and tokens of each
RIDGE = 0.01                               # lookup: of the linear map, over the number of tokens

# ---------------------------------------------------------------- what programs of figures/ share
def parser(doc):
    """An argument parser with the flags that these programs share.  doc: what it prints first."""
    p = Parser(description=doc)
    flag = p.add_argument
    positive = bench.between(int, 1, 2 ** 31 - 1)
    flag("--target", default=str(bench.CHECKPOINTS / "target"), help="folder or hub name")
    flag("--checkpoint", default=str(bench.CHECKPOINTS), help="folder of the drafters")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=positive, default=bench.FEW, help="prompts, balanced by kind of text")
    flag("--max-new-tokens", type=positive, default=128, help="for each prompt")
    flag("--dtype", default="float32", help="float32, float16, bfloat16, float64 or auto")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda ...")
    flag("--json", metavar="FILE", help="write the rows to this file, one line each")
    return p

def begin(p, argv, drafters=("glide",), tree="chain"):
    """Read arguments and load what they name -> flags, Setup, {label: drafter}, prompts

    p: of parser().  The flags that p lacks have bench.py's defaults, so that its functions can be
    called; drafters and tree are the defaults of --drafter and --tree.
    """
    a = bench.parser().parse_args(["--drafter", *drafters, "--tree", tree])
    for action in p._actions:
        if action.dest not in ("drafter", "tree"):
            vars(a).pop(action.dest, None)         # p's default counts
    a = p.parse_args(argv, a)
    calls, trees = bench.check(a)
    graphs = getattr(a, "graphs", False)
    setup = load.Setup(a.target, a.checkpoint, a.dtype, a.device, graphs=graphs)
    bench.check_target(a.target, setup.target, calls, trees)
    found = {call.label: setup.drafter(call) for call in calls}
    prompts = bench.read_prompts(a, setup, a.prompts or [bench.PROMPTS], a.limit)
    print(*setup.notes, sep="\n", end="\n" * bool(setup.notes))
    return a, setup, found, prompts

def finish(a, rows, keys, name, argv, device):
    """Print these keys of the rows as a table, and write the rows to --json."""
    print("\t".join(keys))
    for row in rows:
        cells = (row.get(key) for key in keys)
        print("\t".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    about = {"command": shlex.join(["python", f"figures/{name}.py", *argv]),
             **report.provenance(device)}
    if a.json:
        lines = [json.dumps(about | row) + "\n" for row in rows]
        Path(a.json).write_text("".join(lines), encoding="utf-8")

def decoded(setup, drafter, build, prompt):
    """Greedy decoding after a bench.Prompt -> verify.Output"""
    stop = [] if setup.eos is None else [EosTokenCriteria(setup.eos)]
    return verify.generate(setup.target, drafter, build, prompt.ids, prompt.limit, stop=stop)

def row_of(label, prompts, each, figures):
    """A drafter's row: the figures of all prompts together, and as "by_prompt" of each.

    each: [what was measured of a prompt, a list]; figures(a list) -> {key: value}
    """
    by_prompt = [{"kind": prompt.kind, "question": prompt.question, **figures(one)}
                 for prompt, one in zip(prompts, each)]
    return {"drafter": label, "prompts": len(prompts), **figures(sum(each, [])),
            "by_prompt": by_prompt}

# ---------------------------------------------------------------- calibration
def scored_tokens(setup, drafter, prompt):
    """Decode a prompt by chains -> [(confidence, accepted?)] of the tokens that were scored"""
    noted = []                                     # of each round: its distributions

    def build(expand, root):
        rows = []

        def heard(tokens, parents):
            rows.append(expand(tokens, parents)[0])
            return rows[-1][None]
        heard.remaining = expand.remaining
        noted.append(rows)
        return cape.chain(heard, root, gamma=CHAIN)

    scored = []
    for one, rows in zip(decoded(setup, drafter, build, prompt).rounds, noted):
        # one.new: the accepted tokens, then the target's own, where the first draft was rejected.
        for drafted, true, probs in zip(one.tokens[1:], one.new, rows):
            scored.append((probs.max().item(), drafted == true))
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
    shares, error = reliability(scored)
    return {"ece": error, **{f"bin {100 * b // BINS}": share for b, share in enumerate(shares)}}

def calibration(setup, drafters, prompts):
    rows = []
    for label, drafter in drafters.items():
        each = [scored_tokens(setup, drafter, prompt) for prompt in tqdm(prompts, disable=None)]
        rows.append(row_of(label, prompts, each, calibration_of))
    return rows, ["drafter", "ece", *(f"bin {b}" for b in (10, 30, 50, 70, 90))]

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

def positions(setup, drafters, prompts):
    rows = []
    for label, drafter in drafters.items():
        # A cascade writes a chain of its own.
        build = getattr(drafter, "chain", partial(cape.chain, gamma=LONG_CHAIN))
        each = [decoded(setup, drafter, build, prompt).rounds
                for prompt in tqdm(prompts, disable=None)]
        rows.append(row_of(label, prompts, each, positions_of))
    return rows, ["drafter", *(f"position {i}" for i in (1, 2, 3, 5, 10, 20))]

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

def lookup(setup, drafters, prompts):
    if setup.target.encoder_decoder or len(prompts) < 4:
        raise UserError("lookup wants a decoder-only target, and at least four prompts")
    readable = len(families.cached_kv(setup.model))            # layers that GLIDE can read
    outputs = [decoded(setup, None, verify.root_only, prompt).tokens
               for prompt in tqdm(prompts, disable=None)]
    texts, states, masses = [], [], []                         # of each prompt
    for prompt, tokens in zip(prompts, outputs):
        text = torch.tensor((prompt.ids + tokens)[-LONGEST:])
        attention, of_layers = layers_of(setup.model, text)
        texts.append(text)
        states.append(of_layers)
        masses.append(mass_there(attention, text, len(tokens)))
    rows = []
    for layer in range(len(states[0])):
        of_layer = [of_layers[layer] for of_layers in states]
        row = {"drafter": f"layer {layer}", "before": named_before(of_layer, texts)}
        if layer < readable:
            heads = torch.cat([mass[layer] for mass in masses], 1).mean(1)      # (h,)
            row |= {"mass": heads.max().item(), "head": heads.argmax().item()}
        rows.append(row)
    return rows, ["drafter", "head", "mass", "before"]

def ewif(setup, drafters, prompts):
    return table_1(), ["drafter", "k1", "k2", "ewif"]

# ---------------------------------------------------------------- the command line
MEASUREMENTS = {"calibration": calibration, "positions": positions, "ewif": ewif, "lookup": lookup}

@program
def main(argv):
    p = parser(inspect.getdoc(sys.modules[__name__]))
    p.add_argument("measurement", choices=MEASUREMENTS)
    p.add_argument("--drafter", nargs="+", help="as bench.py takes them (default: glide)")
    kind = next((word for word in argv if word in MEASUREMENTS), None)
    if kind == "ewif":
        a = p.parse_args(argv)
        rows, keys = ewif(None, None, None)
        return finish(a, rows, keys, "probe", argv, torch.device("cpu"))
    if kind == "lookup":                           # it needs no drafter, and more texts
        p.set_defaults(limit=TEXTS)
    a, setup, drafters, prompts = begin(p, argv, ["maxgram" if kind == "lookup" else "glide"])
    rows, keys = MEASUREMENTS[a.measurement](setup, drafters, prompts)
    rows = [{"target": a.target, **row} for row in rows]
    finish(a, rows, keys, "probe", argv, setup.target.device)

if __name__ == "__main__":
    sys.exit(main())
