"""A draft model of EDD's kind for targets that are not built as Llama is: AnyDraftModel.

edd.DraftModel takes the target's embedding, head, norm and last layer as Llama uses them.  Others
scale embeddings and logits, cap logits, quantise weights, or leave them to accelerate, which brings
them when a module runs.  AnyDraftModel runs the target once, finds the scales, and proves that they
and the parts give what the target gives.

    class EDD(AnyDraftModel, edd.EDD): ...                 # runtime/drafters.py has them all
"""
import copy
from functools import partial
from inspect import signature

import torch
from torch import nn

import edd
from runtime.linear import PackedLinear


def place_of(model):
    """Where ids go: accelerate brings weights on "meta" to where the ids are."""
    return "cpu" if model.device.type == "meta" else model.device


# -------------------------------------------------- parts of a target
def factor(ours, targets, what):
    """The number c of targets = c ours, up to rounding; ValueError where there is none."""
    share = targets.cpu().double() / ours.cpu().double()       # (Apple's GPUs know no double)
    c = share.nanmedian()
    # The median: in half precision MoE routing can flip for single tokens.
    off = (share / c - 1).abs().nanmedian()
    if not off < torch.finfo(ours.dtype).eps ** 0.5:
        raise ValueError(f"its {what} are made otherwise")
    return c.item()


class Part:
    """A part of the target, called with x of any type, on any device; its weights get no gradient.

    Where x needs a gradient, the part is computed in the type of x: in float16 a gradient below
    6e-8 is zero.  Weights that are quantised, sharded or offloaded are used as they are.
    """

    def __init__(self, module, like):
        self.module, self.like = module, like

    def __call__(self, x):
        learns = torch.is_grad_enabled() and x.requires_grad
        with torch.set_grad_enabled(learns):
            return self.frozen(x, learns).to(x.device)

    def frozen(self, x, learns):
        """The module's output, on its own device."""
        weights = {name: p.detach() for name, p in self.module.named_parameters()}
        if learns and weights and all(is_plain(p) for p in weights.values()):
            weights = {name: p.to(x.dtype) for name, p in weights.items()}
            return torch.func.functional_call(self.module, weights, x.to(self.like.device))
        x = x.to(self.like)
        if learns and any(p.requires_grad for p in self.module.parameters()):
            return torch.func.functional_call(self.module, weights, x)
        return self.module(x)


def is_plain(p):
    """Is a weight neither quantised nor sharded nor offloaded?"""
    return p.is_floating_point() and not p.is_meta and not hasattr(p, "__tensor_flatten__")


class Head(PackedLinear):
    """A linear head whose logits are scaled and capped as the target's."""
    scale, cap = 1.0, None

    def forward(self, x):
        return capped(super().forward(x * self.scale), self.cap)


def capped(logits, cap):
    """Soft caps: a tanh."""
    return cap * torch.tanh(logits / cap) if cap else logits


def own_copy(module):
    """A copy without accelerate's hook and forward, whose offloaded weights are allocated."""
    hook = getattr(module, "_hf_hook", None)
    twin = copy.deepcopy(module, {id(hook): hook})
    vars(twin).pop("forward", None)
    return twin.to_empty(device="cpu") if any(p.is_meta for p in twin.parameters()) else twin


# -------------------------------------------------- the draft model
class EntriesFound(Exception):
    """A layer has asked its cache."""


class Entries:
    """In the place of a layer's cache: takes keys and values, and ends the layer's forward."""

    def update(self, k, v, *args, **kwargs):
        self.k, self.v = k, v
        raise EntriesFound


class AnyDraftModel(edd.DraftModel):
    """A draft model for any target whose decoder has layers, norm and rotary_emb, as Llama's."""

    def keys_values(self, x, position):
        """As edd.DraftModel.keys_values, by the layer's own code, up to where it asks its cache."""
        entries = Entries()
        try:
            self.run_layer(x, position, None, entries)
        except EntriesFound:
            return entries.k, entries.v
        raise ValueError("its layers keep no keys and values")

    def take(self, model, decoder):
        """As edd.DraftModel.take; ValueError where the target's parts are used in another way."""
        try:
            self.study(model, decoder)
        except (AttributeError, LookupError, TypeError, ValueError) as why:
            raise ValueError("EDD takes a layer of a decoder with layers, norm, rotary_emb, used "
                             f"as Llama's; {type(model).__name__} is built otherwise "
                             f"({why})") from None

    @torch.no_grad()
    def study(self, model, decoder):
        """Run the target once, for its scales and types, and to prove how it uses its parts."""
        target = self.target
        target.rotary = own_copy(decoder.rotary_emb)
        if "layer_type" in signature(target.rotary.forward).parameters:
            target.rotary = partial(target.rotary, layer_type=decoder.config.layer_types[-1])
        # hidden_states: what each layer and the norm read
        states, hooks = [], []
        for part in (*decoder.layers, decoder.norm):
            hooks.append(part.register_forward_pre_hook(lambda part, args: states.append(args[0])))
        ids = torch.arange(4, device=place_of(model))[None]
        try:
            logits = model(ids, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        states = states[-len(hooks):]                          # (some norm the embeddings, too)
        # Device and type of the drafter are those of its hidden states: weights may be quantised.
        target.like = states[self.config.hidden]
        # x = scale embed(t)
        target.embedding = model.get_input_embeddings()
        embed = Part(target.embedding, ids)
        scale = factor(embed(ids), states[0], "embeddings")
        target.embed = lambda ids: embed(ids) * scale
        # logits = cap tanh(head(scale norm(h)) / cap)
        cap = target.cap = getattr(decoder.config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.atanh(logits / cap)
        normed = Part(decoder.norm, states[-1])(states[-1])
        target.lm_head = model.get_output_embeddings()
        target.raw_head = Part(target.lm_head, normed)
        target.scale = factor(target.raw_head(normed), logits, "logits")
        target.head = lambda x: capped(target.raw_head(x * target.scale), cap)
        # The last layer, run as ours will be
        self.layer = decoder.layers[-1]
        factor(self.causal(states[-2]), states[-1], "last layer")
        del self.layer

    @torch.no_grad()
    def own(self, module):
        """As edd.DraftModel.own; scaled embeddings become a table."""
        target = self.target
        if module is target.lm_head:
            return self.own_head(module)
        if module is not target.embedding:
            return own_copy(module).to(target.like).requires_grad_(True)
        ids = torch.arange(self.config.vocab, device=target.like.device)
        return nn.Embedding.from_pretrained(target.embed(ids).to(target.like), freeze=False)

    def own_head(self, lm_head):
        """The target's head, which may be quantised: its weights are the logits of unit vectors."""
        target, width = self.target, self.config.width
        # The last vector is zero, whose logits are the bias.
        units = torch.eye(width + 1, width).to(target.like)                    # (D + 1, D)
        logits = target.raw_head(units).to(target.like)                        # (D + 1, V)
        weight, bias = (logits[:-1] - logits[-1]).T, logits[-1]
        has_bias = getattr(lm_head, "bias", None) is not None
        head = Head(width, len(bias), bias=has_bias, device="meta")
        head.weight = nn.Parameter(weight.contiguous())
        if has_bias:
            head.bias = nn.Parameter(bias)
        head.scale, head.cap = target.scale, target.cap
        return head
