"""Gemma 4's assistants, with the papers' trees: GLIDE's idea, in production.

Google publishes one beside each Gemma 4 (ai.google.dev/gemma/docs/mtp/overview).  The model is
transformers' own Gemma4AssistantForCausalLM.

The idea.  As in GLIDE, the target's keys and values serve the drafter.  The layers of an assistant
have queries alone, and attend to nothing else.  A node's input is the target's embedding of its
token beside its parent's hidden state: the target's own for the root, the assistant's for others.
All nodes of a round have the root's position and attend to the KV entries of committed tokens.
Drafted nodes never see each other, so new nodes are a batch of independent queries without a mask.

    transformers                           shape             name here
    shared_kv_states[kind]                 2 x (1, H, t, d)  Drafter.kv, of source_layers
    last_hidden_state                      (1 + n, D)        Drafter.states: parents[i] + 1 for i
    pre_projection(cat(embedding, state))  (m, D_assistant)  the input of m nodes
    post_projection                        (m, D)            the states for their children
    position_ids                           ()                Drafter.position, of all nodes

Differences from transformers (5.23):
 1. It drafts any tree, not chains only.  A node needs its parent's state, so a node whose parent
    comes in the same call takes another forward.
 2. An ordered head scores the tokens of its nearest centroids, and gives all others the least score
    minus 1.  In a large vocabulary these may outweigh the rest, so here they get -inf.
 3. Its assisted generation lets the assistant read KV entries of rejected drafts: it cuts the
    shared ones after the root, one too late, and those of a sliding layer not at all.  Here the
    assistant reads entries of committed tokens only.
 4. It shares no entries of a target whose layers all store their own.  Here they come from the
    target's cache.
 5. It cannot build an assistant: Gemma4TextConfig.kv_sharing_modes wants one layer of each kind
    that stores keys, and an assistant has none.  all_shared() mends that while one is built.
 6. As there, a node of a sliding layer sees window + 1 committed tokens.  The target's own sees
    window - 1.

    python bench.py --target google/gemma-4-E2B-it --tree chain cape pct \\
        --drafter "gemma4(google/gemma-4-E2B-it-assistant)"
"""
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from beyond.eagle import ready
from beyond.eagle3 import first_line
from verify import UserError


def source_layers(config):
    """{kind of attention: the target's last layer of that kind that stores keys and values}."""
    storing = config.num_hidden_layers - config.num_kv_shared_layers
    # Of two layers of a kind the later one replaces the earlier.
    return {kind: layer for layer, kind in enumerate(config.layer_types[:storing])}


@contextmanager
def all_shared(config_class):
    """Within, transformers builds models whose layers all read shared keys (difference 5)."""
    own = config_class.kv_sharing_modes

    def modes(config):
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return own.fget(config)

    config_class.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        config_class.kv_sharing_modes = own


# ---------------------------------------------------------------- decoding
class Drafter:
    """Decoding with an assistant, by the contract of a drafter in verify.py."""
    temperature = 1.0

    def __init__(self, assistant, target_model):
        self.model, self.device = assistant.eval(), assistant.device
        self.embed = target_model.get_input_embeddings()
        config = target_model.config.get_text_config()
        own = assistant.config.get_text_config()
        sources = source_layers(config)
        self.layers = {kind: sources[kind] for kind in own.layer_types}
        # The last of hidden_states is normed, as the assistant wants it.
        self.last = config.num_hidden_layers
        # How many committed tokens a layer sees; None: all
        self.seen = {"full_attention": None, "sliding_attention": own.sliding_window + 1}
        self.needs = {"kv": sorted(self.layers.values()), "hidden": [self.last]}
        # The assistant's configuration may give other key heads than the target has.
        for layer in assistant.model.layers:
            attention = layer.self_attn
            source = config.per_layer_config[self.layers[attention.layer_type]]
            groups = own.num_attention_heads // source.num_key_value_heads
            attention.num_key_value_groups = groups
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.kv, self.states, self.position = {}, None, 0

    def begin(self, view):
        """A round starts: the target's keys and values, and its last hidden state."""
        self.kv = {}
        for kind, layer in self.layers.items():
            first = max(0, view.length - (self.seen[kind] or view.length))
            self.kv[kind] = [entries[:, :, first:].to(self.device) for entries in view.kv[layer]]
        # The root comes next.
        self.position = view.length
        self.states = view.hidden[self.last][-1:].to(self.device)              # (1, D)

    def keep(self, path):
        """Nothing is kept: accepted tokens come back as the target's own KV entries."""

    @torch.no_grad()
    def expand(self, tokens, parents):
        """A forward for each generation of the nodes.  tokens (m,), parents [m] -> logits (m, V)"""
        tokens = tokens.to(self.embed.weight.device)
        logits = []
        while parents:
            # The nodes whose parents' states are known
            count = ready(parents, len(self.states) - 1)
            above = self.states[[parent + 1 for parent in parents[:count]]]    # (count, D)
            x = self.forward(tokens[:count], above)
            self.states = torch.cat((self.states, self.model.post_projection(x)))
            logits.append(self.head(x))
            tokens = tokens[count:]
            parents = parents[count:]
        return torch.cat(logits)

    def forward(self, tokens, above):
        """The assistant over m independent nodes.  tokens (m,), above (m, D) -> (m, D_assistant)"""
        embedded = self.embed(tokens).to(self.device)                          # (m, D)
        x = self.model.pre_projection(torch.cat((embedded, above), -1))        # (m, D_assistant)
        position = torch.full((1, len(x)), self.position, device=self.device)
        # No mask, and not causal: each node sees all of self.kv.  logits_to_keep=None: all nodes.
        # At the default, 0, transformers looks for per-layer inputs, which an assistant has not.
        out = self.model.model(
            inputs_embeds=x[None], position_ids=position, shared_kv_states=dict(self.kv),
            attention_mask=dict.fromkeys(self.kv), is_causal=False, use_cache=False,
            logits_to_keep=None)
        return out.last_hidden_state[0]

    def head(self, x):
        """x (m, D_assistant) -> logits (m, V); -inf for tokens that an ordered head leaves out."""
        ordered, weight = self.model.masked_embedding, self.model.lm_head.weight
        if ordered is None:
            return self.model.lm_head(x)
        # The tokens of the k nearest of C centroids, V / C tokens each
        k = ordered.centroid_intermediate_top_k
        nearest = ordered.centroids(x).topk(k).indices                         # (m, k)
        words = ordered.token_ordering.long().view(ordered.num_centroids, -1)  # (C, V / C)
        words = words[nearest].flatten(1)                                      # (m, k V / C)
        scores = (weight[words] @ x[:, :, None])[:, :, 0]                      # (m, k V / C)
        logits = scores.new_full((len(x), len(weight)), float("-inf"))
        return logits.scatter(1, words, scores)


# ---------------------------------------------------------------- loading
def misfit(config, target):
    """The first difference between an assistant's configuration and a target's, or None."""
    own = config.get_text_config()
    pairs = [("width", config.backbone_hidden_size, target.hidden_size),
             ("vocabulary", own.vocab_size, target.vocab_size)]
    sources = source_layers(target)
    for layer, kind in enumerate(own.layer_types):
        if kind not in sources:
            return f"the target has no layer of {kind}"
        head = own.per_layer_config[layer].head_dim
        source = target.per_layer_config[sources[kind]]
        pairs.append((f"head size of {kind}", head, source.head_dim))
    for what, mine, its in pairs:
        if mine != its:
            return f"{what} {mine} against the target's {its}"


def load(name, target_model, **more):
    """A published assistant, by hub name or folder -> Drafter.  more: revision, local_files_only.

    Raises UserError, in one sentence, where it is something else, or belongs to another target.
    """
    target = target_model.config.get_text_config()
    embed = target_model.get_input_embeddings()
    if not target.model_type.startswith("gemma4"):
        raise UserError(f"gemma4({name}) drafts for a Gemma 4, not for a "
                        f"{type(target_model).__name__}")
    try:
        config = AutoConfig.from_pretrained(name, **more)
    except Exception as why:
        reason = f"{type(why).__name__}: {first_line(why)}"
        raise UserError(f"gemma4({name}) cannot be read ({reason}): give a hub name or a "
                        "folder") from None
    if not config.model_type.endswith("_assistant"):
        raise UserError(f"gemma4({name}) is a {config.model_type}: name an assistant")
    reason = misfit(config, target)
    if reason:
        raise UserError(f"gemma4({name}) was made for another target ({reason}): take the one "
                        "named after it")
    token = torch.zeros(1, dtype=torch.long, device=embed.weight.device)
    # Weights of the target may be quantised: what they give says the type.
    with torch.no_grad():
        dtype = embed(token).dtype
    with all_shared(type(config.get_text_config())):
        assistant = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype, **more)
    return Drafter(assistant.to(target_model.device), target_model)
