"""verify.speculative inside transformers' own generate(): each of its arguments against generate() without it."""
import pytest
import torch
from conftest import ROOT
from test_verify import HandMade
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, StopStringCriteria

import cape
import pct
import verify

PROMPT = torch.tensor([[3, 1, 4]])

@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "target")

def random_llama(vocab, **more):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
                 bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **{**sizes, **more})).eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.25)
    model.generation_config = GenerationConfig(max_new_tokens=16)
    return model

@pytest.fixture(scope="module")
def model():
    return random_llama(12)

@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A model of the tokenizer's vocabulary."""
    return random_llama(len(tokenizer))

class HalfRight(HandMade):
    """Knows the text, and is right at half of its positions."""
    def __init__(self, model, **how):
        super().__init__(model.generate(PROMPT, **how)[0].tolist(), 0.5)

class Constant:
    """A drafter with the same logits (V,) after everything."""
    needs = {}

    def __init__(self, logits):
        self.logits = logits
        self.reset = self.begin = self.keep = lambda *given: None

    def expand(self, tokens, parents):
        return self.logits.repeat(len(parents), 1)

def pairs(model):
    """A callable for each of three builders."""
    return [verify.speculative(HalfRight(model, max_new_tokens=20), build) for build in (cape.chain, cape.cape, pct.pct)]

@pytest.mark.parametrize("how", [{}, dict(max_new_tokens=9), dict(max_length=11), dict(eos_token_id=[7, 2]), dict(suppress_tokens=[0, 2, 4, 6, 8, 10]),
    dict(renormalize_logits=True, remove_invalid_values=True), dict(max_time=60.0), dict(use_cache=False)])
def test_greedy_is_generates_own(model, how):
    expected = model.generate(PROMPT, **how)
    for fast in pairs(model):
        assert torch.equal(model.generate(PROMPT, custom_generate=fast, **how), expected)
        assert fast.last.tokens == expected[0, 3:].tolist() and fast.last.tau >= 1
        target = fast.target
        model.generate(PROMPT, custom_generate=fast, **how)
        assert fast.target is target, "the model is wrapped once"
    assert how or fast.last.tau > 1, "drafts are accepted"

def test_sampling_repeats_by_seed_whatever_drafts(model):
    """And ends as generate() does; other seeds give other texts."""
    how = dict(do_sample=True, temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, typical_p=0.99, epsilon_cutoff=1e-4, eta_cutoff=1e-4)
    plain = verify.speculative(None, verify.root_only)

    def sampled(fast, seed):
        torch.manual_seed(seed)
        return model.generate(PROMPT, custom_generate=fast, **how)[0].tolist()
    expected = [sampled(plain, seed) for seed in range(4)]
    assert len({tuple(text) for text in expected}) == 4
    for fast in pairs(model):
        assert [sampled(fast, seed) for seed in range(4)] == expected
    how = dict(do_sample=True, top_k=1)
    assert sampled(plain, 0) == model.generate(PROMPT)[0].tolist(), "the rule warps by generate()'s processors"

@pytest.mark.parametrize("how", [dict(temperature=0.6), dict(top_k=4), dict(temperature=0.5, top_p=0.7), dict(temperature=1.7, top_k=5, top_p=0.8)])
def test_the_rules_distribution_is_generates_own(model, how):
    own = model.generate(PROMPT, do_sample=True, output_scores=True, return_dict_in_generate=True, **{"top_k": None, **how})
    logits = model(own.sequences).logits[0, 2:-1]
    torch.testing.assert_close(verify.Sampled(**how).warp(logits), torch.cat(own.scores).softmax(-1), atol=1e-5, rtol=1e-4)

class Listener:
    def __init__(self):
        self.ids, self.ended = [], 0

    def put(self, ids):
        self.ids += ids.flatten().tolist()

    def end(self):
        self.ended += 1

def test_a_streamer_is_shown_everything_once(model):
    fast, own, ours = pairs(model)[1], Listener(), Listener()
    model.generate(PROMPT, streamer=own)
    model.generate(PROMPT, streamer=ours, custom_generate=fast)
    assert ours.ids == own.ids and ours.ended == own.ended == 1

def test_stop_strings_and_criteria_end_the_text(speaker, tokenizer):
    expected = speaker.generate(PROMPT)[0, 3:].tolist()
    word = tokenizer.decode(expected[5]).strip()
    likely = torch.zeros(len(tokenizer)).index_fill(0, torch.tensor(expected), 5.0)
    fast = verify.speculative(Constant(likely), cape.cape)
    stop = StopStringCriteria(tokenizer, [word])
    own = speaker.generate(PROMPT, stopping_criteria=[stop])
    assert torch.equal(speaker.generate(PROMPT, stopping_criteria=[stop], custom_generate=fast), own) and own.shape[1] < 3 + 16
    with pytest.raises(ValueError, match="tokenizer"):         # of transformers 5.23; when it goes, so can a line in the docstring
        speaker.generate(PROMPT, stop_strings=[word], tokenizer=tokenizer, custom_generate=fast)

def test_what_cannot_be_right_is_refused_in_a_sentence(model):
    fast = verify.speculative(None, verify.root_only)
    for ids, how, says in ((PROMPT.repeat(2, 1), {}, "2 sequences"), (PROMPT, dict(num_beams=2), "beam_search"),
            (PROMPT, dict(assistant_model=model), "assisted_generation"), (PROMPT, dict(repetition_penalty=1.2), "RepetitionPenalty"),
            (PROMPT, dict(logits_processor=[lambda ids, scores: scores]), "function"),
            (PROMPT, dict(attention_mask=torch.tensor([[0, 1, 1]])), "padding"),
            (PROMPT, dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
            (PROMPT.repeat(1, 30), {}, "context of 64")):
        with pytest.raises(verify.UserError, match=says):
            model.generate(ids, custom_generate=fast, **how)
