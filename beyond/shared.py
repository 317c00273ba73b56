"""EDD and the VDM between the target's own embedding and LM head: for large vocabularies.

The drafters are those of Effective Draft Decoder with Pruned Candidate Tree (ACL 2025, section 3.1
and appendix A), which edd.py holds; sharing both tables is EAGLE's way (arXiv 2401.15077) and
LongSpec's (arXiv 2502.17421).

The idea.  EDD trains copies of the target's embedding and head.  Beside a small target with a large
vocabulary they are nearly all of it: of an EDD beside SmolLM2-135M (49 152 ids, width 576) 56.6M of
60.2M weights.  Here both tables stay the target's.  One layer learns, and is all that is saved.

    paper              shape      name here
    T, H               edd.py     ids, hidden
    embedding          (V, D)     Shared.embed: the target's, frozen; then `projection`
    LM head            (D, V)     Shared.head: the target's, frozen

Differences from the paper: this one; the norm starts as the target's last; where the target's two
tables are one, a matrix stands behind the embedding (difference 4 of beyond/longspec.py); those of
edd.py.

Alone in a project: this file, beyond/longspec.py, glide.py, edd.py, a Llama, Mistral or Qwen2, a
drafter from train.py.

    drafter, _ = edd.load("my-edd", model, Shared)               # then as in edd.py

    python -m beyond.shared       # the demo: nothing of the target learns; decoding equals training
    python train.py edd-shared vdm-shared
"""
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import edd
from beyond.longspec import is_tied, rotation

# Names for train.py
VARIANTS = {
    "edd-shared": {},
    "vdm-shared": {"encoding": False},
}


@dataclass
class Config(edd.Config):
    """edd.Config, for drafters without tables of their own."""
    kind: str = "edd-shared"
    projected: bool = False          # a matrix behind the embedding, as in beyond/longspec.py

    @classmethod
    def for_target(cls, model, hidden=edd.HIDDEN, **more):
        """As edd.Config.for_target; projected where the target's tables are one."""
        return super().for_target(model, hidden, projected=is_tied(model), **more)


class Shared(edd.EDD):
    """The draft model: a fresh layer and norm between the target's embedding and head."""
    config_class = Config

    def __init__(self, config, model):
        edd.DraftModel.__init__(self, config, model)
        self.layer = self.fresh_layer(model)
        # The head was trained with this norm before it: so it starts, and then it learns.
        self.norm = self.own(model.get_decoder().norm)
        self.projection = rotation(config.width) if config.projected else torch.nn.Identity()
        self.projection.to(self.target.like)

    def take(self, model, decoder):
        """As edd.DraftModel.take, with the target's embedding and head."""
        super().take(model, decoder)
        self.target.embed = model.get_input_embeddings()
        weight = model.get_output_embeddings().weight.detach()
        self.target.head = partial(F.linear, weight=weight)

    def embed(self, ids):
        """ids (...) -> (..., D), in the type of the drafter; the target's part gets no gradient"""
        with torch.no_grad():
            x = self.target.embed(ids).to(next(self.layer.parameters()).dtype)
        return self.projection(x)

    def head(self, x):
        """x (..., D) -> logits (..., V)"""
        return self.target.head(x)


def main():
    """A tiny target: only layer and norm get gradients, and decoding equals training."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=6, num_attention_heads=4)
    target = LlamaForCausalLM(config).double()
    model = Shared(Config.for_target(target), target)
    assert not any("embed" in name or "head" in name for name in model.state_dict())
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.arange(15)
    states = target(ids[None], output_hidden_states=True).hidden_states
    hidden = states[model.config.hidden].detach()              # (1, 15, D)
    trained = model.head(model(ids[None], hidden, 5))[0]       # (15, V)
    trained.sum().backward()
    assert all(p.grad is None for p in target.parameters())
    # Ten tokens are committed.  The last block of five is drafted.
    drafter = edd.Drafter(model)
    known = {model.config.hidden: hidden[0, :10]}
    drafter.begin(SimpleNamespace(tokens=ids[:10], length=10, hidden=known))
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])       # (5, V)
    error = (drafted - trained[10:].detach()).abs().max()
    assert error < 1e-9, error
    print(f"the target's tables, a layer of our own: difference {error:.0e}")


if __name__ == "__main__":
    main()
