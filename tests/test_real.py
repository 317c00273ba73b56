"""What real models bring along: padded vocabularies, stop strings, streams, several devices, quantised weights, the hub."""
import json
import random
import shutil
import socket
from functools import partial

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, plain, tiny
from test_bench import TEXT, args, check_mistake, rows_of, save, small, tokenizer_of  # noqa: F401 (small: a fixture)
from test_edd import random_edd
from test_glide import random_drafter

import bench
import cape
import cascade
import edd
import maxgram
import pct
import train
import verify

PROMPT = [3, 1, 4, 1, 5]
BUILDS = {"chain": cape.chain, "cape": cape.cape, "pct": partial(pct.pct, cost=0.05, depth=5),
          "eagle2": partial(pct.eagle2, total=15, depth=5, expanded=4)}


def oracle_of(target, prompt, text, most=5):
    """A builder whose chains are always right."""
    def build(expand, root):
        at = target.cache.length - len(prompt) + 1
        line = text[at:at + most]
        return verify.Tree(torch.tensor([root.item(), *line]), torch.arange(-1, len(line)))
    return build


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
    for case in range(40):
        prompt = [draw.randrange(300) for _ in range(draw.randint(1, 8))]
        text = plain(model, prompt, 30)
        words = tokenizer.decode(text)
        starts = [draw.randrange(len(words)) for _ in range(draw.randint(0, 2))]
        strings = [words[i:i + draw.randint(1, 6)] for i in starts] + ["never there"]
        ends = draw.sample(text, draw.randint(0, 2)) + [0]
        eos = draw.choice([ends, torch.tensor(ends), ends[0], None])
        wanted = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=30, do_sample=False,
                                stop_strings=strings, tokenizer=tokenizer, eos_token_id=eos, pad_token_id=0)[0, len(prompt):].tolist()
        streamer = Text(tokenizer, skip_prompt=True)
        out = verify.generate(target, None, oracle_of(target, prompt, text, draw.randint(0, 6)), prompt, 30, eos_token_id=eos,
                              stop_strings=strings, tokenizer=tokenizer, streamer=streamer)
        assert out.tokens == wanted, (case, strings, eos)
        assert streamer.text == tokenizer.decode(out.tokens)
        assert sum(out.runs) == len(out.tokens) - 1
        ended += len(wanted) < 30
    assert 20 < ended < 40, "some end early, some do not"


def test_any_streamer_gets_the_prompt_and_every_token(writer):
    model, tokenizer = writer
    target, prompt = verify.Target(model), [5, 6, 7]
    text = plain(model, prompt, 30)

    class Kept(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.put_in, self.ended = [], 0

        def put(self, value):
            self.put_in.append(value)

        def end(self):
            self.ended += 1
    kept = Kept()
    out = verify.generate(target, None, oracle_of(target, prompt, text, 4), prompt, 30, streamer=kept)
    assert kept.put_in[0].tolist() == [prompt] and torch.cat(kept.put_in[1:]).tolist() == out.tokens == text and kept.ended == 1
    assert len(kept.put_in) == 2 + len(out.runs), "each accepted run at once"
    stream = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    verify.generate(target, None, oracle_of(target, prompt, text, 4), prompt, 30, streamer=stream)
    assert "".join(stream) == tokenizer.decode(text)


def test_time_that_is_over_ends_the_output_at_a_token(writer, monkeypatch):
    model, _ = writer
    target, clock = verify.Target(model), [0.0]
    text = plain(model, PROMPT, 30)
    build = oracle_of(target, PROMPT, text, 4)
    monkeypatch.setattr(verify.stopping_criteria.time, "time", lambda: clock[0])
    assert verify.generate(target, None, build, PROMPT, 30, max_time=100).tokens == text

    def slow(expand, root):
        clock[0] += 60
        return build(expand, root)
    assert verify.generate(target, None, slow, PROMPT, 30, max_time=100).tokens == text[:1 + 5 + 1], "in the second round"


def test_arguments_are_transformers_own(writer):
    """What a tokenizer returns goes in as it is; what cannot be done is said."""
    model, tokenizer = writer
    target = verify.Target(model)
    given = tokenizer("def add(", return_tensors="pt")
    wanted = plain(model, given["input_ids"][0].tolist(), 9)
    generate = partial(verify.generate, target, None, verify.no_draft)
    assert generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=9).tokens == wanted
    assert generate(**given, max_new_tokens=9, temperature=0.7, do_sample=False).tokens == wanted
    for more, words in (({"attention_mask": torch.tensor([[0, 1]])}, "attention_mask hides tokens"),
                        ({"do_sample": True}, "do_sample=True with temperature 0"), ({"stop_strings": "a"}, "need the tokenizer")):
        with pytest.raises(verify.UserError, match=words):
            generate(**{"input_ids": [1, 2], "max_new_tokens": 9, **more})
    with pytest.raises(verify.UserError, match="give one sequence"):
        generate(input_ids=torch.ones(2, 3, dtype=torch.long))


# ---------------------------------------------------------------- padded vocabularies
def padded(vocab, seed, layers=2):
    return tiny("llama", seed=seed, vocab_size=vocab, num_hidden_layers=layers)


@pytest.mark.parametrize("vocabs", [(16, 9), (9, 16), (9,), (16,)])
@pytest.mark.parametrize("gram", [False, True])
def test_stages_of_padded_vocabularies(llama, vocabs, gram):
    """A target of 12 ids beside stages of fewer and of more: lossless, and nothing that only one side knows."""
    text, seen = plain(llama, PROMPT, 30), []
    assert max(text) >= 9, "the target says what a stage does not know"
    models = [padded(vocab, seed, 3 - seed) for seed, vocab in enumerate(vocabs)]
    more = maxgram.MaxGram() if gram else None
    for lenience in (1.0, 3.0):
        drafter = cascade.Cascade(models, None, lenience, more, vocab=12)
        for build in (cascade.proposal, cape.cape, BUILDS["pct"]):
            def watched(expand, root):
                tree = build(expand, root)
                seen.extend(tree.tokens[1:][tree.parents[1:] >= 0].tolist())
                return tree
            assert verify.generate(verify.Target(llama), drafter, watched, PROMPT, 30).tokens == text
        drawn = verify.generate(verify.Target(llama), drafter, partial(cascade.proposal, drawn=True), PROMPT, 30, temperature=0.8)
        assert all(0 <= token < 12 for token in drawn.tokens)
    if not gram:
        assert max(seen) < min(12, max(vocabs))


def test_a_padded_drafter_proposes_what_both_know(llama):
    """GLIDE with fewer or more rows than the target; its own part of the vocabulary is all that it is shown and asked for."""
    text = plain(llama, PROMPT, 30)
    for vocab in (9, 16):
        drafter = random_drafter(llama)
        model = drafter.model
        model.config.vocab = vocab
        model.embed = torch.nn.Embedding(vocab, model.config.width).double()
        model.head = torch.nn.Linear(model.config.width, vocab, bias=False).double()
        drafter = type(drafter)(model)
        seen = []
        for name, build in BUILDS.items():
            def watched(expand, root):
                def asked(tokens, parents):
                    rows = expand(tokens, parents)
                    assert rows.shape[1] == 12 and rows[:, vocab:].sum() == 0
                    return rows
                tree = build(asked, root)
                seen.extend(tree.tokens[1:][tree.parents[1:] >= 0].tolist())
                return tree
            assert verify.generate(verify.Target(llama), drafter, watched, PROMPT, 30).tokens == text, name
        assert max(seen) < min(12, vocab)


def test_a_padded_pair_end_to_end(small, tmp_path, capsys):  # noqa: F811
    """One tokenizer, 300 tokens; target and stage have 300 and 320 rows."""
    tokenizer = tokenizer_of(TEXT, 300)
    save(tmp_path / "wide", tiny("llama", seed=1, vocab_size=320, num_hidden_layers=2, max_position_embeddings=64).float(), tokenizer)
    argv = args(small, "--drafter", f"cascade({tmp_path / 'wide'}, maxgram)", "--tree", "chain", "cape", "--json", str(tmp_path / "r.jsonl"))
    assert bench.main(argv) == 0
    assert "transformers wants equal vocabularies" in capsys.readouterr().out
    rows = rows_of(tmp_path / "r.jsonl")
    assert [row["lossless"] for row in rows if row["tree"]] == [True, True]
    assert not any("assisted" in row["drafter"] for row in rows)


# ---------------------------------------------------------------- quantised weights
class Int8Linear(torch.nn.Module):
    """As quantising libraries put in the place of a linear layer: its weight is not floating."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)


def quantised(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_a_quantised_target_is_plain_decodings(name):
    model = quantised(tiny(name))
    assert not any(p.is_floating_point() for p in model.model.layers[0].mlp.parameters())
    text = plain(model, PROMPT, 30)
    drafters = [random_drafter(model), random_drafter(model, glimpse=False), cascade.Cascade([quantised(tiny(name, seed=1))], vocab=12)]
    for drafter in drafters:
        for tree, build in BUILDS.items():
            assert verify.generate(verify.Target(model), drafter, build, PROMPT, 30).tokens == text, tree


def test_a_drafter_of_the_model_before_it_was_quantised_is_its_drafter():
    model, tokenizer = tiny("llama"), tokenizer_of(TEXT, 300)
    before = train.fingerprint(model, tokenizer)
    after = train.fingerprint(quantised(model), tokenizer)
    assert after["probe"].keys() < before["probe"].keys() and train.same_target(before, after) and train.same_target(after, before)
    assert not train.same_target(before, train.fingerprint(quantised(tiny("llama", seed=1)), tokenizer))


# ---------------------------------------------------------------- several devices
@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A target whose layers lie in memory and on the disk, as device_map spreads what does not fit."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: models cannot be spread over devices")
    folder = tmp_path_factory.mktemp("spread")
    model = tiny("llama", vocab_size=300, max_position_embeddings=64).float()
    save(folder / "model", model, tokenizer_of(TEXT, 300))
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
             "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    found = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", device_map=parts, offload_folder=folder / "off", dtype=torch.float32)
    assert found.model.layers[1].mlp.up_proj.weight.is_meta and not found.model.layers[0].mlp.up_proj.weight.is_meta
    return model, found.eval()


def test_a_target_on_disk_decodes_as_one_in_memory(spread):
    model, found = spread
    text = plain(model, PROMPT, 25)
    target = verify.Target(found)
    drafters = [None, random_drafter(model), edd.Drafter(random_edd(model)), cascade.Cascade([padded(300, 1).float()], vocab=300)]
    for drafter in drafters:
        for name, build in BUILDS.items() if drafter else {"plain": verify.no_draft}.items():
            assert verify.generate(target, drafter, build, PROMPT, 25).tokens == text, name
    assert train.same_target(train.fingerprint(model), train.fingerprint(found))


def test_spread_end_to_end(small, tmp_path):  # noqa: F811
    pytest.importorskip("accelerate", reason="accelerate is not installed: models cannot be spread over devices")
    argv = args(small, "--tree", "cape", "--drafter", "glide", "edd", "--json", str(tmp_path / "r.jsonl"))
    argv[argv.index("--device") + 1] = "auto"
    assert bench.main(argv) == 0
    assert all(row["lossless"] for row in rows_of(tmp_path / "r.jsonl") if row["tree"])


def test_without_accelerate_one_is_told_so(small, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(transformers.utils, "is_accelerate_available", lambda: False)
    argv = args(small)
    argv[argv.index("--device") + 1] = "auto"
    check_mistake(argv, "--device auto needs accelerate", capsys)


# ---------------------------------------------------------------- the hub
def refusal(kind):
    """An error of the hub's, without an answer of a server."""
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error


@pytest.mark.parametrize("error, words", [
    (huggingface_hub.errors.RepositoryNotFoundError, "the hub has no some/model"),
    (huggingface_hub.errors.RevisionNotFoundError, "the hub has no some/model at revision v9"),
    (ConnectionError, "the hub cannot be reached, and it was not loaded before")])
def test_the_hub_is_asked_once(small, monkeypatch, capsys, error, words):  # noqa: F811
    asked = []

    def model_info(name, revision, timeout):
        asked.append((name, revision))
        raise refusal(error)

    def nobody(*_, **__):
        raise AssertionError("the network was asked again")
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    argv = args(small, "--revision", "v9")
    argv[1] = "some/model"
    check_mistake(argv, words, capsys)
    assert asked == [("some/model", "v9")]


def loading(monkeypatch, error, cause=None):
    """The hub answers, or does not; then transformers says `error`."""
    def refuse(*_, **__):
        raise error from cause
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)


@pytest.mark.parametrize("reached", [True, False])
def test_why_a_model_of_the_hub_cannot_be_loaded(small, monkeypatch, capsys, reached):  # noqa: F811
    """A gated one says so; without a network what is missing is, and not what is wrong with a model that is here."""
    def model_info(*_, **__):
        if not reached:
            raise ConnectionError("no network")
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    argv = args(small)
    argv[1] = "some/model"
    loading(monkeypatch, OSError("a gated repo.\nmore"), refusal(huggingface_hub.errors.GatedRepoError))
    check_mistake(argv, "(it is gated): accept its terms on huggingface.co/some/model, and `hf auth login`", capsys)
    loading(monkeypatch, ValueError("it needs remote code"))
    check_mistake(argv, "cannot be loaded (ValueError: it needs remote code)", capsys)
    loading(monkeypatch, OSError("no such file"))
    check_mistake(argv, "(OSError: no such file)" if reached else "it was not loaded before", capsys)


def test_a_drafter_of_before_weights_had_names_is_refused(small, tmp_path, capsys):  # noqa: F811
    shutil.copytree(small / "drafters" / "glide", tmp_path / "glide")
    about = json.loads((tmp_path / "glide" / "training.json").read_text())
    about["target"]["probe"] = list(about["target"]["probe"].values())
    (tmp_path / "glide" / "training.json").write_text(json.dumps(about))
    argv = args(small)
    argv[argv.index("--checkpoint") + 1] = str(tmp_path)
    check_mistake(argv, "was made for another target: train one for this", capsys)


def test_how_a_model_is_loaded_reaches_transformers(small, monkeypatch):  # noqa: F811
    given = []
    load = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **how: given.append(how) or load(*_, **how))
    run = bench.Run(args(small, "--dtype", "auto", "--revision", "v9", "--trust-remote-code"))
    assert given[0]["revision"] == "v9" and given[0]["trust_remote_code"] is True and run.model.dtype == torch.float32
    given.clear()
    run = bench.Run(args(small))
    assert given[0]["trust_remote_code"] is False and given[0]["revision"] is None
