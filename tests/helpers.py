"""What several tests share: made-up drafters, trees as paths, files of models and rows."""
import json
import re
from functools import lru_cache
from textwrap import dedent
from types import SimpleNamespace

import torch
from conftest import CONTEXT, GROUPED, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast

from runtime import load
from training import models as draft_models

# ---------------------------------------------------------------- made-up drafters and their trees
def table_expand(table):
    """A drafter whose distribution depends on the last token alone."""
    return path_expand(lambda path: table[path[-1]])

def path_expand(row_after):
    """A drafter whose distribution depends on the whole path, known from `parents` alone.

    expand.given: the paths of the nodes that it was given; expand.calls: how often; expand.widest:
    how many at most.
    """
    def expand(tokens, parents):
        assert tokens.shape == (len(parents),) and parents, "a forward over no node"
        expand.calls += 1
        expand.widest = max(expand.widest, len(parents))
        given = expand.given
        for token, parent in zip(tokens.tolist(), parents):
            assert -1 <= parent < len(given), "parents come before, the root's is -1"
            given.append((given[parent] if parent >= 0 else ()) + (token,))
        return torch.stack([row_after(path) for path in given[-len(parents):]])

    expand.given, expand.calls, expand.widest = [], 0, 0
    return expand

def random_table(seed, vocab=14, zeros=0.0):
    """A distribution (V, V) after each token, of which a share `zeros` is zero."""
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab, vocab, generator=g, dtype=torch.float64) ** (1 + seed % 9) + 1e-9
    table[torch.rand(vocab, vocab, generator=g) < zeros] = 0
    return table / table.sum(1, keepdim=True).clamp(min=1e-300)

def sequences(tree):
    """The token sequence of each node, the root's first.

    Checked: parents come before their children, and nothing is proposed twice.
    """
    found = [tuple(tree.tokens[:1].tolist())]
    assert tree.parents[0] == -1
    assert tree.tokens.dtype == tree.parents.dtype == tree.expand_index.dtype == torch.long
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist()):
        assert 0 <= parent < len(found)
        found.append(found[parent] + (token,))
    assert len(found) == len(set(found)) == len(tree.parents)
    return found

def paths(tree):
    """The token paths of a tree, the root left out."""
    return {path[1:] for path in sequences(tree)[1:]}

# ---------------------------------------------------------------- training
def batch_of(model, ids):
    """What training reads of the target's forward over ids (B, T), by transformers alone."""
    cache = DynamicCache()
    with torch.no_grad():
        out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    kv = {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}
    hidden = dict(enumerate(out.hidden_states))
    return SimpleNamespace(ids=ids, kv=kv, hidden=hidden, logits=out.logits)

def mean_loss(draft_model, batch, loss_mask=None):
    """The loss of a training step, as train.py makes it of a draft model's terms."""
    if loss_mask is None:
        loss_mask = torch.ones_like(batch.ids, dtype=torch.bool)
        loss_mask[:, -1] = False
    total = 0
    for x, labels, mask in draft_model.terms(batch, 5):
        chosen = loss_mask if mask is None else loss_mask & mask
        total = total + draft_model.loss_of(x[chosen], labels[chosen])
    return total / loss_mask.sum()

# ---------------------------------------------------------------- Max-Gram
def brute_force(generation, draft, n, source=(), bigram=()):
    """Max-Gram's definition, one token at a time -> (tokens, lengths of their matches).

    What follows the longest suffix of the query in the text, leftmost; or the bigram's token.
    """
    text = [*source, -1, *generation]
    query = [*generation, *draft]
    tokens, lengths = [], []
    while len(tokens) < n:
        token, length = bigram[query[-1]] if query[-1] < len(bigram) else 0, 0
        for size in range(len(query), 0, -1):
            places = [i for i in range(len(text) - size) if text[i:i + size] == query[-size:]]
            after = [text[i + size] for i in places if text[i + size] >= 0]
            if after:
                token, length = after[0], size
                break
        if not length and not token:
            break
        tokens, query, lengths = [*tokens, token], [*query, token], [*lengths, length]
    return tokens, lengths

# ---------------------------------------------------------------- docstrings
def lines_to_use(module):
    """The indented lines under "To use ..." in a module's docstring."""
    to_use = r"\nTo use [^\n]*\n(?:\S[^\n]*\n)*\n((?:    [^\n]*\n|\n)+)"
    return dedent(re.search(to_use, module.__doc__)[1])

# ---------------------------------------------------------------- files of models, files of rows
TEXT = "def add(a, b):\n    return a + b\n\n"

def tokenizer_of(text, vocab=300, end="<|endoftext|>"):
    """A byte-level BPE tokenizer of at most `vocab` tokens; its end of text has the id 0."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet,
                                  special_tokens=[end], show_progress=False)
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end)

def save(folder, model, tokenizer):
    """A model and its tokenizer, as Hugging Face saves them -> folder"""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

def save_drafter(folder, kind, draft_model, target, tokenizer=None, temperature=1.0):
    """Save a draft model as train.py does, but in its own precision."""
    about = {"kind": kind, "target": load.fingerprint(target, tokenizer),
             "validation": {"temperature": temperature}}
    draft_models.save(folder, draft_model, tokenizer, about)

def write_rows(path, rows):
    """JSON lines -> path"""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]

def bench_args(small, *more):
    """bench.py's arguments for the models and prompts of conftest.small."""
    return ["--target", str(small / "model"), "--checkpoint", str(small / "drafters"),
            "--prompts", str(small / "prompts.jsonl"), "--max-new-tokens", "12", "--device", "cpu",
            *more]

# ---------------------------------------------------------------- families of targets
HEADS = {**GROUPED, "head_dim": 8}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
# What a small configuration of each class says beside conftest's sizes.  All verify trees.
FAMILIES = {
    "MistralForCausalLM": {**GROUPED, "sliding_window": 4096},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Qwen3ForCausalLM": HEADS,
    "CohereForCausalLM": GROUPED,
    "Cohere2ForCausalLM": {**GROUPED, "sliding_window": 7, "layer_types": LAYERS},
    "HeliumForCausalLM": HEADS,
    "Ernie4_5ForCausalLM": HEADS,
    "GlmForCausalLM": {**HEADS, "partial_rotary_factor": 0.5},
    "SmolLM3ForCausalLM": {**GROUPED, "no_rope_layers": [1, 0, 1]},
    "Gemma2ForCausalLM": {**HEADS, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "Gemma3ForCausalLM": {
        **HEADS, "sliding_window": 7, "query_pre_attn_scalar": 8, "layer_types": LAYERS},
    "GptOssForCausalLM": {
        **HEADS, "num_local_experts": 4, "sliding_window": 7, "layer_types": LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "Phi3ForCausalLM": {
        **GROUPED, "rope_scaling": LONGROPE, "original_max_position_embeddings": 36,
        "max_position_embeddings": 80},
    "GPT2LMHeadModel": {"n_positions": CONTEXT},
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
made = lru_cache(maxsize=None)(lambda name: tiny(name, **FAMILIES[name]))

def for_generate(new, name="llama", **config):
    """A random model for generate(), in float32: alone it makes `new` tokens."""
    model = tiny(name, **config).float()
    model.generation_config = GenerationConfig(max_new_tokens=new, decoder_start_token_id=1)
    return model

def refused(capsys, argv, words, main):
    """One sentence with these words, and exit status 2."""
    assert main(argv) == 2
    err = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert words in err[-1] and not any("Traceback" in line for line in err), err
