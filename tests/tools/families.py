"""The families: a tiny random model of every causal class that transformers registers, drawn from its own registry.

make(name) builds one, row(name) decodes with it, against its own uncached forward.  A cell is
"yes", "refused: why", "WRONG: ..." or "traceback: ..."; `by`: the smallest class that serves it.

    python tests/tools/targets.py            # all of them; writes docs/targets.md
    python tests/tools/targets.py Gemma      # those with this in their name; prints their rows
"""
import dataclasses
import inspect
import re
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import ROOT, plain, random_glide, weighty
from test_verify import HandMade
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as REGISTRY

import cape
import glide
import pct
import verify
from runtime import drafters as runtime_drafters
from runtime.targets import AnyTarget

# What a number in a default configuration becomes by its name: the first that fits.
SIZES = [(int(size), re.compile(field)) for size, field in (line.split() for line in r"""
64 attention_hidden_size|mamba_d_ssm|max_position_embeddings|n_positions|n_ctx|max_seq_len
64 model_max_length|context_length|max_(target|source)_positions
32 hidden_size|n_embd|d_model|emb_dim|(\w+_)?(embed(ding|_proj)?|prompt_mid)_(dim|size)|lru_width
3 ((\w+_)?num_hidden|n|num|(num_)?(en|de)coder)_layers|n_layer|num_blocks
4 time_step_rank|qk_rope_head_dim|query_pre_attn_scalar|rotary_dim|dim_model_base
4 hc_lowrank|patch_size|(n_routed|(moe_)?num(_local)?)_experts|index_topk_blocks|n_head
4 hidden_size_per_layer_input
2 index_local_blocks|(mamba_)?n_?groups|zero_expert_num|o_groups|max_window_layers
2 num_experts_per_tok(en)?|moe_(topk|k)|(num_kv|swa_num_key_value|linear_num_key|kv_n)_heads
4 (\w+_)?(num|n|num_attention|attention|index_n|num_value|coder_attention|n_mamba)_heads
1 (n|num|moe_num)_shared_experts|first_k_dense_replace|num_dense_layers|(n|topk|num_expert)_group
0 num_nextn_predict_layers
48 (dense_)?intermediate_size(_mlp)?|(\w+_)?ffn_dim|dff|d_inner|dim_ff
48 (feed_forward|ffn_hidden)_size|encoder_hash_byte_group_vocab
48 ((unpadded|decoder|pronunciation|shape)_)?vocab_size(_per_layer_input)?
16 \w+_intermediate_size|\w_lora_rank|kv_lora_rank|(mamba_d_|ssm_)?state(_size)?|image_size
16 router_hidden_size|mamba_(d_head|head_dim)|attention_head_dim|expert_ffn_hidden_size
8 (qk_nope|v|swa|index|linear(_\w+)?)_head_dim|dim_head|d_head|kv_channels|attention_head_size
8 index_topk|(index_)?block_size|(mamba_)?chunk_size|adapter_rank
6 sliding_window(_size)?|(attention_)?window_size|local_attention|attention_chunk_size
""".strip().splitlines())]
VOCAB, CONTEXT, WINDOW, LAYERS, HEADS, PROMPT, NEW = 48, 64, 6, 3, 4, 12, 14
# These also where the default is None
ALWAYS = {"head_dim": 8, "num_key_value_heads": 2}
# What is zero, or False
NOTHING = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
           "tie_word_embeddings")

# What the rule does not fit, by class of configuration.
COMPASS = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
CONVOLUTION = ["conv", "full_attention", "conv"]
OWN = {f"{name}Config": own for name, own in dict(
    BltLocalEncoder=dict(hidden_size_global=32), BltLocalDecoder=dict(hidden_size_global=32),
    CohereCompassText=dict(rope_parameters={"full_attention": COMPASS}),
    DbrxAttention=dict(rope_theta=1e4, clip_qkv=8.0),
    DeepseekV2=dict(num_experts_per_tok=2, first_k_dense_replace=1),
    Dots1=dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
               first_k_dense_replace=1),
    Dots3NoteText=dict(
        head_dim=12, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=12,
        swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_qk_nope_head_dim=8, swa_v_head_dim=8),
    GPTNeo=dict(attention_types=[[["local", "global", "local"], 1]]),
    Gemma3nText=dict(num_kv_shared_layers=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]),
    Gemma4Text=dict(global_head_dim=16), Gemma4UnifiedText=dict(global_head_dim=16),
    Lfm2Moe=dict(layer_types=CONVOLUTION), Lfm2=dict(num_hidden_layers=3, layer_types=CONVOLUTION),
    LongcatFlash=dict(head_dim=4), Mamba2=dict(num_heads=8),
    MllamaText=dict(cross_attention_layers=[1]),
    Moshi=dict(sliding_window=CONTEXT),                # as by default; the class slides nothing
    Qwen4ExpText=dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=16,
                      indexer_compress_ratio=4),
    Reformer=dict(
        is_decoder=True, attn_layers=("local", "lsh", "local"), axial_pos_shape=(8, 8),
        axial_pos_embds_dim=(16, 16), num_buckets=2,
        local_attn_chunk_length=8, lsh_attn_chunk_length=8),
    Xmod=dict(default_language="en_XX"), Zaya=dict(num_experts_per_tok=1)).items()}

def size_of(field):
    return next((size for size, fields in SIZES if fields.fullmatch(field)), None)

def longrope(turn):
    """A rotary table that is another one from a length of `turn` on."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    own = dict(original_max_position_embeddings=turn)
    return dict(rope_parameters={**rope, **own}, **own)

# Settings that make another architecture of a class.
VARIANTS = {"FalconForCausalLM (ALiBi)": dict(alibi=True),
    "FalconForCausalLM (new decoder)": dict(new_decoder_architecture=True),
    "LlamaForCausalLM (dynamic NTK)": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)),
    "Phi3ForCausalLM (longrope, before its turn)": longrope(PROMPT + 10),
    "Phi3ForCausalLM (longrope, beyond)": longrope(PROMPT + 8),
    "Qwen2ForCausalLM (sliding)": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "StableLmForCausalLM (parallel)": dict(use_parallel_residual=True, qk_layernorm=True),
    "XLMWithLMHeadModel (causal)": dict(causal=True),}
# What transformers registers beside decoder-only language models.
OTHERS = {"Gemma3nForConditionalGeneration": "its vision needs the package timm",
    "Gemma4AssistantForCausalLM": "drafts from another model's hidden states",
    "Gemma4UnifiedAssistantForCausalLM": "drafts from another model's hidden states",
    "MusicgenForCausalLM": "audio: several codebooks at a position", "MusicgenMelodyForCausalLM": "audio: several codebooks at a position",}

def classes():
    """Each class that this release registers, once."""
    return [name for name in dict.fromkeys(REGISTRY.values()) if name not in OTHERS]

def names():
    """Each class, its variants; twice where a configuration decides whether it looks ahead."""
    codes = {name: inspect.getsource(getattr(transformers, name).__init__) for name in classes()}
    encoders = [f"{name} (is_decoder)" for name in codes if "not config.is_decoder" in codes[name]]
    return sorted([*codes, *encoders, *VARIANTS], key=str.lower)

def small(config_class, **own):
    """A small configuration of the class: its default one, shrunk by the names of its fields."""
    stored, known = vars(config_class()), config_class.attribute_map
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    default = {n: stored[known.get(n, n)] for n in names if known.get(n, n) in stored}
    # Of lists by layer stay the first layers of each kind
    depth = next((v for n, v in default.items() if size_of(n) == LAYERS and type(v) is int), None)
    by_layer = [n for n, v in default.items() if isinstance(v, (list, tuple)) and len(v) == depth]
    kinds = [str(entries) for entries in zip(*(default[n] for n in by_layer))]
    first = [i for i, kind in enumerate(kinds) if kinds.index(kind) == i]
    more = [i for i in range(len(kinds)) if i not in first]
    kept = sorted((first + more)[:max(LAYERS, len(first))])
    fields = {}
    for name, value in default.items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = small(type(value))
        elif name in by_layer:
            fields[name] = [value[i] if size_of(name) is None else size_of(name) for i in kept]
        elif name in ALWAYS:
            fields[name] = ALWAYS[name]
        elif size_of(name) is not None and value and type(value) in (int, float):
            fields[name] = len(kept) if kept and size_of(name) == LAYERS else size_of(name)
        elif name in NOTHING and isinstance(value, int):
            fields[name] = type(value)(0)
    if "kv_lora_rank" in default:                              # latent attention: as many key heads as queries
        fields["num_key_value_heads"] = HEADS
    return config_class(**{**fields, **OWN.get(config_class.__name__, {}), **own})

def make(name, seed=0):
    """A random model, with weights large enough that its distributions are far from uniform, float64 where it can."""
    model_class = getattr(transformers, name.partition(" ")[0])
    torch.manual_seed(seed)
    own = dict(is_decoder=True) if name.endswith("(is_decoder)") else VARIANTS.get(name, {})
    config = small(model_class.config_class, **own)
    config._experts_implementation = "eager"                   # grouped_mm knows no float64
    model = model_class(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0, 0.25)
        ids = torch.arange(4, 4 + PROMPT)[None]
        try:
            model(ids, use_cache=False)
        except (RuntimeError, TypeError):
            model = model.float()
            model(ids, use_cache=False)
    return model

# ---------------------------------------------------------------- decoding
class HalfRight(HandMade):
    """A drafter that knows the text: of five tokens two come first in its rows, two second, one has no probability."""
    def __init__(self, model, text):
        super().__init__(text, None)

    def expand(self, tokens, parents):
        rows = torch.full((len(parents), VOCAB), 0.1 / VOCAB)
        for row, parent in zip(rows, parents):
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            at = self.t + self.depth[-1] + 1
            truth = self.text[at] if at < len(self.text) else 0
            row[(truth + 1) % VOCAB] = 0.4
            row[(truth + 2) % VOCAB] = 0.2
            row[truth] = (0.6, 0.3, 0.6, 0.3, 0)[at % 5]
        return rows.log()

def text_of(model, length=PROMPT):
    """A prompt, and what the model's own uncached forward says after it; of some, that with the most varied text."""
    found = []
    for seed in range(3):
        prompt = torch.randint(VOCAB // 2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        found.append((prompt, plain(model, prompt, NEW)))
        if len(set(found[-1][1])) > NEW // 3:
            break
    return max(found, key=lambda pair: len(set(pair[1])))

def edd_drafter(model, text, variant="edd"):
    config = runtime_drafters.config_of(variant, model, hidden=-2)
    draft_model, drafter = runtime_drafters.KINDS[config.kind]
    return drafter(weighty(lambda: draft_model(config, model), 1).to(model.dtype))

# What is decoded: drafters by model and text, and builders; None: a tree, or a chain where the target takes no trees.
CELLS = {
    "plain": [(lambda model, text: None, verify.root_only)], "chain": [(HalfRight, cape.chain)],
    "tree": [(HalfRight, cape.cape), (HalfRight, partial(pct.pct, cost=0.05))],
    "GLIDE": [(lambda model, text: glide.Drafter(random_glide(model).to(model.dtype)), None)],
    "EDD": [(edd_drafter, None)]}
BASELINES = [(partial(edd_drafter, variant=name), None) for name in ("eagle", "medusa")]

def cell(model, target, prompt, expected, decodings):
    for drafter, build in decodings:
        build = build or (cape.cape if getattr(target, "verifies_trees", True) else cape.chain)
        drafter = drafter(model, prompt + expected)
        found = verify.generate(target, drafter, build, prompt, NEW).tokens
        # Where a rotary table changes with the length, the output ends before that.
        meant = expected[:target.remaining(prompt)]
        assert len(meant) > NEW // 2
        if found != meant:
            return f"WRONG: {found} in the place of {meant}"

# A tree and its paths: 0 - 1 - 3, 0 - 2 - 4, 0 - 2 - 5
PARENTS, PATHS = [-1, 0, 0, 1, 2, 2], [[0, 1, 3], [0, 2, 4], [0, 2, 5]]

def tree_logits(model, target, prompt):
    """Logits of a tree's nodes against the uncached forward of each path: tokens would not notice a small error."""
    tokens = torch.arange(VOCAB // 2, VOCAB)[:len(PARENTS)]
    with torch.inference_mode():
        target.capture({})
        target.prefill(prompt)
        logits = target.forward(tokens, torch.tensor(PARENTS))
        for path in PATHS:
            alone = model(torch.tensor([prompt + tokens[path].tolist()]), use_cache=False).logits[0, -len(path):]
            error = (logits[path] - alone).abs().max() / alone.std()
            if not error < 1e-3:
                return f"WRONG: the logits of a tree are off by {error:.1g} of their spread"

# ---------------------------------------------------------------- the matrix
def outcome(work):
    """work() -> what a cell says: "yes" of None, else what it returned; one sentence of ours is a refusal."""
    try:
        return work() or "yes"
    except Exception as why:
        frame, says = traceback.extract_tb(why.__traceback__)[-1], str(why).strip()
        file = Path(frame.filename)
        if isinstance(why, ValueError) and file.parent in (ROOT, ROOT / "runtime") and "\n" not in says:
            return f"refused: {says}"
        last = (says.splitlines() or [""])[-1][:200]
        return f"traceback: {type(why).__name__}: {last} ({file.name}:{frame.lineno})"

def row(name, baselines=()):
    """{column: what its cell says} of a family; {"model": why} where transformers itself cannot build it or run it.
    baselines: further decodings of the column EDD."""
    made, columns = {}, {**CELLS, "EDD": [*CELLS["EDD"], *baselines]}

    def build():
        made["model"] = make(name)
        made["text"] = text_of(made["model"], 2 * PROMPT if "beyond" in name else PROMPT)

    def decode(target_class, wanted):
        model, (prompt, expected), target = made["model"], made["text"], target_class(made["model"])
        target.chunk_size = PROMPT // 2
        of = partial(cell, model, target, prompt, expected)
        cells = {key: outcome(partial(of, columns[key])) for key in wanted}
        if cells["tree"] == "yes":
            cells["tree"] = outcome(partial(tree_logits, model, target, prompt))
        made[target_class] = cells
    with torch.no_grad():
        says = outcome(build)
        if says != "yes":
            return {"model": says}
        says = outcome(partial(decode, AnyTarget, columns))
        if says != "yes":
            return {"by": "–", **dict.fromkeys(columns, says)}
        # What needs nothing of AnyTarget's
        says = outcome(partial(decode, verify.Target, ("plain", "chain", "tree")))
        alone = says == "yes" and {*made[verify.Target].values()} == {"yes"}
        return {"by": "Target" if alone else "AnyTarget", **made[AnyTarget]}

# ---------------------------------------------------------------- the table
# What differs between families in one and the same sentence.
REASONS = [(r"^refused: ", ""),
    (r"\d+%", "n %"),
    (r"layers of kind [\w, ]+, which", "layers of another kind (`{kinds}`), which"),
    (r"\(\w+(Error|Exception): .*?\): take a dec", "(its forward fails): take a dec"),
    (r" \('\w+' object has no attribute '\w+'\)| \(list index out of range\)", ""),]

def footnote(says, name, kinds):
    """The reason of a refusal, without what is the family's own."""
    for kind in re.findall(r"layers of kind ([\w, ]+), which", says):
        kinds.update(kind.split(", "))
    for pattern, instead in REASONS:
        says = re.sub(pattern, instead, says)
    return says.replace(name.partition(" ")[0], "the class")

def table(rows):
    """{name: row} -> docs/targets.md."""
    notes, kinds, lines = {}, set(), []
    for name, cells in rows.items():
        line = [name, cells.get("by", "–")]
        for column in CELLS:
            says = cells.get(column, cells.get("model"))
            if says.startswith("refused"):
                says = f"no [{notes.setdefault(footnote(says, name, kinds), len(notes) + 1)}]"
            # Where the target itself is refused, once
            line.append("–" if column != "plain" and line[2] == says != "yes" else says)
        lines.append("| " + " | ".join(line) + " |")
    said = {column: [cells.get(column) for cells in rows.values()] for column in CELLS}
    counts = [f"{column} {cells.count('yes')}" for column, cells in said.items()]
    reasons = [f"{number}. {note.replace('{kinds}', '`, `'.join(sorted(kinds)))}" for note, number in notes.items()]
    others = [f"- {name}: {why}" for name, why in OTHERS.items()]
    release = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    alone = sum(cells.get("by") == "Target" for cells in rows.values())
    return f"""# Families

Each causal class that transformers registers, as a tiny random model with random drafters: `yes` means that greedy
output equals the model's own uncached forward token for token, and that a tree's logits do. GLIDE and EDD (with EAGLE
and MEDUSA) draft CAPE trees, or chains where the class takes no trees. What is not served is refused in one sentence.

`by` names the class that a target needs: `Target` of [verify.py](../verify.py) alone, in chains and trees, or
`AnyTarget` of [runtime/targets.py](../runtime/targets.py), which serves all of them and is what `bench.py` and
`train.py` use; GLIDE and EDD are those of [runtime/drafters.py](../runtime/drafters.py) here.

Made by `python tests/tools/targets.py` with {release}.

**{len(rows)} families** (a class, or a class with settings in brackets). Served:
{", ".join(counts)}; by `Target` alone {alone}.

| class | by | {" | ".join(CELLS)} |
|---|---|{"---|" * len(CELLS)}
""" + "\n".join(lines) + "\n\nRefused because\n\n" + "\n".join(reasons) + "\n\nLeft out\n\n" + "\n".join(others) + "\n"

def main():
    rows, wanted = {}, sys.argv[1:] or [""]
    for name in names():
        if any(part in name for part in wanted):
            rows[name] = row(name, BASELINES)
            print(name, *(f"{column}: {says}" for column, says in rows[name].items()), sep="\n    ", flush=True)
    if wanted == [""]:
        (ROOT / "docs" / "targets.md").write_text(table(rows), encoding="utf-8")

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
