"""Train a small T5 family: an encoder-decoder target, and smaller models that draft for it.

    python training/t5.py start base small --data work/corpus
    python training/t5.py start base small --data work/corpus --resume          # after a Ctrl-C
    python training/t5.py target --start work/t5/start --data work/corpus --work work/target
    python bench.py --target work/t5/target --checkpoint work/t5 --tree chain \\
        --drafter "cascade(base, small, maxgram, k=(8, 13, 1))"

(Cascade Speculative Drafting, section 5: FLAN-T5-XXL with FLAN-T5-base and FLAN-T5-small.)  All are
transformers' T5ForConditionalGeneration with the stand-in's tokenizer.  They read the same pairs
of input and output, and learn the output by cross entropy, so none learns from another, as in the
paper.  A name that ends in -distilled is the same small model, which learns the target's
distribution (KL) instead, beside the target, while that still learns.

    a row of --data                          input                            output
    question and answer, or a text that      "Question: ...\\nAnswer:"         the answer
      begins so
    a text with a blank line                 all before its last paragraph    the last paragraph
    any other text                           its first 8 to 32 words          the rest

So an input is what the stand-in is given as a prompt, and checkpoints/prompts.jsonl serves both.  A
row may say "held_out": true or false, and "times": how often an epoch reads it.

A decoder of 24 layers is slow to find out that an output may be copied from its input, one of three
layers is not.  So `start` learns first, and with --start the target begins as the same function.
"""
import argparse
import math
import random
import sys
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                          # so that it runs from anywhere

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

import train  # noqa: E402
from runtime import text  # noqa: E402
from training.drafters import save_language_model  # noqa: E402
from training.prepare import is_held_out  # noqa: E402
from training.state import claim_folders, status_of  # noqa: E402
from verify import UserError  # noqa: E402

# Layers of the encoder and of the decoder.  Beside a deep and narrow target a stage is cheap.
LAYERS = {"target": (2, 24), "base": (1, 3), "small": (1, 1), "start": (2, 3)}
SIZES = {"d_model": 128, "num_heads": 2, "d_kv": 32, "d_ff": 192}
NAMES = [*LAYERS, "base-distilled", "small-distilled"]
LONGEST = 480              # tokens of an input, and of an output; longer pairs are left out
SORTED = 2048              # pairs that are sorted by length together, so that batches pad little
ROWS = 12                  # pairs of a forward
HELD_OUT = 48              # held-out pairs of each kind whose loss is measured
# T5 begins with embeddings of standard deviation 1, fifty times Llama's: they need larger steps.
TABLES = 6.0               # their learning rate, in multiples of the matrices'

Pair = namedtuple("Pair", "kind input output")         # kind of text, token ids, token ids

# ---------------------------------------------------------------- documents -> pairs
def divided(document, number):
    """A text -> its input and its output, or None where it has no two parts.  number: of its row"""
    question, mark, answer = document.partition("\nAnswer:")
    if mark and question.startswith("Question:"):
        return question + mark, answer.strip()
    given, between, output = document.rpartition("\n\n")
    if between:
        return given + between, output
    words = document.split(" ")
    opening = random.Random(number).randint(8, 32)
    if len(words) < 2 * opening:
        return None
    return " ".join(words[:opening]), " ".join(words[opening:])

def read_pairs(paths, tokenizer):
    """Files and folders -> the Pairs to learn from, and those that are held out."""
    learned, held_out = [], []
    for path in text.files_of(paths, "--data"):
        rows, parts = [], []
        for number, row in enumerate(text.read_rows(path)):
            document = text.document(row)
            part = divided(document, number) if isinstance(document, str) else None
            if part:
                rows.append((number, row))
                parts.append(part)
        if not rows:
            continue
        inputs = tokenizer([given for given, _ in parts])["input_ids"]
        outputs = tokenizer([output for _, output in parts])["input_ids"]
        for (number, row), given, output in zip(rows, inputs, outputs):
            if max(len(given), len(output)) >= LONGEST:
                continue
            pair = Pair(text.kind_of_text(row, path), given, output + [tokenizer.eos_token_id])
            if is_held_out(number + 1, row):
                held_out.append(pair)
            else:
                learned += [pair] * row.get("times", 1)
    return learned, held_out

def batches_of(pairs, most, seed, epoch):
    """All pairs once, in an order that (seed, epoch) decides -> [[index of a pair]]

    Pairs of a batch are about equally long, and have at most `most` output tokens with padding.
    """
    def lengths(i):
        return len(pairs[i].output) // 16, len(pairs[i].input)

    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(pairs))
    batches = []
    for start in range(0, len(order), SORTED):
        batch, longest = [], 0
        for i in sorted(order[start:start + SORTED], key=lengths):
            # Only the two layers of the encoder read the input.
            size = len(pairs[i].output) + len(pairs[i].input) // 8
            if batch and max(longest, size) * (len(batch) + 1) > most:
                batches.append(batch)
                batch, longest = [], 0
            batch.append(i)
            longest = max(longest, size)
        batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]

# ---------------------------------------------------------------- models
def fresh(name, tokenizer, seed):
    """A T5 that has learned nothing."""
    torch.manual_seed(seed)
    encoder, decoder = LAYERS[name.removesuffix("-distilled")]
    eos = tokenizer.eos_token_id
    config = transformers.T5Config(
        **SIZES, vocab_size=len(tokenizer), num_layers=encoder, num_decoder_layers=decoder,
        dropout_rate=0.0, feed_forward_proj="relu", tie_word_embeddings=True, pad_token_id=eos,
        eos_token_id=eos, decoder_start_token_id=eos)
    return transformers.T5ForConditionalGeneration(config)

@torch.no_grad()
def grow(deep, shallow):
    """Let a deep T5 begin as a shallow one of the same width: it computes the same.

    The layers of the shallow one are spread over the deep one's.  The layers between them begin as
    identities: what they add to the residual stream is 0 (Net2Net, Chen et al. 2016).
    """
    deep.shared.load_state_dict(shallow.shared.state_dict())
    for part in ("encoder", "decoder"):
        new, old = getattr(deep, part), getattr(shallow, part)
        for name, weight in new.block.named_parameters():
            # The last matrices of attention and of the MLP: "o.weight" and "wo.weight"
            if name.endswith("o.weight"):
                weight.zero_()
        places = torch.linspace(0, len(new.block) - 1, len(old.block)).round().int()
        for place, block in zip(places, old.block):
            new.block[place].load_state_dict(block.state_dict())
        new.final_layer_norm.load_state_dict(old.final_layer_norm.state_dict())

def learners_of(models, lr):
    """Muon for the matrices of the layers; AdamW for the tables of embeddings, and for norms.

    All layers of a model move its output at once.  So the learning rate of a model falls with the
    square root of the number of its layers.
    """
    hidden, others = [], []
    for model in models.values():
        own_lr = lr / math.sqrt(model.config.num_layers + model.config.num_decoder_layers)
        matrices, rest = [], []
        for name, weight in model.named_parameters():
            is_table = "shared" in name or "relative_attention_bias" in name
            part = matrices if weight.ndim == 2 and not is_table else rest
            part.append(weight)
        hidden.append({"params": matrices, "lr": own_lr})
        others.append({"params": rest, "lr": TABLES * own_lr})
    return [torch.optim.Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01)]

def padded(rows, value):
    """Lists of ids -> (B, T), padded on the right with `value`."""
    found = torch.full((len(rows), max(map(len, rows))), value)
    for row, ids in zip(found, rows):
        row[:len(ids)] = torch.tensor(ids)
    return found

def inputs_of(model, pairs):
    """The inputs of some pairs, as a T5 takes them: ids (B, S) and their mask."""
    given = padded([pair.input for pair in pairs], model.config.pad_token_id)
    mask = padded([[1] * len(pair.input) for pair in pairs], 0)
    return {"input_ids": given, "attention_mask": mask}

def logits_of(model, pairs):
    """The model's logits for all tokens of the outputs -> logits (n, V), the tokens (n,)"""
    labels = padded([pair.output for pair in pairs], -1)                       # (B, T)
    # The decoder reads its start token, then the output without its last token.
    start = torch.full((len(pairs), 1), model.config.decoder_start_token_id)
    read = torch.cat((start, labels[:, :-1].clamp(min=0)), 1)                  # (B, T)
    out = model(**inputs_of(model, pairs), decoder_input_ids=read, use_cache=False)
    is_label = labels >= 0
    return out.logits[is_label].float(), labels[is_label]

def parts_of(pairs):
    """The pairs of each forward."""
    return [pairs[i:i + ROWS] for i in range(0, len(pairs), ROWS)]

# ---------------------------------------------------------------- what train.fit needs
def gradients_of(models, pairs, batches):
    """-> gradients(step), which adds the gradients of a step, and returns {name: loss}.

    batches(epoch): the batches of an epoch, as batches_of makes them.
    """
    steps = len(batches(0))                            # of an epoch
    now = {}                                           # the batches of one epoch

    def gradients(step):
        epoch, place = divmod(step, steps)
        if epoch not in now:
            now.clear()
            now[epoch] = batches(epoch)
        # Another order may give a batch less.
        place = min(place, len(now[epoch]) - 1)
        batch = [pairs[i] for i in now[epoch][place]]
        count = sum(len(pair.output) for pair in batch)
        losses = dict.fromkeys(models, 0.0)
        for part in parts_of(batch):
            for name, model in models.items():
                logits, labels = logits_of(model, part)
                if name == "target":
                    teacher = logits.detach().log_softmax(-1)                  # (n, V)
                if name.endswith("-distilled"):
                    loss = F.kl_div(logits.log_softmax(-1), teacher, reduction="sum",
                                    log_target=True)
                else:
                    loss = F.cross_entropy(logits, labels, reduction="sum")
                loss = loss / count
                loss.backward()
                losses[name] += loss.item()
        return losses

    return gradients

@torch.no_grad()
def evaluate(models, held_out):
    """-> {name: {"held_out_loss", "right": share of tokens that are the most probable, by_kind}}

    The held-out loss is a cross entropy, for distilled models, too.
    """
    metrics = {name: {"held_out_loss": 0.0, "right": 0.0, "by_kind": {}} for name in models}
    kinds = sorted({pair.kind for pair in held_out})
    for kind in kinds:
        pairs = [pair for pair in held_out if pair.kind == kind][:HELD_OUT]
        count = sum(len(pair.output) for pair in pairs)
        for name, model in models.items():
            found = {"held_out_loss": 0.0, "right": 0.0}
            for part in parts_of(pairs):
                logits, labels = logits_of(model, part)
                loss = F.cross_entropy(logits, labels, reduction="sum")
                found["held_out_loss"] += loss.item() / count
                found["right"] += (logits.argmax(-1) == labels).sum().item() / count
            metrics[name]["by_kind"][kind] = found
            for key, value in found.items():
                metrics[name][key] += value / len(kinds)
    return metrics

@torch.no_grad()
def written(model, tokenizer, held_out):
    """What the model writes greedily after the first held-out inputs of each kind of text.

    -> {kind: the mean length in tokens, the mean share of a text's 4-grams that are distinct, and
    an input with its output}
    """
    found = {}
    for kind in sorted({pair.kind for pair in held_out}):
        pairs = [pair for pair in held_out if pair.kind == kind][:ROWS]
        # Caches of our own: see runtime/load.py on the layers that generate() counts.
        caches = EncoderDecoderCache(DynamicCache(), DynamicCache())
        out = model.generate(**inputs_of(model, pairs), past_key_values=caches, do_sample=False,
                             max_new_tokens=LONGEST)
        lengths, distinct = [], []
        for ids in out[:, 1:].tolist():                # without the start token
            if tokenizer.eos_token_id in ids:
                ids = ids[:ids.index(tokenizer.eos_token_id)]
            grams = list(zip(ids, ids[1:], ids[2:], ids[3:]))
            lengths.append(len(ids))
            distinct.append(len(set(grams)) / max(1, len(grams)))
        found[kind] = {"length": sum(lengths) / len(lengths),
                       "distinct_4grams": sum(distinct) / len(distinct),
                       "input": tokenizer.decode(pairs[0].input),
                       "output": tokenizer.decode(out[0, 1:], skip_special_tokens=True)}
    return found

# ---------------------------------------------------------------- command line
def parser():
    p = text.Parser(description="Train a small T5 family.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = p.add_argument
    flag("what", nargs="*", default=["start", "base", "small"],
         help=f"any of: {' '.join(NAMES)}")
    flag("--data", nargs="+", required=True, help="files or folders of texts")
    flag("--start", help="folder of a T5 of the same width, as which the target begins")
    flag("--tokenizer", default=str(ROOT / "checkpoints/target"), help="folder or hub name")
    flag("--steps", type=int, default=2000)
    flag("--tokens", type=int, default=4096, help="output tokens of a step, with padding")
    flag("--lr", type=float, default=1e-2, help="peak learning rate of the matrices of one layer")
    flag("--seed", type=int, default=0, help="of the weights and of the order of the pairs")
    flag("--out", default=str(ROOT / "work/t5"), help="folder to save the models under")
    flag("--work", default=str(ROOT / "work/training-t5"), help="folder of the state and the log")
    flag("--every", type=int, default=200, help="steps between two evaluations, and saved states")
    flag("--resume", action="store_true", help="go on with the interrupted run in --work")
    flag("--overwrite", action="store_true", help="replace what is in --work and --out")
    return p

def run(argv):
    a = parser().parse_args(argv)
    a.what = list(dict.fromkeys(a.what))
    unknown = set(a.what) - set(NAMES)
    distilled = [name for name in a.what if name.endswith("-distilled")]
    if unknown or distilled and a.what[0] != "target":
        raise UserError(f"name any of {' '.join(NAMES)}; a distilled model learns from the target, "
                        "which is named first")
    if min(a.steps, a.tokens, a.every) < 1:
        raise UserError("--steps, --tokens and --every must be at least 1")
    claim_folders(a)
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.tokenizer)
    pairs, held_out = read_pairs(a.data, tokenizer)
    if not pairs or not held_out:
        raise UserError("--data needs texts to learn, and texts that are held out: give more")
    models = {name: fresh(name, tokenizer, a.seed) for name in a.what}
    if a.start and "target" in models:
        grow(models["target"], transformers.T5ForConditionalGeneration.from_pretrained(a.start))
    batches = partial(batches_of, pairs, a.tokens, a.seed)
    labels = sum(len(pair.output) for pair in pairs) / len(batches(0))         # of a step, the mean
    command = " ".join(["python training/t5.py", *argv])
    date = time.strftime("%Y-%m-%d")
    train.log(a, {"command": command, "date": date})
    metrics = train.fit(models, learners_of(models, a.lr), gradients_of(models, pairs, batches),
                        partial(evaluate, models, held_out), a.steps, labels, a, "cpu")
    for name, model in models.items():
        about = {"kind": name, "command": command, "seed": a.seed, "steps": a.steps, "date": date,
                 "tokens_seen": round(labels * a.steps), "validation": metrics[name],
                 "written": written(model.eval(), tokenizer, held_out)}
        save_language_model(Path(a.out) / name, model, tokenizer, about)
        print(f"saved {Path(a.out) / name}")

def main(argv):
    return status_of(run, argv)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
