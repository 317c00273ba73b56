"""Training on a short list of words, by what the target computed before: the same losses, the target's own tables."""
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import plain, tiny
from test_train import about_of, brief, flags, refused, small  # noqa: F401

import cape
import train
import verify
from checkpoints import make
from training import prepare
from runtime import load, drafters as runtime_drafters
from training import drafters, features, forward as frozen, words

NAMES = ["longspec-f16", "longspec-vanilla", "longspec-top", "edd-shared", "vdm-shared", "eagle"]
WORDS = torch.tensor([7, 2, 5, 3])

def modules(model, a):
    return {name: drafters.fresh(name, model, a) for name in NAMES}

def settings(tmp_path, small):  # noqa: F811
    """train.py's flags, checked."""
    return train.parser().parse_args(flags(small, tmp_path, names=NAMES))

# ---------------------------------------------------------------- words
def test_the_loss_is_the_divergence_among_the_words(small, tmp_path):  # noqa: F811
    """Against float64 on the whole vocabulary: KL of both distributions, given that one of the words comes."""
    model = tiny("llama").float()
    a = settings(tmp_path, small)
    models = modules(model, a)
    ids = torch.randint(model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    whole = frozen.frozen_forward(model, ids, **frozen.read_by(models))
    block = {"block": 5, "random": None}
    drafts = {}
    for name in ("longspec-f16", "edd-shared"):
        module = models[name]
        x = module(ids, whole["kv"]) if name == "longspec-f16" else module(ids, whole["hidden"][2], 5)
        drafts[name] = module.head(x)
    words.share_words(models, WORDS)
    batch = frozen.frozen_forward(model, ids, **frozen.read_by(models), head=words.head_of(model, WORDS))
    assert batch["logits"].shape == (2, 20, len(WORDS))
    for name, logits in drafts.items():
        p = whole["logits"][..., WORDS].double().softmax(-1)
        q = logits[..., WORDS].double().softmax(-1)
        expected = (p * (p / q).log()).sum(-1)[:, :-1].mean()
        assert abs(models[name].loss(batch | block).item() - expected.item()) < 1e-5
    for module in models.values():
        loss = module.loss(batch | block)
        loss.backward()
        assert loss.item() > 0 and all(p.grad is not None for name, p in module.named_parameters() if "norm" not in name)
    assert all(p.grad is None for p in model.parameters())

def test_they_learn_the_words_and_draft_them(small, tmp_path, capsys):  # noqa: F811
    argv = flags(small, tmp_path, "--words", "40", "--features", names=NAMES)
    refused(capsys, argv, "there is no")
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    listed = {"vocabulary": load.vocabulary_fingerprint(tokenizer), "words": list(range(250, 300))}
    (tmp_path / "words.json").write_text(json.dumps(listed))
    refused(capsys, [*argv, "--loss", "ce"], "leave --loss ce out")
    refused(capsys, flags(small, tmp_path, "--words", "40", names=["edd"]), "edd has a head of its own")
    refused(capsys, [*argv, "--shard-target"], "leave one of them out")
    assert train.main([*argv, "--length", "30"]) == 0
    about = tmp_path / "work" / "features" / "about.json"
    key = json.loads(about.read_text())["key"]
    assert train.main([*argv, "--overwrite"]) == 0 and json.loads(about.read_text())["key"] != key, "pieces of another length are others"
    assert train.main([*argv, "--init", str(tmp_path), "--overwrite"]) == 0         # a second stage
    setup = load.Setup(str(small / "model"), str(tmp_path))
    for name in NAMES:
        about = about_of(tmp_path, name)
        assert about["words"] == 40
        drafter = load.load_drafter(setup, name)
        saved = load.drafters_in(tmp_path)[name] / "model.safetensors"
        assert saved.stat().st_size < 60_000                       # no table of 300 words
        out = verify.generate(setup.target, drafter, cape.cape, [5, 6, 7], 8)
        assert out.tokens == plain(setup.model, [5, 6, 7], 8)
        assert {token for a_round in out.rounds for token in a_round.tokens[1:]} <= {*listed["words"][:40]}
        drafter.reset()
    # It stays what it is under another name.
    shutil.copytree(tmp_path / "longspec-top", tmp_path / "named" / "glide")
    again = flags(small, tmp_path / "again", "--init", str(tmp_path / "named"), names=["glide"])
    assert train.main([each for each in again if each not in ("--width", "16")]) == 0
    again = load.load_drafter(load.Setup(str(small / "model"), str(tmp_path / "again")), "glide")
    assert isinstance(again.model, runtime_drafters.LongSpec)

@pytest.mark.parametrize("tied", [False, True])
def test_beside_a_tied_target_a_rotation_stands_behind_the_embedding(small, tmp_path, tied):  # noqa: F811
    model = tiny("llama", tie_word_embeddings=tied)
    model.model.norm.weight.data.uniform_(0.5, 2)
    for module in (modules(model, settings(tmp_path, small))[name] for name in ("longspec-top", "edd-shared")):
        assert module.config.projected == tied == hasattr(module.projection, "weight")
        torch.testing.assert_close(module.norm.weight, model.model.norm.weight.float())
        x = model.get_input_embeddings()(torch.arange(4)).float()
        torch.testing.assert_close(module.embed(torch.arange(4)).norm(dim=1), x.norm(dim=1))

# ---------------------------------------------------------------- features
@pytest.mark.parametrize("read_logits", [True, False])
def test_features_are_the_forward(small, tmp_path, read_logits):  # noqa: F811
    """In another batch, and in a process that comes later; up to bfloat16's rounding."""
    model = tiny("llama").float()
    tokens = np.arange(60, dtype="i4") % model.config.vocab_size
    pieces = np.array([[0, 20, 0], [20, 13, 0], [33, 27, 0]])
    read = {"hidden": {1, 3}, "kv": {0, 2}}
    computed = []

    def forward(ids):
        computed.append(len(ids))
        return frozen.frozen_forward(model, ids, **read, logits=False)
    for batch in ([0, 1], [2, 1], [0, 1, 2]):
        head = words.head_of(model) if read_logits else None
        kept = features.Features(forward, head, tmp_path / "f", len(tokens), "key", model.config.vocab_size)
        ids, learn = prepare.gather(tokens, pieces[batch])
        found = kept(pieces[batch], ids, learn, count=1)
        whole = frozen.frozen_forward(model, ids, **read, learn=learn, count=1)
        for row, size in enumerate(pieces[batch, 1]):
            for layer, states in found["hidden"].items():
                torch.testing.assert_close(states[row, :size].float(), whole["hidden"][layer][row, :size], rtol=.01, atol=.01)
            for layer, entries in found["kv"].items():
                for mine, its in zip(entries, whole["kv"][layer]):
                    torch.testing.assert_close(mine[row, :, :size].float(), its[row, :, :size], rtol=.01, atol=.01)
            if read_logits:
                torch.testing.assert_close(found["logits"][row, :size], whole["logits"][row, :size], rtol=.05, atol=.05)
        assert (found["logits"] is not None) == read_logits
    assert computed == [2, 1]                                     # each piece once
    features.Features(forward, None, tmp_path / "f", len(tokens), "another key", 9)(pieces[:1], *prepare.gather(tokens, pieces[:1]), 1)
    assert computed == [2, 1, 1]

def test_a_disk_without_room_is_a_sentence(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    def full(*given):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(features.os, "posix_fallocate", full)
    refused(capsys, flags(small, tmp_path, "--features", names=["edd"]), "GiB (No space left on device): name another --work")

def test_continuations_in_bfloat16_are_a_run_of_their_own(small, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "written.jsonl"
    argv = ["continuations", "--target", str(small / "model"), "--data", str(small / "rows.jsonl"), "--out", str(out),
            "--batch", "2", "--steps", "1", "--length", "24", "--device", "cpu"]
    assert make.main([*argv, "--dtype", "bfloat16"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    model, _ = load.load_target(small / "model", "float32", "cpu")
    model = model.to(torch.bfloat16)
    for row in rows:
        assert row["answer"][0] == plain(model, row["prompt"], 1)[0]
    refused(capsys, [*argv, "--resume"], "holds something else", make.main)
