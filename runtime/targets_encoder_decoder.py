"""An encoder-decoder target, such as FLAN-T5 (Cascade Speculative Drafting, section 5.2).

For runtime/targets.py, which takes this class over.
"""
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from verify import CHUNK, Target, UserError

class EncoderDecoder(Target):
    """An encoder-decoder target, or a stage of a cascade.  It verifies chains only.

    The encoder reads the prompt once; the decoder begins with its start token.  A drafter finds the
    prompt in the first view, as view.source.
    """
    encoder_decoder, verifies_trees = True, False

    def capture(self, needs):
        """As Target.capture; the decoder's hidden states are not available."""
        if needs.get("hidden"):
            raise UserError(f"{type(self.model).__name__} is an encoder-decoder, and this drafter "
                            "reads hidden states of a decoder-only target: take a cascade")
        super().capture(needs)

    def remaining(self, ids):
        """The prompt takes no position of the decoder; its start token takes one."""
        return self.capacity

    def prefill(self, ids, new_tokens=0):
        """Encode the prompt and reserve cache for new_tokens -> logits (V,) of the first token."""
        self.encode(ids)
        self.source = ids                                        # for the first view
        self.cache.reserve(1 + new_tokens + CHUNK)
        start = self.model.generation_config.decoder_start_token_id
        return self.sync([start])[-1]

    def encode(self, ids):
        """Run the encoder over ids (list), and empty the decoder's cache."""
        self.reset()
        ids = torch.tensor([ids], device=self.device)
        encoder = self.model.get_encoder()
        self.encoded = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        # run() sets the first cache, of self-attention.  The model's first decoder step fills the
        # second, of cross-attention, with the keys and values of what the encoder returned.
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward, of a chain."""
        chain = list(range(-1, len(tokens) - 1))
        if parents is not None and parents.tolist() != chain:
            raise UserError(f"{type(self.model).__name__} verifies chains only (its decoder counts "
                            "positions by the cache, not by depth in a tree): use --tree chain")
        return super().forward(tokens, parents, logits_to_keep)

    def run(self, keys, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run, without hidden states.  The decoder makes a chain's positions and mask."""
        self.caches.self_attention_cache = self.cache.step(slots, keys)
        out = self.model(encoder_outputs=self.encoded, decoder_input_ids=tokens[None],
                         past_key_values=self.caches, use_cache=True)
        return [out.logits[0, -logits_to_keep:]]

    def view(self, root=None):
        """As Target.view; the first view of a decoding has the prompt as its source."""
        source = self.source
        self.source = None
        return super().view(root)._replace(source=source)
