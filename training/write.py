"""What a target writes itself: the text that its drafters learn from best.

    python training/write.py --target smollm2 --data questions.jsonl --out written.jsonl
    python train.py glide edd --target smollm2 --data written.jsonl

The prompts are the first questions of chats, or the first halves of other texts.  train.py reads
the prompts and learns the answers.  Rows are written as they are finished, and the same command
goes on with the prompts that --out does not hold.  Many texts are decoded together, plainly: no
drafter is there yet.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch

from runtime import chats, load
from runtime.program import UserError, at_least, program
from runtime.targets import context_of
from training import batched
from training.documents import prompts_in

@program
def main(argv):
    p = argparse.ArgumentParser(description="Let a target write text for its drafters.")
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN), help="folder or hub name of the target")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--data", nargs="+", required=True, help="files of questions, chats or other text")
    flag("--template", help="chat format, as for train.py")
    flag("--template-args", help="for the template, as '{\"enable_thinking\": false}'")
    flag("--out", required=True, help="file to write, JSON lines")
    flag("--temperature", type=at_least(0.0), nargs="+", default=[0.0],
         help="0: greedy; else sampled.  Of several the prompts take one in turn")
    flag("--length", type=at_least(2), default=512, help="tokens of a prompt and its answer")
    flag("--batch", type=at_least(1), default=64, help="texts that are decoded together")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32",
         help="of the target on a CPU; bfloat16 is faster where the CPU has AMX")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    a = p.parse_args(argv)
    dtype = "auto" if a.device.startswith("cuda") else a.dtype
    target, tokenizer = load.load_target(a.target, dtype, a.device, trust=a.trust_remote_code)
    capacity = context_of(target.config.get_text_config())
    if a.length > capacity:
        raise UserError(f"--length {a.length} is more than the target's context of {capacity}")
    template = chats.template_of(a.template, tokenizer, a.template_args)
    prompts = prompts_in(a.data, tokenizer, template, a.length * 3 // 4)
    torch.manual_seed(0)
    batched.append(Path(a.out), target, tokenizer, prompts, a.length, a.batch, a.temperature)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
