"""What is measured: the runs, and the tables of the pages in docs/ that are made of their rows.

A run is one command; its rows stand in docs/results/NAME.jsonl.  A table shows some arms of a run
beside what a paper prints, and tests what the paper claims about them.  figures/paper.py explains
how; the pages name a table where it stands.

    columns     keys of a row (COLUMNS in paper.py), "tau on story": of one kind of text alone
    arms        [(arm, its name in the paper, {key: what the paper prints})]; None: all arms
    claims      [(what, key, first, second)]: the first arm is above the second.  "=tau": the two
                are equal.  The second may be a pattern, "cascade(*", or several: then the best of
                all other arms that it fits is compared, whichever that is
"""
from collections import namedtuple

# minutes: on two quiet cores, where a plain step takes 16 ms; counted: whether its tables show only
# counts, which other programs on the machine do not disturb.  old: why it cannot be measured again.
Run = namedtuple("Run", "minutes command counted old", defaults=(False, None))
Table = namedtuple("Table", "run paper where columns arms claims", defaults=((), None, ()))

# ---------------------------------------------------------------- the stand-in's runs
# The fastest k of each cascade on the prompts of the run cascade-k; tests/test_paper.py checks it.
BASE, SMALL = "cascade(base, k=4)", "cascade(small, k=4)"
BASE_GRAM, SMALL_GRAM = "cascade(base, maxgram, k=5)", "cascade(small, maxgram, k=2)"
THREE = "cascade(base, small, maxgram, k=(1, 1, 1))"
VERTICAL, HORIZONTAL = "cascade(base, small, k=(4, 4, 1))", "cascade(base, small, k=(3, 6, 0))"
TUNED = (BASE, SMALL, BASE_GRAM, SMALL_GRAM, THREE, VERTICAL, HORIZONTAL)
LENIENT = THREE.replace("))", "), lenience=3)")
# What the sweep tries
KS = {"base": (2, 3, 4, 6, 8), "small": (2, 3, 4, 6), "base, maxgram": (1, 2, 3, 5),
      "small, maxgram": (1, 2, 3),
      "base, small, maxgram": ((1, 1, 1), (2, 2, 1), (2, 3, 1), (2, 4, 1), (3, 6, 1)),
      "base, small": ((2, 2, 1), (3, 3, 1), (4, 4, 1), (4, 4, 2),            # vertical
                      (1, 3, 0), (2, 4, 0), (3, 5, 0), (3, 6, 0))}           # horizontal

def quoted(*drafters):
    return " ".join(f'"{drafter}"' for drafter in drafters)

SWEEP = quoted(*(f"cascade({models}, k={k})" for models, ks in KS.items() for k in ks))
MEDUSA_TREE = "eagle2(total=63, depth=5)"
# With the paper's s_d / s_t, 1.1 ms / 29.8 ms, these trees do not depend on the machine.
PCT, WIDE = "pct(cost=0.037)", "pct(width={}, cost=0.037)"

ALL, ROWS, FEWER = (f"--limit {limit} --max-new-tokens 64" for limit in (36, 18, 12))

# In the order of their importance
RUNS = {
    "costs": Run(0.3, "python figures/costs.py"),
    "main": Run(0.7, "python bench.py --drafter glide --tree cape"),
    "cascade-k": Run(2, "python bench.py --prompts figures/tuning.jsonl --max-new-tokens 64 "
                     f"--tree chain --drafter {SWEEP}"),
    "chains": Run(4, f"python bench.py {ALL} --tree chain --drafter glide glide-top vanilla "
                  "edd edd-top vdm eagle medusa"),
    "edd-trees": Run(6, f"python bench.py {ALL} --drafter edd --tree chain cape eagle2 pct "
                     'pct-cost "pct(leaf=0)" token-confidence "token-confidence(own=0.5)"'),
    "glide-trees": Run(3, f"python bench.py {ALL} --drafter glide --tree chain cape beam "
                       '"beam(width=8)" "fixed(size=2)" "fixed(size=3)"'),
    "together": Run(8, f"python bench.py {ALL} --tree chain pct-cost graft --drafter glide "
                    'maxgram "mixture(glide, maxgram)" "mixture(edd, maxgram)" '
                    + quoted(BASE_GRAM, THREE)),
    "cascade": Run(8, f"python bench.py {ALL} --tree chain --drafter glide maxgram "
                   '"maxgram(matching=False)" ' + quoted(*TUNED, LENIENT)),
    "sampled": Run(3, f"python bench.py {FEWER} --temperature 1 --tree drawn --drafter vanilla "
                   'glide-top glide "cascade(base, k=5)" "cascade(small, k=5)"'),
    "sampled-graft": Run(5, f"python bench.py {ALL} --temperature 1 --tree drawn pct-cost "
                         'graft --drafter glide "mixture(glide, maxgram)"'),
    "medusa": Run(2, f"python bench.py {ROWS} --drafter glide medusa --tree chain cape "
                  f'"{MEDUSA_TREE}"'),
    "batches": Run(3, f"python figures/batches.py {FEWER}"),
    "vct": Run(1, f"python bench.py {FEWER} --drafter edd --tree cape pct vct"),
    # Tree against chain at two larger sizes (docs/speed.md)
    "grown-cpu": Run(4, "python bench.py --target work/grown-cpu/target "
                     f"--checkpoint work/grown-cpu {FEWER} --drafter glide edd "
                     "--tree chain cape beam pct"),
    "smollm2/trees": Run(5, "python bench.py --target smollm2 --checkpoint checkpoints/smollm2 "
                         f"{FEWER} --tree chain cape beam pct --drafter glide-shared edd-shared"),
    "smollm2/main": Run(3, "python bench.py --target smollm2 --checkpoint checkpoints/smollm2 "
                        "--drafter glide-shared --tree cape pct-cost"),
    # Counts
    "ewif": Run(0, "python figures/probe.py ewif", counted=True),
    "raw": Run(4, f'python bench.py {ROWS} --drafter edd "edd(temperature=1)" vdm glide '
               f'"glide(temperature=1)" --tree cape eagle2 "{PCT}"', counted=True),
    "width": Run(2, f"python bench.py {ROWS} --drafter edd --tree "
                 + quoted(*map(WIDE.format, (1, 2, 3, 5, 7))), counted=True),
    "second-seed": Run(4, f"python bench.py {ROWS} --checkpoint work/drafters-two --tree chain "
                       "--drafter glide glide-top vanilla edd edd-top vdm", counted=True),
    "paper-recipe": Run(2, f"python bench.py {ROWS} --checkpoint work/drafters-ce --tree chain "
                        "--drafter glide-top vanilla", counted=True),
    "calibration": Run(2, 'python figures/probe.py calibration --limit 18 --drafter edd '
                       '"edd(temperature=1)" glide "glide(temperature=1)"', counted=True),
    "positions": Run(4, "python figures/probe.py positions --limit 18 --drafter "
                     '"cascade(base, k=30)" "cascade(small, k=30)" glide maxgram', counted=True),
    "lookup": Run(2, "python figures/probe.py lookup", counted=True),
    "grown": Run(9, None, old="measured on an H200 by the program that figures/grown.py grew out "
                 "of; docs/cuda.md has today's commands"),
}
# ---------------------------------------------------------------- older rows
LOST = "its drafters are not shipped, and its text was not kept"
ELSEWHERE = "measured with an earlier commit"
for name in ("glide-figure-7", "glide-figure-8", "glide-figure-9", "edd-figure-5", "edd-training"):
    RUNS[f"old/{name}"] = Run(None, None, old=LOST)
for name in ("k", "papers", "acceptance"):
    RUNS[f"t5/{name}"] = Run(None, None, old=ELSEWHERE)
for name in ("papers", "positions", "sampled", "sampled-amd", "cuda", "cuda-graphs", "equal"):
    RUNS[f"smollm2/{name}"] = Run(None, None, old=ELSEWHERE)

# ---------------------------------------------------------------- GLIDE with a CAPE
GRAFT = "mixture(glide, maxgram) x graft"
H800 = "Vicuna-7B, 13B and 33B, one H800"

TABLES = {
    "glide-table-1": Table(
        "sampled", "GLIDE", "Vicuna-7B, GSM8K, one H800",
        ("alpha_overlap", "c", "expected_speedup", "tau", "speedup"),
        [("cascade(small, k=5) x drawn", "LLAMA-68m",
          {"alpha_overlap": "0.516", "c": "0.077", "expected_speedup": "1.46"}),
         ("cascade(base, k=5) x drawn", "LLAMA-160m",
          {"alpha_overlap": "0.580", "c": "0.490", "expected_speedup": "0.66"}),
         ("vanilla x drawn", "Vanilla Drafter", {}),
         ("glide-top x drawn", "", {}),
         ("glide x drawn", "GLIDE-47m",
          {"alpha_overlap": "0.648", "c": "0.067", "expected_speedup": "1.97"})],
        [("GLIDE accepts more than the small models", "alpha_overlap", "glide x drawn",
          "cascade(*"),
         ("GLIDE's E(Spd.) is higher than theirs", "expected_speedup", "glide x drawn",
          "cascade(*"),
         ("Figure 4: the glimpse raises acceptance", "alpha_overlap", "glide x drawn",
          "vanilla x drawn"),
         ("Figure 4: so it does in the paper's layer", "alpha_overlap", "glide-top x drawn",
          "vanilla x drawn")]),
    "glide-figure-4": Table(
        "chains", "GLIDE", "improvement of α by .054 to .235, by speculative sampling",
        ("alpha", "tau", "c", "speedup"),
        [("vanilla x chain", "Vanilla Drafter", {}), ("glide-top x chain", "", {}),
         ("glide x chain", "GLIDE", {})],
        [("The glimpse raises acceptance", "alpha", "glide x chain", "vanilla x chain"),
         ("So it does in the paper's layer, without a norm", "alpha", "glide-top x chain",
          "vanilla x chain")]),
    "second-seed-glide": Table(
        "second-seed", "GLIDE", "", ("alpha", "tau"),
        [("glide x chain", "GLIDE", {}), ("glide-top x chain", "", {}),
         ("vanilla x chain", "Vanilla Drafter", {})],
        [("The glimpse raises acceptance", "alpha", "glide x chain", "vanilla x chain"),
         ("So it does in the paper's layer", "alpha", "glide-top x chain", "vanilla x chain")]),
    "second-seed-edd": Table(
        "second-seed", "EDD", "", ("alpha", "tau"),
        [("edd x chain", "EDD", {}), ("edd-top x chain", "", {}), ("vdm x chain", "VDM", {})],
        [("EDD's τ is above VDM's", "tau", "edd x chain", "vdm x chain"),
         ("So it is in the paper's layer", "tau", "edd-top x chain", "vdm x chain")]),
    "paper-recipe": Table(
        "paper-recipe", "GLIDE", "", ("alpha", "tau"), None,
        [("The glimpse raises acceptance in the paper's layer, by its loss and optimiser", "alpha",
          "glide-top x chain", "vanilla x chain")]),
    "glide-figure-5": Table(
        "cascade", "GLIDE", "Vicuna-7B, one H800; Figure 5 is on MT-Bench, the figures are "
        "Table 4's first row, whose prompts it does not name",
        ("tokens_per_second", "speedup"),
        [("plain", "Vicuna-7B", {"tokens_per_second": "54.6"}), ("generate()", "", {}),
         ("assisted generation (base)", "", {}), (f"{SMALL} x chain", "LLAMA-68m", {}),
         (f"{BASE} x chain", "LLAMA-160m", {}),
         ("glide x chain", "GLIDE", {"tokens_per_second": "106.8"})],
        [("GLIDE is faster than plain decoding", "speedup", "glide x chain", "plain"),
         ("GLIDE is faster than drafting by a small model", "speedup", "glide x chain",
          ("cascade(base, k*", "cascade(small, k*", "assisted*"))]),
    "glide-figure-6": Table(
        "glide-trees", "GLIDE", "one H800, MT-Bench; speedups are ranges over Vicuna-7B, 13B and "
        "33B (abstract, introduction), ms Vicuna-7B's (Table 3)",
        ("speedup", "tau", "nodes", "draft_ms", "verify_ms"),
        [("glide x chain", "GLIDE", {"speedup": "up to 2.17", "draft_ms": "5.3"}),
         ("glide x cape", "GLIDE + CAPE", {"speedup": "2.50 to 2.61", "draft_ms": "5.5"}),
         ("glide x beam", "Beam 4", {"draft_ms": "10.9"}),
         ("glide x beam(width=8)", "Beam 8", {"draft_ms": "14.8"}),
         ("glide x fixed(size=2)", "", {}), ("glide x fixed(size=3)", "", {})],
        [("CAPE is faster than GLIDE alone", "speedup", "glide x cape", "glide x chain"),
         ("CAPE is faster than beam search", "speedup", "glide x cape", "glide x beam*"),
         ("GLIDE alone is faster than with beam search", "speedup", "glide x chain",
          "glide x beam"),
         ("§5.4: CAPE is faster than a fixed size", "speedup", "glide x cape", "glide x fixed*"),
         ("Table 3: beam search drafts longer than CAPE", "draft_ms", "glide x beam",
          "glide x cape")]),
    "glide-medusa": Table(
        "medusa", "GLIDE", f"{H800}, MT-Bench; MEDUSA with 64 tokens to verify (here the root too)",
        ("speedup", "tau", "nodes"),
        [("glide x chain", "GLIDE", {}), ("glide x cape", "GLIDE + CAPE", {}),
         ("medusa x chain", "", {}), ("medusa x cape", "", {}),
         (f"medusa x {MEDUSA_TREE}", "MEDUSA", {})],
        [("CAPE is faster than MEDUSA", "speedup", "glide x cape", "medusa x *"),
         ("GLIDE alone is faster than MEDUSA", "speedup", "glide x chain", "medusa x *")]),
    "glide-table-4": Table(
        "batches", "GLIDE", "Vicuna-7B, one H800, fp16; out of memory at 32; its speedups are our "
        "quotients",
        ("glide", "plain", "speedup"),
        [("glide x chain", "1", {"glide": "106.8", "plain": "54.6", "speedup": "1.96"}),
         ("glide x chain, 2 copies", "2", {"glide": "108.2", "plain": "55.6", "speedup": "1.95"}),
         ("glide x chain, 4 copies", "4", {"glide": "116.5", "plain": "55.9", "speedup": "2.08"}),
         ("glide x chain, 8 copies", "8", {"glide": "108.5", "plain": "55.1", "speedup": "1.97"}),
         ("glide x chain, 16 copies", "16",
          {"glide": "106.2", "plain": "55.4", "speedup": "1.92"})],
        [("16 copies have the speedup of one", "=speedup", "glide x chain, 16 copies",
          "glide x chain")]),
    "glide-figure-7": Table("old/glide-figure-7", "GLIDE", "", ("alpha", "tau")),
    "glide-figure-8": Table("old/glide-figure-8", "GLIDE", "", ("alpha", "c", "expected_speedup"),
                            [("glide-l13 x chain", "1 layer", {}),
                             ("glide-n2 x chain", "2 layers", {})]),
    "glide-figure-9": Table("old/glide-figure-9", "GLIDE", "", ("alpha", "c", "expected_speedup"),
                            [("glide-w64 x chain", "", {}), ("glide-l13 x chain", "", {}),
                             ("glide-w256 x chain", "", {})]),

    # ------------------------------------------------------------ EDD and PCT
    "edd-table-1": Table(
        "chains", "EDD", "LLaMA2-Chat 7B, MT-Bench, RTX A6000",
        ("speedup", "alpha_depth", "tau", "alpha", "c"),
        [("vdm x chain", "VDM", {"speedup": "1.49", "alpha_depth": "0.39", "tau": "1.96"}),
         ("medusa x chain", "MEDUSA-1", {"speedup": "1.48", "alpha_depth": "0.34", "tau": "1.71"}),
         ("eagle x chain", "EAGLE", {"speedup": "1.82", "alpha_depth": "0.50", "tau": "2.50"}),
         ("edd-top x chain", "", {}),
         ("edd x chain", "EDD", {"speedup": "1.97", "alpha_depth": "0.55", "tau": "2.73"})],
        [("EDD's τ is above VDM's", "tau", "edd x chain", "vdm x chain"),
         ("So it is in the paper's layer", "tau", "edd-top x chain", "vdm x chain"),
         ("EDD's τ is above EAGLE's", "tau", "edd x chain", "eagle x chain"),
         ("So it is in the paper's layer", "tau", "edd-top x chain", "eagle x chain"),
         ("EAGLE's τ is above VDM's", "tau", "eagle x chain", "vdm x chain"),
         ("EDD is faster than VDM, MEDUSA-1 and EAGLE", "speedup", "edd x chain",
          ("vdm x *", "medusa x *", "eagle x *")),
         ("So it is in the paper's layer", "speedup", "edd-top x chain",
          ("vdm x *", "medusa x *", "eagle x *")),
         ("MEDUSA-1 is as fast as VDM", "=speedup", "medusa x chain", "vdm x chain")]),
    "edd-table-2": Table(
        "edd-trees", "EDD", "LLaMA2-Chat 7B, MT-Bench, RTX A6000",
        ("speedup", "alpha_depth", "tau", "nodes", "draft_ms", "verify_ms"),
        [("edd x chain", "EDD", {"speedup": "1.97", "alpha_depth": "0.55", "tau": "2.73"}),
         ("edd x cape", "CAPE", {"speedup": "2.56", "alpha_depth": "0.67", "tau": "3.35"}),
         ("edd x eagle2", "EAGLE-2", {"speedup": "2.87", "alpha_depth": "0.67", "tau": "3.99"}),
         ("edd x pct", "PCT", {"speedup": "3.04", "alpha_depth": "0.74", "tau": "3.99"}),
         ("edd x pct-cost", "", {})],
        [("PCT is faster than a chain", "speedup", "edd x pct", "edd x chain"),
         ("PCT is faster than EAGLE-2", "speedup", "edd x pct", "edd x eagle2"),
         ("EAGLE-2 is faster than CAPE", "speedup", "edd x eagle2", "edd x cape"),
         ("PCT's τ is EAGLE-2's", "=tau", "edd x pct", "edd x eagle2"),
         ("PCT's τ/depth is above EAGLE-2's", "alpha_depth", "edd x pct", "edd x eagle2"),
         ("EAGLE-2 verifies more nodes than PCT", "nodes", "edd x eagle2", "edd x pct")]),
    "edd-table-2-vct": Table(
        "vct", "EDD", "LLaMA2-Chat 7B, MT-Bench, RTX A6000",
        ("speedup", "alpha_depth", "tau", "nodes"),
        [("edd x cape", "CAPE", {"speedup": "2.56", "alpha_depth": "0.67", "tau": "3.35"}),
         ("edd x pct", "PCT", {"speedup": "3.04", "alpha_depth": "0.74", "tau": "3.99"}),
         ("edd x vct", "VCT", {"speedup": "2.49", "alpha_depth": "0.71", "tau": "3.56"})],
        [("CAPE is faster than the vanilla tree", "speedup", "edd x cape", "edd x vct"),
         ("The vanilla tree is faster than plain decoding", "speedup", "edd x vct", "plain")]),
    "edd-table-3": Table(
        "edd-trees", "EDD", "LLaMA2-Chat 7B, MT-Bench, RTX A6000",
        ("speedup", "alpha_depth", "tau", "nodes"),
        [("edd x pct", "EDD + PCT", {"speedup": "3.04", "alpha_depth": "0.74", "tau": "3.99"}),
         ("edd x pct(leaf=0)", "w/o remove leaf nodes",
          {"speedup": "2.95", "alpha_depth": "0.74", "tau": "3.99"}),
         ("edd x token-confidence", "w/o expected time gain",
          {"speedup": "2.73", "alpha_depth": "0.58", "tau": "3.45"}),
         ("edd x token-confidence(own=0.5)", "", {})],
        [("Removing leaves is faster", "speedup", "edd x pct", "edd x pct(leaf=0)"),
         ("The expected time gain is faster than a token's own confidence", "speedup",
          "edd x pct", "edd x token-confidence*")]),
    "edd-raw": Table(
        "raw", "EDD", "LLaMA2-Chat 7B, MT-Bench: raw confidences", ("alpha_depth", "tau", "nodes"),
        [("edd(temperature=1) x cape", "CAPE", {"alpha_depth": "0.67", "tau": "3.35"}),
         ("edd x cape", "", {}),
         ("edd(temperature=1) x eagle2", "EAGLE-2", {"alpha_depth": "0.67", "tau": "3.99"}),
         ("edd x eagle2", "", {}),
         (f"edd(temperature=1) x {PCT}", "PCT", {"alpha_depth": "0.74", "tau": "3.99"}),
         (f"edd x {PCT}", "", {}),
         (f"vdm x {PCT}", "w/o encoding result", {"alpha_depth": "0.55", "tau": "3.04"}),
         ("glide(temperature=1) x cape", "", {}), ("glide x cape", "", {})],
        [("Table 3: without the encoding result τ falls", "tau", f"edd x {PCT}",
          f"vdm x {PCT}")]),
    "edd-training": Table("old/edd-training", "EDD", "LLaMA2-Chat 7B, MT-Bench, with PCT",
                          ("alpha", "tau"),
                          [("edd x chain", "EDD + PCT", {"tau": "3.99"}),
                           ("edd-ce x chain", "w/o KL divergence", {"tau": "3.60"}),
                           ("edd-fixed x chain", "w/o random division length", {"tau": "3.72"}),
                           ("vdm x chain", "w/o encoding result", {"tau": "3.04"})]),
    "edd-figure-3": Table(
        "calibration", "EDD", "LLaMA2-Chat 13B, MT-Bench",
        ("ece", "bin 10", "bin 30", "bin 50", "bin 70", "bin 90"),
        [("edd(temperature=1)", "EDD", {"ece": "0.019"}), ("edd", "", {}),
         ("glide(temperature=1)", "", {}), ("glide", "", {})]),
    "edd-figure-5": Table("old/edd-figure-5", "EDD", "", ("alpha", "tau")),
    "edd-figure-6": Table(
        "width", "EDD", "", ("tau", "nodes"), None,
        [(f"τ grows from width {a} to {b}", "tau", f"edd x {WIDE.format(b)}",
          f"edd x {WIDE.format(a)}") for a, b in ((1, 3), (3, 5))]
        + [("From 5 to 7 it stays", "=tau", f"edd x {WIDE.format(7)}",
            f"edd x {WIDE.format(5)}")]),
    "edd-figure-7": Table(
        "edd-trees", "EDD", "", ("tau on story", "nodes on story", "tau on retell",
                                 "nodes on retell", "tau on math", "nodes on math"),
        [("edd x chain", "EDD", {}), ("edd x pct", "EDD + PCT", {})]),

    # ------------------------------------------------------------ Cascade Speculative Drafting
    "cascade-table-1": Table(
        "ewif", "Cascade", "FLAN-T5", ("k1", "k2", "ewif"),
        [("CNN/DM (small)", "SMALL", {"ewif": "2.65"}), ("CNN/DM (base)", "BASE", {"ewif": "2.96"}),
         ("CNN/DM (base, small)", "BASE, SMALL", {"ewif": "3.03"}),
         ("EnDe (small)", "SMALL", {"ewif": "3.61"}), ("EnDe (base)", "BASE", {"ewif": "3.75"}),
         ("EnDe (base, small)", "BASE, SMALL", {"ewif": "3.93"})]),
    "cascade-k": Table("cascade-k", "Cascade", "", ("tokens_per_second", "swi_pw")),
    "cascade-table-3": Table(
        "cascade", "Cascade", "LLaMA-2-chat-7B, GSM8K (Table 3; it prints one speedup without "
        "saying by which costs: by weights is our reading)",
        ("swi_ms", "swi_pw", "swi_clock", "speedup", "tau"),
        [("plain", "Auto.", {"swi_ms": "1"}), ("prompt lookup", "", {}),
         ("maxgram x chain", "", {}),
         (f"{BASE} x chain", "S Decoding, 160M", {"swi_ms": "2.48"}),
         (f"{BASE_GRAM} x chain", "CS Drafting, 160M, MaG", {"swi_ms": "2.86"}),
         (f"{SMALL} x chain", "", {}), (f"{SMALL_GRAM} x chain", "", {}),
         (f"{THREE} x chain", "", {})],
        [("Max-Gram below a model improves it", "swi_pw", f"{BASE_GRAM} x chain",
          f"{BASE} x chain"),
         ("The same by weights", "swi_ms", f"{BASE_GRAM} x chain",
          f"{BASE} x chain"),
         ("The same by the clock", "speedup", f"{BASE_GRAM} x chain", f"{BASE} x chain"),
         ("Table 2: three stages are better than two", "swi_pw", f"{THREE} x chain",
          (f"{BASE_GRAM} x chain", f"{SMALL_GRAM} x chain")),
         ("The same by weights", "swi_ms", f"{THREE} x chain",
          (f"{BASE_GRAM} x chain", f"{SMALL_GRAM} x chain")),
         ("§5.3: with Max-Gram the larger model is the better one", "swi_pw",
          f"{BASE_GRAM} x chain", f"{SMALL_GRAM} x chain")]),
    "cascade-parts": Table(
        "cascade", "Cascade", "", ("swi_pw", "swi_ms", "speedup", "tau", "nodes"),
        [(f"{BASE} x chain", "", {}), (f"{VERTICAL} x chain", "", {}),
         (f"{HORIZONTAL} x chain", "", {}), (f"{THREE} x chain", "", {}),
         (f"{LENIENT} x chain", "", {}), ("maxgram x chain", "", {}),
         ("maxgram(matching=False) x chain", "", {})],
        [("§3.1, but with a neural last stage: a vertical cascade improves on its larger model",
          "swi_pw", f"{VERTICAL} x chain", f"{BASE} x chain"),
         ("The same by weights", "swi_ms", f"{VERTICAL} x chain", f"{BASE} x chain"),
         ("§3.2, but with a neural last stage: a horizontal cascade improves on its larger model",
          "swi_pw", f"{HORIZONTAL} x chain", f"{BASE} x chain"),
         ("The same by weights", "swi_ms", f"{HORIZONTAL} x chain", f"{BASE} x chain"),
         ("§3.1: lenience 3 helps", "swi_pw", f"{LENIENT} x chain", f"{THREE} x chain"),
         ("§3.3: matching is better than the bigram alone", "speedup", "maxgram x chain",
          "maxgram(matching=False) x chain")]),
    "cascade-figure-2": Table(
        "positions", "Cascade", "", [f"position {i}" for i in (1, 2, 3, 5, 10, 20)]),

    # ------------------------------------------------------------ all three papers, and beyond
    "main": Table("main", "GLIDE", f"{H800}, MT-Bench",
                  ("tokens_per_second", "speedup", "tau", "nodes"),
                  [("plain", "", {}), ("generate()", "", {}),
                   ("glide x cape", "GLIDE + CAPE", {"speedup": "2.50 to 2.61"})]),
    "together": Table(
        "together", "ours", "", ("tokens_per_second", "speedup", "tau", "nodes", "speedup on story",
                                 "speedup on retell", "speedup on math"),
        [("plain", "", {}), ("generate()", "", {}), ("prompt lookup", "", {}),
         ("assisted generation (base)", "", {}), ("glide x chain", "", {}),
         ("glide x pct-cost", "", {}), ("maxgram x chain", "", {}),
         ("maxgram x pct-cost", "", {}), ("maxgram x graft", "", {}),
         (f"{BASE_GRAM} x chain", "", {}),
         (f"{THREE} x chain", "", {}), ("mixture(glide, maxgram) x pct-cost", "", {}),
         ("mixture(edd, maxgram) x pct-cost", "", {}),
         ("mixture(edd, maxgram) x graft", "", {}), (GRAFT, "", {})],
        [("Graft is faster than the best other arm", "speedup", GRAFT, "*"),
         ("So it is on stories", "speedup on story", GRAFT, "*"),
         ("So it is on retellings", "speedup on retell", GRAFT, "*"),
         ("So it is on word problems", "speedup on math", GRAFT, "*")]),
    "sampled-graft": Table(
        "sampled-graft", "ours", "", ("tokens_per_second", "speedup", "tau", "nodes"), None,
        [("At temperature 1 graft is faster than the best other arm", "speedup", GRAFT, "*")]),
    "grown": Table(
        "grown", "ours", "GLIDE: speedups over Vicuna-7B, 13B and 33B, c and ms Vicuna-7B's, H800; "
        "EDD: LLaMA2-Chat 7B, A6000; MT-Bench",
        ("speedup", "tau", "c", "nodes", "draft_ms", "verify_ms"),
        [("glide x chain", "GLIDE", {"speedup": "up to 2.17", "c": "0.067", "draft_ms": "5.3"}),
         ("glide x cape", "GLIDE + CAPE", {"speedup": "2.50 to 2.61", "draft_ms": "5.5"}),
         ("vdm x chain", "VDM", {"speedup": "1.49", "tau": "1.96"}),
         ("edd x chain", "EDD", {"speedup": "1.97", "tau": "2.73", "c": "0.037"}),
         ("edd x cape", "EDD, CAPE", {"speedup": "2.56", "tau": "3.35"}),
         ("edd x eagle2", "EDD, EAGLE-2", {"speedup": "2.87", "tau": "3.99"}),
         ("edd x pct", "EDD, PCT", {"speedup": "3.04", "tau": "3.99"}),
         ("vanilla x chain", "", {}), ("vanilla x cape", "", {}), ("glide x beam", "", {}),
         ("glide x pct-cost", "", {}), ("edd x pct-cost", "", {}), ("vdm x pct", "", {})]),
}

# ---------------------------------------------------------------- what a forward costs
TABLES |= {
    "costs": Table("costs", "ours", "", ("ms", "ratio"),
                   [(f"{n} tokens", "", {}) for n in (1, 2, 4, 8, 16, 32, 64)]),
    "costs-chains": Table("costs", "ours", "", ("steps", "least_alpha"),
                          [(f"a chain of {n}", "", {}) for n in (1, 3, 5)]),
    "lookup": Table("lookup", "ours", "", ("mass", "head", "before")),
}

# ---------------------------------------------------------------- T5
XXL = "FLAN-T5-XXL, GSM8K"
T5_THREE = "cascade(base, small, maxgram, k=(1, 1, 1))"

def lenient(k):
    """The three stages with lenience 1, 3 and 5."""
    three = f"cascade(base, small, maxgram, k={k}"
    return [f"{three}{more}) x chain" for more in ("", ", lenience=3", ", lenience=5")]

TABLES |= {
    "t5-k": Table("t5/k", "Cascade", "", ("tokens_per_second",)),
    "t5-table-2": Table(
        "t5/papers", "Cascade", XXL, ("swi_ms", "swi_pw", "speedup", "tau", "c"),
        [("plain", "", {"swi_ms": "1", "swi_pw": "1"}), ("prompt lookup", "", {}),
         ("maxgram x chain", "", {}),
         ("cascade(base, k=4) x chain", "S Decoding, BASE", {"swi_ms": "3.38", "swi_pw": "2.99"}),
         ("cascade(small, k=4) x chain", "S Decoding, SMALL", {"swi_ms": "3.06", "swi_pw": "2.76"}),
         ("cascade(base, maxgram, k=1) x chain", "BASE, MAG", {"swi_ms": "3.70", "swi_pw": "3.27"}),
         ("cascade(small, maxgram, k=3) x chain", "SMALL, MAG",
          {"swi_ms": "3.19", "swi_pw": "2.82"}),
         (f"{T5_THREE} x chain", "BASE, SMALL, MAG", {"swi_ms": "3.88", "swi_pw": "3.43"})],
        [("A cascade is better than one small model", "swi_ms", f"{T5_THREE} x chain",
          ("cascade(base, k=4) x chain", "cascade(small, k=4) x chain")),
         ("The same by the clock", "speedup", f"{T5_THREE} x chain",
          ("cascade(base, k=4) x chain", "cascade(small, k=4) x chain")),
         ("… on GSM8K", "speedup on gsm8k_test", f"{T5_THREE} x chain",
          ("cascade(base, k=4) x chain", "cascade(small, k=4) x chain")),
         ("Max-Gram below a model improves it", "swi_ms", "cascade(base, maxgram, k=1) x chain",
          "cascade(base, k=4) x chain"),
         ("Three stages are better than two", "swi_ms", f"{T5_THREE} x chain",
          ("cascade(base, maxgram, k=1) x chain", "cascade(small, maxgram, k=3) x chain")),
         ("With Max-Gram the larger model is the better one", "swi_ms",
          "cascade(base, maxgram, k=1) x chain", "cascade(small, maxgram, k=3) x chain"),
         ("A cascade is faster than Max-Gram alone", "speedup", f"{T5_THREE} x chain",
          "maxgram x chain")]),
    "t5-kinds": Table(
        "t5/papers", "Cascade", "", [f"speedup on {kind}" for kind in
                                     ("story", "retell", "math", "gsm8k_test")],
        [("maxgram x chain", "", {}), ("cascade(base, k=4) x chain", "", {}),
         ("cascade(small, k=4) x chain", "", {}), ("cascade(base, maxgram, k=1) x chain", "", {}),
         ("cascade(small, maxgram, k=3) x chain", "", {}), (f"{T5_THREE} x chain", "", {})]),
    "t5-lenience": Table(
        "t5/papers", "Cascade", XXL, ("swi_ms", "swi_pw", "speedup", "tau"),
        [(arm, "BASE, SMALL, MAG" if "(8, 13, 1), lenience=3" in arm else "",
          {"swi_ms": "3.88"} if "(8, 13, 1), lenience=3" in arm else {})
         for arm in lenient((1, 1, 1)) + lenient((8, 13, 1))],
        [("Lenience 3 helps with the fastest k", "swi_ms", lenient((1, 1, 1))[1],
          lenient((1, 1, 1))[0]),
         ("Lenience 3 helps with the paper's k", "swi_ms", lenient((8, 13, 1))[1],
          lenient((8, 13, 1))[0])]),
    "t5-maxgram": Table(
        "t5/papers", "Cascade", "", ("swi_ms", "speedup", "tau"),
        [("cascade(base, maxgram, k=1) x chain", "", {}),
         ("cascade(base, maxgram, k=1, matching=False) x chain", "", {}),
         ("maxgram x chain", "", {}), ("maxgram(matching=False) x chain", "", {})],
        [("Matching below a model is better than the bigram alone", "swi_ms",
          "cascade(base, maxgram, k=1) x chain",
          "cascade(base, maxgram, k=1, matching=False) x chain"),
         ("Matching is better than the bigram alone", "speedup", "maxgram x chain",
          "maxgram(matching=False) x chain")]),
    "t5-figure-2": Table(
        "t5/acceptance", "Cascade", "", [f"position {i}" for i in (1, 2, 3, 5, 10, 20)]),

    # ------------------------------------------------------------ SmolLM2
    "smollm2-main": Table("smollm2/main", "ours", "",
                          ("tokens_per_second", "speedup", "tau", "nodes", "draft_ms",
                           "verify_ms", "other_ms")),
    "smollm2": Table(
        "smollm2/papers", "ours", "",
        ("tokens_per_second", "speedup", "tau", "nodes", "speedup on mt_bench",
         "speedup on gsm8k_test", "speedup on HumanEval", "speedup on news"),
        [(arm, "", {}) for arm in
         ("plain", "generate()", "prompt lookup", "glide-shared x chain", "glide-shared x cape",
          "glide-shared x pct-cost", "edd-shared x chain", "edd-shared x pct",
          "edd-shared x pct-cost", "maxgram x chain", "maxgram x pct-cost",
          "mixture(glide-shared, maxgram) x graft", "mixture(edd-shared, maxgram) x graft")],
        [("GLIDE is faster than plain decoding", "speedup", "glide-shared x chain", "plain"),
         ("CAPE is faster than GLIDE alone", "speedup", "glide-shared x cape",
          "glide-shared x chain"),
         ("PCT is faster than a chain", "speedup", "edd-shared x pct", "edd-shared x chain"),
         ("Priced PCT is faster than PCT", "speedup", "edd-shared x pct-cost", "edd-shared x pct"),
         ("Priced PCT is faster than a chain", "speedup", "glide-shared x pct-cost",
          "glide-shared x chain"),
         ("Graft is faster than the best other arm", "speedup",
          "mixture(glide-shared, maxgram) x graft", "*")]),
    "smollm2-figure-7": Table(
        "smollm2/papers", "EDD", "", [f"tau on mt_bench/{kind}" for kind in
                                      ("writing", "roleplay", "reasoning", "math", "coding",
                                       "extraction", "stem", "humanities")],
        [("glide-shared x cape", "", {}), ("edd-shared x chain", "EDD", {}),
         ("edd-shared x pct", "EDD + PCT", {})]),
    "smollm2-positions": Table(
        "smollm2/positions", "Cascade", "", [f"position {i}" for i in (1, 2, 3, 5, 10, 20)]),
    "smollm2-equal": Table(
        "smollm2/equal", "ours", "", ("alpha", "tau", "c", "speedup"),
        [("vanilla-shared-f768 x chain", "", {}), ("glide-shared-f768 x chain", "", {}),
         ("vdm-shared x chain", "", {}), ("edd-shared x chain", "", {})],
        [("The glimpse raises acceptance", "alpha", "glide-shared-f768 x chain",
          "vanilla-shared-f768 x chain"),
         ("EDD's τ is above VDM's", "tau", "edd-shared x chain", "vdm-shared x chain")]),
    "smollm2-cuda": Table(
        "smollm2/cuda", "ours", "", ("tokens_per_second", "speedup", "tau", "nodes", "c"),
        None, [("CAPE is faster than GLIDE alone", "speedup", "glide-shared x cape",
                "glide-shared x chain")]),
    "smollm2-cuda-graphs": Table(
        "smollm2/cuda-graphs", "ours", "",
        ("tokens_per_second", "speedup", "tau", "nodes", "c")),
}
SAMPLED = ("tokens_per_second", "speedup", "tau", "alpha_overlap", "nodes")
BEST_SAMPLED = [("Graft is faster than the best other arm", "speedup",
                 "mixture(glide-shared, maxgram) x graft", "*"),
                ("GLIDE's sampled chain is faster than plain decoding", "speedup",
                 "glide-shared x drawn", "plain")]
TABLES["smollm2-sampled"] = Table("smollm2/sampled", "ours", "", SAMPLED, None,
                                  BEST_SAMPLED)
TABLES["smollm2-sampled-amd"] = Table("smollm2/sampled-amd", "ours", "",
                                      SAMPLED, None, BEST_SAMPLED)
