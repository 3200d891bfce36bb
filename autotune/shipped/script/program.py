"""The program of a script on one device."""

import functools
import math

import torch

from autotune.shipped.script.loop import check_lengths, parse_arguments, train
from autotune.shipped.script.one_device import evaluate
from autotune.shipped.script.read_text import read_text
from autotune.shipped.script.written import PROMISE, Training


def main() -> None:
    arguments = parse_arguments()
    text, held_out = read_text(arguments.tokens, arguments.text)
    check_lengths(text, held_out)
    training = Training()
    say = functools.partial(print, flush=True)
    peak_memory = train(training, text, steps=arguments.steps, say=say)
    print(f"perplexity {math.exp(evaluate(training.model, held_out)):.4f}")
    if peak_memory.read():
        print(f"peak memory {peak_memory.read() / 2**20:,.2f} MiB")
    if "peak_memory_bytes" in PROMISE:
        promised = PROMISE["peak_memory_bytes"] / 2**20
        print(f"promised    {promised:,.2f} MiB, measured in {PROMISE['trial']}")
    if arguments.save:
        weights = {name: weight.detach().cpu() for name, weight in training.parameters.items()}
        torch.save(weights, arguments.save)


if __name__ == "__main__":
    main()
