"""figures/probe.py lookup: attention beside one computed from queries and keys by loops, the linear map beside numpy's."""
from types import SimpleNamespace

import numpy as np
import probe
import pytest
import torch
from conftest import plain, target_of, tiny
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

import glide
import verify
from runtime import measure
from tables import grid

def by_hand(model, texts, new, window):
    """The mean mass of each head of each layer on what followed a continued token before, and uniform attention's."""
    mass, alike, found = {}, [], {}
    for layer, block in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            getattr(block.self_attn, name).register_forward_hook(lambda module, x, out, at=(layer, name): found.update({at: out[0]}))
    for ids in texts:
        model(torch.tensor([ids]))
        turn = glide.target_angles(model, len(ids))
        for layer in range(len(model.model.layers)):
            q, k = (glide.apply_rope(found[layer, name].unflatten(-1, (-1, 8)).transpose(0, 1), *turn) for name in ("q_proj", "k_proj"))
            for head, i in ((head, i) for head in range(len(q)) for i in range(len(ids) - new, len(ids))):
                after = [j for j in range(1, i + 1) if ids[j - 1] == ids[i]]
                if after:
                    scores = {j: (q[head, i] @ k[head * len(k) // len(q), j]).item() / 8 ** 0.5 for j in range(max(0, i + 1 - window), i + 1)}
                    total = sum(map(np.exp, scores.values()))
                    mass.setdefault((layer, head), []).append(sum(np.exp(scores[j]) for j in after if j in scores) / total)
                    alike.append(len(after) / (i + 1))
    return {at: np.mean(values) for at, values in mass.items()}, np.mean(alike)

@pytest.mark.parametrize("name, window", [("llama-eager", 99), ("mistral", 9)])
def test_the_mass_of_each_layer_against_queries_and_keys(name, window):
    model = tiny(name, seed=3)
    prompts = [("x", [i, 3, 1, 4, 1, i + 2], 10) for i in range(4)]
    run = SimpleNamespace(model=model, prompts=prompts, a=SimpleNamespace(target=name), target=SimpleNamespace(encoder_decoder=False))

    def decode(drafter, build, ids, limit):
        out = verify.generate(target_of(model), drafter, build, ids, limit)
        return measure.Record(out.tokens, out.rounds)
    run.decode = decode
    rows, columns = probe.lookup(run)
    model = tiny(name, seed=3)
    expected, alike = by_hand(model, [ids + plain(model, ids, limit) for _, ids, limit in prompts], 10, window)
    assert len(rows) == 4 and "head" not in rows[3] and grid(rows, columns).count("\n") == 5
    for layer, row in enumerate(rows[:3]):
        heads = [expected[layer, head] for head in range(4)]
        assert (row["head"], row["mass"], row["uniform"]) == (np.argmax(heads), pytest.approx(max(heads), abs=1e-5), pytest.approx(alike))
    best = max(range(3), key=lambda layer: rows[layer]["mass"])
    assert run.notes[0].startswith(f"GLIDE: --layer {best}, whose head {rows[best]['head']} puts {rows[best]['mass']:.3f} there")
    run.prompts = prompts[:3]
    with pytest.raises(verify.UserError, match="at least four prompts"):
        probe.lookup(run)

def test_the_linear_map_is_least_squares_with_a_ridge(monkeypatch):
    torch.manual_seed(0)
    texts = [torch.randint(5, (30,)) for _ in range(8)]
    table = torch.randn(5, 6, dtype=torch.float64)
    told = [torch.cat((table[:1], table[ids[:-1]])) for ids in texts]        # each state names the token before, in a code of its own
    noisy = [each + 1.5 * torch.randn(each.shape) for each in told]
    assert probe.named_before(told, texts) == 1.0
    assert probe.named_before([torch.randn(30, 6) for _ in texts], texts) < 0.45, "nothing is known; a guess is right in a fifth"

    def pairs(some):
        """States, and the token that each should name."""
        return torch.cat([noisy[i][1:] for i in some]), torch.cat([texts[i][:-1] for i in some])
    (x, y), (held_out, truth) = pairs([0, 1, 2, 4, 5, 6]), pairs([3, 7])
    mean, std, hot = x.mean(0), x.std(0), torch.eye(5, dtype=torch.float64)[y]
    x = torch.cat(((x - mean) / std, (probe.RIDGE * len(x)) ** 0.5 * torch.eye(6)))
    weights = torch.linalg.lstsq(x, torch.cat((hot - hot.mean(0), torch.zeros(6, 5)))).solution
    share = (((held_out - mean) / std @ weights + hot.mean(0)).argmax(1) == truth).double().mean().item()
    assert probe.named_before(noisy, texts) == pytest.approx(share) and 0.3 < share < 0.95

def test_a_family_whose_attention_cannot_be_read_gets_one_sentence():
    ids = torch.tensor([1, 2, 3])
    sizes = dict(vocab_size=8, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(verify.UserError, match="MambaForCausalLM does not say what each of its layers attends to"):
        probe.layers_of(MambaForCausalLM(MambaConfig(**sizes)), ids)
    attention, states = probe.layers_of(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=16, n_layer=2, n_head=4)).bfloat16().eval(), ids)
    assert [*map(len, attention)] == [4, 4] and attention[0].sum(-1) == pytest.approx(1.0, abs=1e-2) and len(states) == 3
