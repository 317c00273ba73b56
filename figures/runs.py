"""What is measured: the runs.  The rows of a run are docs/results/RUN.jsonl.

Methods that bear a paper's name in the pages are that paper's design: GLIDE is glide-top, which
attends to the target's top layer without a norm; EDD is edd-top, which reads hidden_states[-4].
"""
from collections import namedtuple

# minutes: on two quiet cores.
# flags:   of bench.py; without methods, of figures/probe.py.
# methods: [(drafters, trees)], each of the drafters with each of the trees.
# others:  transformers' own: "generate()", "prompt lookup", "assisted generation (NAME)".
# batches: how many prompts are decoded at once, one size after the other.
# copies:  whether the prompts of a batch are copies of one.
Run = namedtuple("Run", "minutes flags methods others batches copies",
                 defaults=((), (), (1,), False))

# The fastest k of each cascade on the prompts of figures/tuning.jsonl (run cascade-k)
BASE, SMALL = "cascade(base, k=4)", "cascade(small, k=4)"
BASE_GRAM, SMALL_GRAM = "cascade(base, maxgram, k=5)", "cascade(small, maxgram, k=2)"
THREE = "cascade(base, small, maxgram, k=(1, 1, 1))"
LENIENT = "cascade(base, small, maxgram, k=(1, 1, 1), lenience=3)"
VERTICAL, HORIZONTAL = "cascade(base, small, k=(4, 4, 1))", "cascade(base, small, k=(3, 6, 0))"
GLIDE_MIX, EDD_MIX = "mixture(glide, maxgram)", "mixture(edd, maxgram)"
MEDUSA_TREE = "eagle2(total=63, depth=5)"
PCT, WIDE = "pct(cost=0.037)", "pct(width={}, cost=0.037)"      # the paper's s_d / s_t, 1.1 / 29.8

ALL, HALF, THIRD = (f"--limit {limit} --max-new-tokens 64" for limit in (36, 18, 12))
SMOLLM2 = "--target smollm2 --checkpoint checkpoints/smollm2"
EQUAL = ["glide-top", "glide-top-norm", "glide-18", "vanilla", "edd-top", "edd-4", "vdm"]
# The prompts, a file of your own: eight questions each of MT-Bench (one of each category), GSM8K,
# HumanEval and news
EQUAL_FLAGS = ("--target smollm2 --checkpoint work/equal-layers --max-new-tokens 48 --limit 30 "
               "--prompts work/equal-prompts.jsonl")
GROWN = ("--target work/7b/target --checkpoint work/7b --dtype float16 --device cuda "
         "--max-new-tokens 64")
SEVEN_B = [(["glide-top", "glide"], ["chain", "cape"]), (["glide"], ["pct-cost"]),
           (["edd-top", "edd"], ["chain"]), (["edd"], ["pct", "eagle2"]), ([GLIDE_MIX], ["graft"]),
           (["vanilla", "vdm"], ["chain"])]

RUNS = {
    "main": Run(1, "--limit 9", [(["glide"], ["cape"]), (["mixture(glide, maxgram)"], ["graft"])],
                ["generate()"]),
    "chains": Run(4, ALL, [(["glide", "glide-top", "vanilla", "edd", "edd-top", "vdm", "eagle",
                             "medusa"], ["chain"])]),
    "glide-trees": Run(4, ALL, [
        (["glide-top", "glide"], ["chain", "cape", "beam"]),
        (["glide-top"], ["beam(width=8)", "fixed(size=2)", "fixed(size=3)"])]),
    "edd-trees": Run(5, ALL, [
        (["edd-top", "edd"], ["chain", "cape", "eagle2", "pct"]),
        (["edd-top"], ["pct(leaf=0)", "token-confidence", "token-confidence(token_threshold=0.5)"]),
        (["edd"], ["pct-cost"])]),
    "cascade": Run(6, ALL, [
        ([BASE, SMALL, BASE_GRAM, SMALL_GRAM, THREE, LENIENT, VERTICAL, HORIZONTAL, "maxgram",
          "glide-top", "glide"], ["chain"])],
        ["generate()", "assisted generation (base)", "prompt lookup"]),
    "together": Run(4.5, ALL, [
        (["glide"], ["chain", "pct-cost"]), (["maxgram"], ["chain", "pct-cost"]),
        ([GLIDE_MIX, EDD_MIX], ["pct-cost", "graft"]), ([BASE_GRAM, THREE], ["chain"])],
        ["generate()", "prompt lookup"]),
    "sampled": Run(3, f"{ALL} --temperature 1", [
        (["cascade(small, k=5)", "cascade(base, k=5)", "vanilla", "glide-top", "glide"],
         ["drawn"])]),
    "sampled-graft": Run(2.5, f"{ALL} --temperature 1", [
        (["glide"], ["drawn", "pct-cost"]), ([GLIDE_MIX], ["pct-cost", "graft"])]),
    "medusa": Run(2, HALF, [(["glide-top", "glide"], ["chain", "cape"]),
                              (["medusa"], ["chain", "cape", MEDUSA_TREE])]),
    "vct": Run(1, THIRD, [(["edd-top"], ["cape", "pct", "vct"])]),
    # Several sequences at once (beyond/batch.py): different prompts, and GLIDE's Table 4
    "batch": Run(4, "--limit 16 --max-new-tokens 48", [(["glide"], ["chain", "cape"])],
                 ["generate()"], (1, 2, 4, 8, 16)),
    "copies": Run(4, "--limit 3 --max-new-tokens 48", [(["glide-top", "glide"], ["chain"])], (),
                  (1, 2, 4, 8, 16), True),
    "smollm2/batch": Run(4, f"{SMOLLM2} --limit 16 --max-new-tokens 24",
                         [(["glide-shared"], ["chain"]), (["maxgram"], ["chain"])],
                         ["generate()"], (1, 2, 4, 8, 16)),
    "costs": Run(0.3, "costs"),
    # Each prompt: held-out rows of news.jsonl, 17 000 characters of them
    "smollm2/long": Run(4, f"{SMOLLM2} --prompts work/long.jsonl --max-new-tokens 48", [
        (["glide-shared"], ["chain", "cape"]), (["mixture(glide-shared, maxgram)"], ["graft"])],
        ["generate()"]),
    # The equal training on SmolLM2
    "smollm2/equal-layers": Run(7.5, EQUAL_FLAGS, [(EQUAL, ["chain"])]),
    "smollm2/equal-layers-sampled": Run(7.5, f"{EQUAL_FLAGS} --temperature 1",
                                        [(EQUAL, ["drawn"])]),
    "smollm2/main": Run(3, f"{SMOLLM2} --limit 9", [(["glide-shared"], ["cape", "pct-cost"])],
                        ["generate()"]),
    # docs/speed.md; figures/grown.py --shape 80m makes work/grown-cpu
    "grown-cpu": Run(4, f"{THIRD} --target work/grown-cpu/target --checkpoint work/grown-cpu", [
        (["glide", "edd"], ["chain", "cape", "beam", "pct"])]),
    "smollm2/trees": Run(5, f"{SMOLLM2} {THIRD}", [
        (["glide-shared", "edd-shared"], ["chain", "cape", "beam", "pct"])]),
    # What fifteen minutes of one GPU measure (docs/cuda.md); figures/grown.py makes work/7b
    "gpu/7b": Run(3, f"{GROWN} --graphs --limit 12", SEVEN_B, ["generate()"]),
    "gpu/7b-kernels": Run(2, f"{GROWN} --limit 4", SEVEN_B, ["generate()"]),
    "gpu/smollm2": Run(2, f"{SMOLLM2} --graphs --limit 12 --max-new-tokens 64", [
        (["glide-shared"], ["chain", "cape"]),
        (["mixture(glide-shared, maxgram)"], ["graft"])], ["generate()"]),
    "raw": Run(4, HALF, [
        (["edd(temperature=1)", "edd", "glide(temperature=1)", "glide"], ["cape"]),
        (["edd(temperature=1)", "edd"], ["eagle2", PCT]), (["vdm"], [PCT])]),
    "width": Run(2, HALF, [(["edd"], [WIDE.format(width) for width in (1, 2, 3, 5, 7)])]),
    "calibration": Run(3, 'calibration --limit 18 --drafter edd-top "edd-top(temperature=1)" edd '
                       '"edd(temperature=1)" glide "glide(temperature=1)"'),
}
