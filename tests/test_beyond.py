"""beyond/: Gemma 4's assistants against transformers' own, EAGLE-3 against its published forward, written out again."""
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import VOCAB, plain, tiny, weighty
from test_convert import feed_forward, rms, self_attention, written
from test_glide import batch_of, text, view
from test_verify import BUILDS, path_to
from transformers import DynamicCache, Gemma4AssistantConfig, Gemma4Config, Gemma4TextConfig

import verify
from beyond import eagle3, gemma4
from runtime.targets import any_target
from runtime.proof import proves_itself

PROMPT, WIDTH, WINDOW = [3, 1, 4, 1, 5, 9], 32, 5
NODES, PARENTS = torch.tensor([1, 2, 3, 2, 5, 7, 7]), [-1, 0, 0, 1, 2, 4, 4]
NEAR = dict(atol=1e-5, rtol=1e-4)                              # rotary tables of a float64 model are float32
KINDS = ["sliding_attention", "full_attention"]

# ---------------------------------------------------------------- Gemma 4
def gemma_config(shared, **more):
    """Layers of two kinds with heads of two sizes; the last `shared` read the rows of earlier ones."""
    own = dict(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
               global_head_dim=16, num_hidden_layers=4, layer_types=2 * KINDS, sliding_window=WINDOW, num_kv_shared_layers=shared,
               hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB, max_position_embeddings=64, eos_token_id=None,
               bos_token_id=None, pad_token_id=None)
    return Gemma4TextConfig(**{**own, **more})

@cache
def gemma(kind):
    if kind != "for images":
        return weighty(lambda: transformers.Gemma4ForCausalLM(gemma_config(2 if kind == "shared" else 0)).double(), 0)
    # What AutoModelForCausalLM makes of google/gemma-4-*
    config = Gemma4Config(text_config=gemma_config(2, pad_token_id=0))
    return weighty(lambda: transformers.Gemma4ForConditionalGeneration(config).double(), 0)

def assistant_of(ordered=False, width=WIDTH, **more):
    text = gemma_config(2, num_hidden_layers=2, layer_types=KINDS, hidden_size=16, hidden_size_per_layer_input=0,
                        vocab_size_per_layer_input=0, **more)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width, use_ordered_embeddings=ordered, num_centroids=4,
                                   centroid_intermediate_top_k=2)
    with gemma4.all_shared(Gemma4TextConfig):
        model = weighty(lambda: transformers.Gemma4AssistantForCausalLM(config).double(), 1)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.generation_config.num_assistant_tokens = 4
    return model

def begun(model, drafter, before=0, t=6):
    """A round begins after t tokens of a text, `before` of which the drafter knows -> the text's batch"""
    batch = batch_of(model, text(14)[None], drafter.needs["hidden"])
    drafter.begin(view(batch, before, t))
    return batch

def trees(model, drafter, at_once):
    """-> of some rounds the committed ids, and the logits of NODES, by generations or at once."""
    calls = [range(7)] if at_once else [[0], [1, 2], [3, 4], [5, 6]]
    for before, t in ((0, 6), (6, 7), (7, 12)):
        batch = begun(model, drafter, before, t)
        rows = torch.cat([drafter.expand(NODES[call], [PARENTS[i] for i in call]) for call in calls])
        drafter.keep([0, 1, 3])
        yield batch["ids"][0, :t].tolist(), rows

@torch.no_grad()
def along(model, assistant, ids, path):
    """Logits (V,) after `path`, root first, that follows the committed ids: the assistant's own forward, token by token."""
    cache = DynamicCache()                                      # knows nothing of windows, and keeps all entries
    given = model(torch.tensor([ids]), past_key_values=cache, output_hidden_states=True, return_shared_kv_states=True)
    shared = dict(given.shared_kv_states)
    if not shared:                                              # of a target whose layers all have their own: the last one of a kind stays
        shared = {kind: (layer.keys, layer.values) for kind, layer in zip(model.config.get_text_config().layer_types, cache.layers)}
    state, position = given.hidden_states[-1][:, -1:], torch.tensor([[len(ids)]])
    for token in path:
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        out = assistant(inputs_embeds=torch.cat((embedded, state), -1), position_ids=position, shared_kv_states=shared,
                        attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        state = out.last_hidden_state
    return out.logits[0, 0]

@pytest.mark.parametrize("kind, ordered", [("own", False), ("for images", True)])
def test_a_trees_rows_are_those_of_its_paths(kind, ordered):
    """So its chains are the candidates of transformers' own assisted generation.  Ordered: at once; else depth by depth."""
    model, assistant = gemma(kind), assistant_of(ordered)
    for ids, logits in trees(model, gemma4.Drafter(assistant, model), ordered):
        for node, row in enumerate(logits):
            alone = along(model, assistant, ids, NODES[path_to(node, PARENTS)].tolist())
            left_out = row.isinf()
            assert left_out.any() == ordered
            torch.testing.assert_close(row[~left_out], alone[~left_out], **NEAR)
            # transformers fills these with the least score - 1.
            assert (alone[left_out] == alone[~left_out].min() - 1).all() or not left_out.any()

def test_an_assistant_is_loaded_from_a_folder(tmp_path):
    """Also where its configuration names other key heads than the target has, as gemma-4-31B's (vllm-ascend#11168)."""
    model, assistant = gemma("shared"), assistant_of(ordered=True, num_key_value_heads=4)
    assistant.save_pretrained(tmp_path)
    drafter = gemma4.load(str(tmp_path), model)
    with pytest.raises(ValueError):
        Gemma4TextConfig.kv_sharing_modes.fget(gemma_config(4))    # all_shared leaves nothing behind
    prompt = begun(model, drafter)["ids"][0, :6].tolist()
    row, alone = drafter.expand(torch.tensor([1]), [-1])[0], along(model, assistant_of(ordered=True), prompt, [1])
    assert row.dtype == torch.float64
    torch.testing.assert_close(row[row.isfinite()], alone[row.isfinite()], **NEAR)
    assert verify.generate(any_target(model), drafter, BUILDS["pct"], prompt, 8).tokens == plain(model, prompt, 8)

@pytest.mark.parametrize("make, words", [(lambda: assistant_of(width=24), "width 24 against the target's 32"),
    (lambda: assistant_of(global_head_dim=24), "head size of full_attention 24 against the target's 16"),
    (lambda: gemma("shared"), "is a gemma4_text: name an assistant"), (None, "cannot be read"),
])
def test_what_does_not_fit_is_named(tmp_path, make, words):
    if make:
        make().save_pretrained(tmp_path)
    with pytest.raises(verify.UserError, match=words):
        gemma4.load(str(tmp_path), gemma("shared"))
    with pytest.raises(verify.UserError, match="drafts for a Gemma 4, not for a LlamaForCausalLM"):
        gemma4.load(str(tmp_path), tiny("llama"))

# ---------------------------------------------------------------- EAGLE-3
STATES = (2, 4, 5)                                             # the official code's choice of 8 layers

@pytest.fixture(scope="module")
def llama8():
    return tiny("llama", num_hidden_layers=8)

DRAFTS = {
    "draft vocabulary": dict(heads=4, key_heads=2, words=(0, 2, 3, 5, 6, 9, 11)), "all words": dict(heads=4, key_heads=4, norm_before_residual=True),
    "own embeddings": dict(heads=2, key_heads=1, words=(1, 2, 4, 5, 8), width=16)}

def published(heads, key_heads, words=None, width=WIDTH, d=8, inner=40, seed=3, **more):
    """Random weights, named as the published ones, and their config.json."""
    torch.manual_seed(seed)
    attn, mlp, rows = "midlayer.self_attn", "midlayer.mlp", len(words or range(VOCAB))
    sizes = {"fc": (width, 3 * WIDTH), f"{mlp}.gate_proj": (inner, width), f"{mlp}.up_proj": (inner, width), f"{mlp}.down_proj": (width, inner),
             f"{attn}.q_proj": (heads * d, 2 * width), f"{attn}.k_proj": (key_heads * d, 2 * width), f"{attn}.v_proj": (key_heads * d, 2 * width),
             f"{attn}.o_proj": (width, heads * d), "lm_head": (rows, width)}
    weights = {f"{name}.weight": torch.randn(size, dtype=torch.float64) * 0.3 for name, size in sizes.items()}
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        weights[f"{name}.weight"] = 1 + torch.rand(width, dtype=torch.float64)
    if words:
        weights["d2t"] = torch.tensor(words) - torch.arange(len(words))
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(words), True)
    if width != WIDTH:
        weights["embed_tokens.weight"] = torch.randn(VOCAB, width, dtype=torch.float64)
    config = dict(model_type="llama", hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=key_heads,
                  head_dim=d, num_hidden_layers=1, rms_norm_eps=1e-5, vocab_size=VOCAB, rope_theta=5e3, draft_vocab_size=VOCAB)
    return weights, config | more

def spoken(weights, config, embed, states, ids, path):
    """The published forward, all rows, without a cache -> logits (V_d,) after `path`, root first.

    states (t, 3 D) of the committed ids (t,): ids[1:] and the root go with them, what is below with its own output.
    """
    eps, heads, theta = config["rms_norm_eps"], (config["num_attention_heads"], config["num_key_value_heads"]), config["rope_theta"]
    table = weights.get("embed_tokens.weight", embed)
    state, tokens = states @ weights["fc.weight"].T, list(ids[1:]) + path[:1]
    for token in [*path[1:], None]:
        normed = rms(state, weights["midlayer.hidden_norm.weight"], eps)
        x = torch.cat((rms(table[tokens], weights["midlayer.input_layernorm.weight"], eps), normed), -1)
        residual = normed if config.get("norm_before_residual") else state
        y = residual + self_attention(weights, "midlayer.self_attn", x, torch.arange(len(x)).double(), *heads, theta)
        y = y + feed_forward(weights, "midlayer.mlp", rms(y, weights["midlayer.post_attention_layernorm.weight"], eps))
        if token is not None:
            # Its own output is the next token's state.
            tokens, state = tokens + [token], torch.cat((state, y[-1:]))
    return rms(y[-1], weights["norm.weight"], eps) @ weights["lm_head.weight"].T

@pytest.mark.parametrize("name, at_once", zip(DRAFTS, (False, True, False)))
def test_eagle3_is_the_published_forward(tmp_path, llama8, name, at_once):
    weights, config = published(**DRAFTS[name])
    folder = written(tmp_path, weights, config, "pytorch_model.bin" if at_once else "model.safetensors")
    drafter = eagle3.load(str(folder), llama8)
    assert drafter.needs == {"hidden": list(STATES)}
    words = list(DRAFTS[name].get("words") or range(VOCAB))
    for ids, logits in trees(llama8, drafter, at_once):
        with torch.no_grad():
            hidden = llama8(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in STATES], -1)                 # (t, 3 D)
        for node, row in enumerate(logits):
            path = NODES[path_to(node, PARENTS)].tolist()
            again = spoken(weights, config, llama8.get_input_embeddings().weight.detach(), states, ids, path)
            torch.testing.assert_close(row[words], again, **NEAR)
            assert row.isfinite().sum() == len(words)

def test_which_layers_are_read():
    assert gemma4.source_layers(gemma_config(2)) == {"sliding_attention": 0, "full_attention": 1}
    assert gemma4.source_layers(gemma_config(0)) == {"sliding_attention": 2, "full_attention": 3}
    assert eagle3.layers_of({}, 32) == [2, 16, 29]
    # lmsys/Qwen3-235B-A22B-EAGLE3 counts layers, others hidden states (sglang#25454): the official choice of 94
    for ids in ([1, 46, 90], [2, 47, 91]):
        said = {"eagle_aux_hidden_state_layer_ids": ids}
        assert eagle3.layers_of(said, 94) == eagle3.layers_of({"eagle_config": said}, 94) == eagle3.layers_of({}, 94) == [2, 47, 91]

@pytest.mark.parametrize("change, words", [
    (lambda w: w.pop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    (lambda w: w.update({"layers.1.norm.weight": torch.ones(3)}), "layers.1.norm.weight has no place"),
    (lambda w: w["d2t"].add_(1), "d2t and t2d name different words"),
    (lambda w: w.update({"fc.weight": SimpleNamespace()}), "cannot be read"),      # it is read as weights alone
    (lambda w: (w.pop("d2t"), w.pop("t2d")), "lm_head has 7 tokens, and d2t, which says which, is missing"),
    # of config.json
    ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "not three layers"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "the target has 8 layers"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "a width of 32 does not divide into 5 heads"),
    ({"hidden_size": "wide"}, "hidden_size is 'wide', not a number"),
])
def test_the_first_thing_that_does_not_fit_is_named(tmp_path, llama8, change, words):
    weights, config = published(**DRAFTS["draft vocabulary"])
    if callable(change):
        change(weights)
    else:
        config |= change
    with pytest.raises(verify.UserError, match=words) as error:
        eagle3.load(str(written(tmp_path, weights, config, "pytorch_model.bin")), llama8)
    assert "\n" not in str(error.value)

def test_a_draft_vocabulary_is_known_by_d2t_alone(tmp_path, llama8):
    """Words are left out, and the text is plain decoding's."""
    weights, config = published(**DRAFTS["draft vocabulary"])
    del weights["t2d"]
    folder = written(tmp_path, weights, config | {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]})
    drafter = eagle3.load(str(folder), llama8)
    begun(llama8, drafter)
    row = drafter.expand(torch.tensor([1]), [-1])[0]
    assert drafter.needs == {"hidden": [3, 4, 5]}
    assert row.isfinite().nonzero()[:, 0].tolist() == [*DRAFTS["draft vocabulary"]["words"]]
    assert verify.generate(any_target(llama8), drafter, BUILDS["pct"], PROMPT, 8).tokens == plain(llama8, PROMPT, 8)

# ---------------------------------------------------------------- a drafter proves itself
class Reciting:
    """A drafter that knows what the target will write, and predicts `change` of it; None: nothing."""
    needs = {}

    def __init__(self, text, change):
        self.text, self.change = text, change

    def begin(self, view):
        self.token = self.change(self.text[view.length + 1])

    def expand(self, tokens, parents):
        logits = torch.full((1, VOCAB), float("-inf"))
        return logits if self.token is None else logits.index_fill(1, torch.tensor(self.token), 9.0)

    reset = keep = lambda *args: None

def test_a_drafter_proves_itself(llama):
    text, target, random = PROMPT + plain(llama, PROMPT, 33), any_target(llama), torch.Generator().manual_seed(0)

    def sentence(change):
        return proves_itself(target, Reciting(text, change), [PROMPT], 32)
    assert sentence(lambda token: token) is None
    assert sentence(lambda token: token if torch.rand(1, generator=random) < 0.4 else 0) is None
    assert "right 0 times of 31" in sentence(lambda token: (token + 1) % VOCAB)
    assert "vocabulary" in sentence(lambda token: torch.randint(VOCAB, (), generator=random).item())
    assert sentence(lambda token: None) is None                # one that never says anything is not judged
    # Where the target writes one token only all is right by chance, and that is no alarm.
    target.run = lambda *args, own=target.run: [torch.zeros_like(own(*args)[0]).index_fill(1, torch.tensor(7), 9.0)]
    assert proves_itself(target, Reciting(PROMPT + [7] * 40, lambda token: token), [PROMPT], 24) is None
