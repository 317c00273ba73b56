"""What real models bring along: stop strings, streams, padded vocabularies, several devices, quantised weights, the hub."""
import random
import socket
from functools import partial

import huggingface_hub
import pytest
import torch
import transformers
from conftest import plain, tiny
from test_bench import TEXT, args, check_mistake, rows_of, save, small, tokenizer_of  # noqa: F401 (small: a fixture)
from test_convert import quantised
from test_verify import oracle

import bench
import cape
import cascade
import edd
import glide
import maxgram
import pct
import verify
from runtime import load, drafters as runtime_drafters
from runtime.targets import any_target

PROMPT = [3, 1, 4, 1, 5]
BUILDS = {"cape": cape.cape, "pct": partial(pct.pct, cost=0.05, depth=5)}

def drafters_of(model):
    """Random drafters for a model, of the classes that bench.py loads."""
    torch.manual_seed(1)
    for glimpse in (True, False):
        config = runtime_drafters.glide_config(model, width=24, glimpse=glimpse)
        yield glide.Drafter(runtime_drafters.Glide.beside(model, config, 64))
    config = edd.Config.for_target(model, 2)
    draft_class, drafter_class = runtime_drafters.KINDS[config.kind]
    yield drafter_class(draft_class(config, model).to(model.device, model.dtype))

# ---------------------------------------------------------------- where the output ends, and what is streamed
class Text(transformers.TextStreamer):
    """Keeps what it would print."""
    text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text

@pytest.fixture(scope="module")
def writer():
    """A random model and a tokenizer of its 300 tokens."""
    return tiny("llama", vocab_size=300, max_position_embeddings=64), tokenizer_of(TEXT, 300)

def test_stop_strings_and_several_ends_are_transformers_own(writer):
    """Drawn cases: strings and ids out of the plain output, so that most end it, within a run of accepted tokens."""
    model, tokenizer = writer
    target, draw, ended = verify.Target(model), random.Random(0), 0
    for case in range(6):
        prompt = [draw.randrange(300) for _ in range(draw.randint(1, 8))]
        given, text = torch.tensor([prompt]), plain(model, prompt, 14)
        words = tokenizer.decode(text)
        starts = [draw.randrange(len(words)) for _ in range(draw.randint(0, 2))]
        strings = [words[i:i + draw.randint(1, 6)] for i in starts] + ["never there"]
        ends = draw.sample(text, draw.randint(0, 2)) + [0]
        eos = draw.choice([ends, torch.tensor(ends), ends[0]])
        wanted = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=14, do_sample=False, stop_strings=strings,
                                tokenizer=tokenizer, eos_token_id=eos, pad_token_id=0)[0, len(prompt):].tolist()
        streamer = Text(tokenizer, skip_prompt=True)
        stop = [transformers.EosTokenCriteria(eos), transformers.StopStringCriteria(tokenizer, strings)]
        build = oracle(target, prompt + text, draw.randint(0, 6))
        out = verify.generate(target, None, build, given, 14, stopping_criteria=stop, streamer=streamer)
        assert out.tokens == wanted, (case, strings, eos)
        assert streamer.text == tokenizer.decode(out.tokens) and sum(len(step.new) for step in out.rounds) == len(out.tokens) - 1
        ended += len(wanted) < 14
    assert 2 < ended < 6, "some end early, some do not"

# ---------------------------------------------------------------- padded vocabularies
def test_stages_of_padded_vocabularies(llama):
    """A target of 12 ids beside stages of fewer and of more: lossless, and nothing that only one side knows."""
    text, seen, stages = plain(llama, PROMPT, 16), [], []
    assert max(text) >= 9, "the target predicts what a stage does not know"
    for seed, vocab in enumerate((16, 9)):
        stages.append(any_target(tiny("llama", seed=seed, vocab_size=vocab, num_hidden_layers=2), vocab=12))
    drafter = cascade.Cascade(stages, None, 3.0, maxgram.MaxGram(), vocab=12)
    for build in (cascade.proposal, BUILDS["pct"]):
        def watched(expand, root, build=build):
            tree = build(expand, root)
            seen.extend(tree.tokens[1:].tolist())
            return tree
        assert verify.generate(verify.Target(llama), drafter, watched, PROMPT, 16).tokens == text
    sampled = verify.generate(verify.Target(llama), drafter, partial(cascade.proposal, drawn=True), PROMPT, 16, verify.Sampled(0.8))
    assert all(0 <= token < 12 for token in sampled.tokens + seen)

# ---------------------------------------------------------------- quantised weights
def test_a_quantised_target_is_plain_decodings():
    """And a drafter of the model before it was quantised is its drafter."""
    tokenizer, (before, other) = tokenizer_of(TEXT, 300), [load.fingerprint(tiny("llama", seed=seed)) for seed in (0, 1)]
    linear = [torch.nn.Linear]
    model = quantised(tiny("llama"), torch.float64, linear)
    after = load.fingerprint(model, tokenizer)
    assert not any(name.endswith("proj.weight") for name in after["probe"]) and load.same_target(before, after) and load.same_target(after, before)
    assert not load.same_target(other, after)
    text, stage = plain(model, PROMPT, 10), any_target(quantised(tiny("llama", seed=1), torch.float64, linear), vocab=12)
    for drafter in (*drafters_of(model), cascade.Cascade([stage], vocab=12)):
        assert verify.generate(any_target(model), drafter, BUILDS["cape"], PROMPT, 10).tokens == text

# ---------------------------------------------------------------- several devices
def test_spread_end_to_end(small, tmp_path):  # noqa: F811
    pytest.importorskip("accelerate", reason="accelerate is not installed: models cannot be spread over devices")
    flags = "--device auto --tree cape --drafter glide edd --limit 1 --max-new-tokens 5".split()
    assert bench.main(args(small, *flags, "--json", str(tmp_path / "r.jsonl"))) == 0
    assert all(row["lossless"] for row in rows_of(tmp_path / "r.jsonl") if row["tree"])

def test_without_accelerate_one_is_told_so(small, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(transformers.utils, "is_accelerate_available", lambda: False)
    check_mistake(args(small, "--device", "auto"), "--device auto needs accelerate", capsys)

# ---------------------------------------------------------------- the hub
def refusal(kind):
    """An error of the hub's, without an answer of a server."""
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error

def test_the_hub_is_asked_once_and_why_a_model_cannot_be_loaded_is_said(small, monkeypatch, capsys):  # noqa: F811
    """A gated model says so; without a network what is missing is, and not what is wrong with a model that is here."""
    argv = args(small, "--revision", "v9", "--target", "some/model")
    answer, loading, asked = [None], [OSError("no such file")], []

    def model_info(name, revision, timeout):
        asked.append((name, revision))
        if answer[0]:
            raise answer[0]

    def from_pretrained(*_, **__):
        raise loading[0]

    def nobody(*_, **__):
        raise AssertionError("the network was asked again")
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    with monkeypatch.context() as alone:
        alone.setattr(socket, "getaddrinfo", nobody)
        for answer[0], words in ((refusal(huggingface_hub.errors.RepositoryNotFoundError), "the hub has no some/model"),
                                 (refusal(huggingface_hub.errors.RevisionNotFoundError), "the hub has no some/model at revision v9"),
                                 (ConnectionError("no network"), "the hub cannot be reached, and it was not loaded before")):
            check_mistake(argv, words, capsys)
    assert asked == 3 * [("some/model", "v9")]
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    gated = OSError("a gated repo.\nmore")
    gated.__cause__ = refusal(huggingface_hub.errors.GatedRepoError)
    for loading[0], answer[0], words in (
            (gated, None, "(it is gated): accept its terms"),
            (OSError("no such file"), None, "(OSError: no such file)"),
            (OSError("no such file"), ConnectionError(), "it was not loaded before")):
        check_mistake(argv, words, capsys)

def test_how_a_model_is_loaded_reaches_transformers(small, monkeypatch):  # noqa: F811
    """Also to a class without PyTorch's attention, which is asked for its eager one."""
    given, loaded = [], transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(*name, **how):
        given.append(how)
        if how["attn_implementation"] == "sdpa":
            raise ValueError("it does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention yet")
        return loaded(*name, **how)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for more, revision, trust in ((["--revision", "v9", "--trust-remote-code"], "v9", True), ([], None, False)):
        run = bench.Run(args(small, "--drafter", "maxgram", "--dtype", "auto", *more))
        assert [how["attn_implementation"] for how in given[-2:]] == ["sdpa", "eager"] and run.model.config._attn_implementation == "eager"
        assert given[-1]["revision"] == revision and given[-1]["trust_remote_code"] is trust and run.model.dtype == torch.float32
