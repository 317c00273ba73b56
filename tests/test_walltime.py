"""Growth keeps the function of targets and drafters; what walltime.py counts is counted by hand."""
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, plain
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import cape
import edd
import glide
import pct
import verify

sys.path.insert(0, str(ROOT / "figures"))

import grow  # noqa: E402
import walltime  # noqa: E402
from grow import Shape  # noqa: E402

VOCAB, CONTEXT = 20, 64
OWN = json.loads((ROOT / "checkpoints" / "target" / "config.json").read_text())     # the stand-in's
SMALL = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4,
             max_position_embeddings=CONTEXT, rms_norm_eps=1e-3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# Every way of growing, alone and together; heads of 4 become heads of 4, 8 and 12.
SHAPES = {
    "as it is": Shape(5, 16, 4, 24, VOCAB), "wider": Shape(5, 24, 4, 24, VOCAB), "deeper": Shape(7, 16, 4, 24, VOCAB),
    "larger heads": Shape(5, 32, 8, 24, VOCAB), "vocabulary": Shape(5, 20, 4, 32, 37), "all": Shape(6, 48, 12, 40, 50)}


def drawn(module, seed):
    """Random weights, large enough that no distribution is flat, norms and their signs among them."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.requires_grad_(False).normal_(0, 0.3, generator=generator)
        if p.ndim == 1:
            p += 1
    return module


class Norm(nn.Module):
    """RMSNorm as transformers computes it, but in the type of its input: theirs rounds to float32."""

    def __init__(self, like):
        super().__init__()
        self.weight, self.variance_epsilon = like.weight, like.variance_epsilon

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


def exact(model):
    """The model without its roundings to float32."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, Norm(child))
    return model


@pytest.fixture(scope="module")
def small():
    """A target in float64, with a GLIDE and an EDD."""
    model = exact(drawn(LlamaForCausalLM(LlamaConfig(**SMALL)).double().eval(), 0))
    config = glide.Config.for_target(model, 12)
    config.eps = 1e-3
    draft = drawn(glide.Glide(config, glide.target_angles(model, 200)), 1).double()
    return model, draft, drawn(edd.EDD(edd.Config.for_target(model), model), 2)


def grown(small, name):
    model, draft, effective = small
    big = exact(grow.grow(model, SHAPES[name], CONTEXT))
    wide = grow.grow_glide(draft, big, 200)
    return big, wide, exact(grow.grow_edd(effective, big))


def test_random_weights_of_one_model_do_not_leak_into_another(small):
    """Growth reads the small model, and leaves it as it is."""
    before = {name: w.clone() for part in small for name, w in part.state_dict().items()}
    grown(small, "all")
    after = {name: w for part in small for name, w in part.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", SHAPES)
def test_growth_keeps_logits_and_text(small, name):
    model, shape = small[0], SHAPES[name]
    big = grown(small, name)[0]
    assert [tuple(p.shape) for p in (big.lm_head.weight, big.model.layers[0].mlp.up_proj.weight, big.model.layers[-1].self_attn.q_proj.weight)] == [
        (shape.vocab, shape.width), (shape.feed_forward, shape.width), (shape.width, shape.width)]
    assert len(big.model.layers) == shape.layers
    ids = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        said, found = model(ids).logits, big(ids).logits
    torch.testing.assert_close(found[..., :VOCAB], said, atol=1e-6, rtol=0)          # (angles are float32's)
    # A further token has next to no probability, and never the largest.
    assert found.softmax(-1)[..., VOCAB:].sum(-1).max() < 1e-9 if shape.vocab > VOCAB else found.shape == said.shape
    assert verify.generate(verify.Target(big), None, verify.no_draft, PROMPT, 30).tokens == plain(model, PROMPT, 30)


@pytest.mark.parametrize("name", SHAPES)
def test_grown_drafters_draft_the_same(small, name):
    """Every row that they give to a tree, round by round, and the tokens of the rounds."""
    def drafts(model, kind, draft_model, build):
        said = []

        def listened(expand, root):
            tree = build(expand, root)
            said.append((tree.tokens.tolist(), tree.parents.tolist()))
            return tree
        drafter = kind.Drafter(draft_model)
        expand = drafter.expand
        rows = []
        drafter.expand = lambda tokens, parents: rows.append(expand(tokens, parents)[:, :VOCAB]) or rows[-1]
        out = verify.generate(verify.Target(model, vocab=VOCAB), drafter, listened, PROMPT, 24)
        return said, rows, out.tokens, out.runs

    big = grown(small, name)
    for part, kind in ((1, glide), (2, edd)):
        for build in (cape.cape, pct.pct):
            trees, rows, *out = drafts(small[0], kind, small[part], build)
            trees_of_big, rows_of_big, *out_of_big = drafts(big[0], kind, big[part], build)
            assert trees_of_big == trees and out_of_big == out
            for x, y in zip(rows, rows_of_big, strict=True):
                torch.testing.assert_close(y, x, atol=1e-5, rtol=0)


def test_a_grown_drafter_is_as_wide_as_its_target(small):
    model, wide, effective = grown(small, "all")
    assert (wide.config.width, wide.config.heads, wide.config.vocab, wide.config.layers_read) == (48, 4, 50, (5,))
    assert effective.config.hidden == 3 and effective.layer.mlp.down_proj.weight.shape == (48, 40)


def test_the_check_refuses_another_function(small):
    model, big = small[0], grown(small, "all")[0]
    grow.check(model, big, PROMPT)
    weight = big.model.layers[3].self_attn.q_proj.weight
    weight.data *= 1.1
    with pytest.raises(verify.UserError, match="nothing is timed"):
        grow.check(model, big, PROMPT)
    weight.data /= 1.1
    big.lm_head.weight.data[30] = 2 * big.lm_head.weight.data[:VOCAB].max(0).values      # a further token that wins somewhere
    big.lm_head.weight.data[30, 16] = 3000
    with pytest.raises(verify.UserError, match="nothing is timed"):
        grow.check(model, big, PROMPT)


def test_a_context_grows_and_never_shrinks(small):
    model = grow.grow(small[0], SHAPES["wider"], 3 * CONTEXT)
    assert verify.Target(model).context == 3 * CONTEXT and verify.Target(grown(small, "wider")[0]).context == CONTEXT
    assert verify.Target(grow.grow(small[0], SHAPES["wider"], 5)).context == CONTEXT


def test_half_precision_casts_weights_and_no_angles(small):
    model = grow.cast(grow.grow(small[0], SHAPES["all"]), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype != torch.bfloat16


# ---------------------------------------------------------------- counts
def test_bytes_of_a_step_by_hand():
    """Width 8, heads of 4, feed-forward 6, three layers, 10 tokens, in float16."""
    config = LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=6, num_hidden_layers=3, num_attention_heads=2,
                         num_key_value_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).half()
    layer = 4 * 8 * 8 + 3 * 8 * 6 + 2 * 8
    weights = 3 * layer + 8 + 10 * 8 + 8                     # the last norm, the head, one embedding
    assert walltime.step_bytes(model, 0) == 2 * weights
    assert walltime.step_bytes(model, 100) == 2 * (weights + 3 * 2 * 8 * 100)
    assert walltime.step_bytes(model.float(), 1.5) == 4 * (weights + 3 * 2 * 8 * 1.5)


def test_a_7b_step_reads_what_llama_2_7b_is_known_to_have():
    """6 738 415 616 parameters, of which all embeddings but one are left out; half a megabyte of keys and values a token."""
    shape = grow.LLAMA_7B
    config = LlamaConfig(vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.feed_forward, num_hidden_layers=shape.layers,
                         num_attention_heads=32, num_key_value_heads=32, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).half()
    assert model.num_parameters() == 6_738_415_616 and shape.width // shape.head == 32
    assert walltime.step_bytes(model, 0) == 2 * (6_738_415_616 - 31999 * 4096)
    assert walltime.step_bytes(model, 1024) - walltime.step_bytes(model, 0) == 1024 * 512 * 1024


def test_bandwidth_counts_a_byte_twice(monkeypatch):
    monkeypatch.setitem(walltime.COPY, "cpu", 3000)
    monkeypatch.setattr(walltime, "medians", lambda cuda, works, turns: dict.fromkeys(works, 0.5))
    assert walltime.bandwidth("cpu", 1) == 2 * 3000 / 0.5


def test_medians_leave_out_the_first_turn(monkeypatch):
    clock = iter(range(100))
    took = {"a": [100.0, 1.0, 9.0, 2.0], "b": [50.0, 3.0, 3.0, 4.0]}
    calls = []

    class Watch:
        def __init__(self, cuda):
            self.total = {}

        def mark(self, what):
            self.total[what] = took[calls[-1]][next(clock) // 2] * walltime.REPEATS

        def settle(self):
            pass
    monkeypatch.setattr(walltime.bench, "Record", Watch)
    found = walltime.medians(False, {name: lambda name=name: calls.append(name) for name in took}, 3)
    assert found == {"a": 2.0, "b": 3.0}
    assert calls == (["a"] * walltime.REPEATS + ["b"] * walltime.REPEATS) * 4


@pytest.mark.parametrize("length", [1, 2, 5, 9, 10, 23])
def test_prompts_end_with_their_own(length):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    circle = [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert walltime.prompt_of(prompts, 1, length) == (circle * 3)[-length:]
    assert walltime.prompt_of(prompts, 2, 6) == [4, 5, 6, 7, 8, 9]


# ---------------------------------------------------------------- the command
def test_shapes_of_the_flags(small):
    """The stand-in is `small` here, its GLIDE one of width 12 and three heads."""
    def shape(name, layers=None, width=None):
        parts = SimpleNamespace(models=[small[0]], glide=SimpleNamespace(model=small[1]))
        return walltime.named_shape(SimpleNamespace(layers=layers, width=width), parts, name)
    assert shape("7b") == (32, 4096, 128, 11008, 32000) and shape("standin") == (5, 16, 4, 24, 20)
    assert shape("7b", 14, 2048) == (14, 2048, 128, 5504, 32000) and shape("small") == (6, 16, 4, 24, 22)
    assert shape("standin", 20) == (20, 16, 4, 24, 20) and shape("small", width=33) == (6, 36, 4, 54, 22)
    for wrong in (dict(layers=4), dict(width=8)):
        with pytest.raises(verify.UserError, match="take --layers 5 or more, --width 16 or more"):
            shape("small", **wrong)
    with pytest.raises(verify.UserError, match="--width 384 or more"):
        shape("7b", width=256)


@pytest.mark.parametrize("argv, words", [
    ([], "no CUDA device is available here"), (["--device", "cpu", "--shape", "small", "--turns", "0"], "at least 1"),
    (["--device", "cpu", "--shape", "small", "--layers", "3"], f"--layers {OWN['num_hidden_layers']} or more"), (["--shape", "13b"], "13b")])
def test_mistakes_are_one_sentence(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert walltime.main([*argv, "--json", str(tmp_path / "x.jsonl")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("figures/walltime.py: ") and err.count("\n") == 1 and words in err
    assert not (tmp_path / "x.jsonl").exists()


def test_a_run_writes_lines_that_json_reads(tmp_path, capsys, monkeypatch):
    """On a CPU, whole: the shipped weights, grown; every arm gives plain decoding's tokens, and so does transformers' generate()."""
    monkeypatch.setattr(walltime, "NODES", (1, 2, 4))
    monkeypatch.setattr(walltime, "REPEATS", 1)
    path = tmp_path / "x.jsonl"
    argv = ["--device", "cpu", "--shape", "small", "--dtype", "float32", "--context", "24", "40", "--new-tokens", "8", "--turns", "1"]
    assert walltime.main([*argv, "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    vocab = OWN["vocab_size"] + OWN["vocab_size"] // 8
    assert len(lines) == 2 * (7 + 2 + 3) and {line["context"] for line in lines} == {24, 40}
    for line in lines:
        assert (line["shape"], line["dtype"], line["graphs"], line["turns"], line["vocab"]) == ("small", "float32", False, 1, vocab)
        assert line["versions"].keys() >= {"torch", "transformers"} and line["device"] == "cpu" and line["copy_bytes_per_second"] > 0
    decoded = [line for line in lines if line["what"] == "decode"]
    assert [(line["drafter"], line["tree"]) for line in decoded[:7]] == [
        ("plain", None), ("generate()", None), ("glide", "chain"), ("glide", "cape"), ("edd", "pct"), ("cascade", "chain"), ("maxgram", "chain")]
    assert all(line["lossless"] is True and line["tokens"] == 8 and line["tokens_per_second"] > 0 for line in decoded)
    assert all(line["tau"] > 1.3 for line in decoded[2:6])   # grown drafters know the text
    for line in decoded[::7]:
        assert line["speedup_decoding"] == 1 and line["bandwidth_share"] == pytest.approx(line["limit_ms"] / line["ms_per_token"])
        assert line["limit_ms"] == pytest.approx(1e3 * line["bytes"] / line["copy_bytes_per_second"])
    # Rows of one layer more, of 288 keys and as many values, four bytes each
    assert decoded[7]["bytes"] - decoded[0]["bytes"] == (40 - 24) * (OWN["num_hidden_layers"] + 1) * 2 * 288 * 4
    steps = [line for line in lines if line["what"] == "step"]
    assert [line["drafter"] for line in steps] == ["glide", "edd"] * 2 and all(line["ratio"] > 0 for line in steps)
    verified = [line for line in lines if line["what"] == "verify"]
    assert [line["nodes"] for line in verified] == [1, 2, 4] * 2 and verified[0]["ratio"] == 1
    assert "small float32, context 40, graphs False" in capsys.readouterr().out
