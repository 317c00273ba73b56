"""Growth keeps the function of targets and drafters; what figures/walltime.py counts is counted by hand."""
import json

import growth
import pytest
import torch
import walltime
from conftest import plain
from growth import Shape
from transformers import LlamaConfig, LlamaForCausalLM

import cape
import edd
import glide
import pct
import verify

VOCAB, CONTEXT = 20, 64
SMALL = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4,
             max_position_embeddings=CONTEXT, rms_norm_eps=1e-3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# No growth, and every way of growing; heads of 4 become heads of 8 and 12.
SHAPES = {"as it is": Shape(5, 16, 4, 24, VOCAB), "larger heads": Shape(5, 32, 8, 24, VOCAB), "all": Shape(6, 48, 12, 40, 50)}

def drawn(module, seed):
    """Random weights, large enough that no distribution is flat, norms and their signs among them."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.requires_grad_(False).normal_(0, 0.3, generator=generator)
        if p.ndim == 1:
            p += 1
    return module

@pytest.fixture(scope="module")
def small():
    """A target in float64, with a GLIDE that reads a middle layer through a norm, a vanilla drafter and an EDD."""
    model = drawn(LlamaForCausalLM(LlamaConfig(**SMALL)).double().eval(), 0)
    drafters = []
    for glimpse in (True, False):
        config = glide.Config.for_target(model, 12, glimpse=glimpse, layer=2)
        config.norm, config.eps = True, 1e-3
        drafters.append(drawn(glide.Glide(config, glide.target_angles(model, 200)), 1).double())
    return model, *drafters, drawn(edd.EDD(edd.Config.for_target(model, hidden=3), model), 2)

def grown(small, name):
    model, *drafters, effective = small
    big = growth.grow(model, SHAPES[name], CONTEXT)
    further = SHAPES[name].layers - 5
    return big, *(growth.grow_glide(drafter, big, further) for drafter in drafters), growth.grow_edd(effective, big, further)

@pytest.mark.parametrize("name", SHAPES)
def test_growth_keeps_logits_and_text(small, name):
    model, shape = small[0], SHAPES[name]
    before = [w.clone() for part in small for w in part.parameters()]
    big = grown(small, name)[0]
    assert growth.shape_of(big) == shape and len(big.model.layers) == shape.layers
    assert all(map(torch.equal, before, (w for part in small for w in part.parameters()))), "the small one is left as it is"
    ids = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        said, found = model(ids).logits, big(ids).logits
    torch.testing.assert_close(found[..., :VOCAB], said, atol=1e-4, rtol=0)          # norms round to float32
    # A further token has next to no probability, and never the largest.
    assert found.softmax(-1)[..., VOCAB:].sum(-1).max() < 1e-9 if shape.vocab > VOCAB else found.shape == said.shape
    assert verify.generate(verify.Target(big), None, verify.root_only, PROMPT, 16).tokens == plain(model, PROMPT, 16)

def test_grown_drafters_draft_the_same(small):
    """Every row that they give to a tree, round by round, and the rounds."""
    def drafts(model, kind, draft_model, build):
        drafter, rows = kind.Drafter(draft_model), []
        expand = drafter.expand
        drafter.expand = lambda tokens, parents: rows.append(expand(tokens, parents)) or rows[-1]
        out = verify.generate(verify.Target(model), drafter, build, PROMPT, 12)
        return rows, out.rounds
    big = grown(small, "all")
    for part, kind, build in ((1, glide, cape.cape), (2, glide, cape.cape), (3, edd, pct.pct)):
        rows, rounds = drafts(small[0], kind, small[part], build)
        rows_of_big, rounds_of_big = drafts(big[0], kind, big[part], build)
        assert rounds_of_big == rounds
        for x, y in zip(rows, rows_of_big, strict=True):
            torch.testing.assert_close(y[:, :VOCAB], x, atol=1e-4, rtol=0)

def test_bytes_that_a_step_reads(small):
    """All weights, but of an embedding that is not the head as well one row; keys and values of 7 rows."""
    c, rows = small[0].config, 2 * 5 * 4 * 4 * 7
    weights = sum(p.numel() for p in small[0].parameters())
    assert walltime.step_bytes(small[0], 7) == 8 * (weights + rows)
    untied = LlamaForCausalLM(LlamaConfig(**SMALL | {"tie_word_embeddings": False})).double()
    assert walltime.step_bytes(untied, 7) == 8 * (weights + rows + c.hidden_size)

def test_the_check_refuses_another_function(small):
    model, big = small[0], grown(small, "all")[0]
    growth.check(model, big, PROMPT)
    big.model.layers[3].self_attn.q_proj.weight.data *= 1.1
    with pytest.raises(verify.UserError, match="does not say what the stand-in says"):
        growth.check(model, big, PROMPT)

def test_first_goes_on_after_a_failure_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    """Steps are processes: one that fails leaves the others; the next call runs what has not succeeded."""
    good = tmp_path / "good.py"
    good.write_text("import json, sys\nopen(sys.argv[-1], 'w').write(json.dumps({'bandwidth': 2e9}) + '\\n')\nprint('fine')")
    steps = {"kernels": [str(good)], "arms": ["-c", "import sys; sys.exit('out of memory')"], "costs": [str(good)]}
    monkeypatch.setattr(walltime, "steps_of", lambda a: steps)
    argv = ["first", "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert walltime.main(argv) == 0
    found = json.loads((tmp_path / "out/first.json").read_text())
    assert [found[name]["status"] for name in steps] == [0, 1, 0] and found["arms"]["last_line"] == "out of memory"
    assert found["costs"]["rows"] == [{"bandwidth": 2e9}]
    text = capsys.readouterr().out
    assert "arms: FAILED" in text and "memory: 2 GB/s" in text
    steps["arms"], before = [str(good)], found["kernels"]
    assert walltime.main(argv) == 0
    found = json.loads((tmp_path / "out/first.json").read_text())
    assert found["kernels"] == before and found["arms"]["rows"] == [{"bandwidth": 2e9}]
