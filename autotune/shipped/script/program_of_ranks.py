"""The program of a script on several devices."""

import math

import torch

from autotune.shipped.ranks import join
from autotune.shipped.script.loop import check_lengths, parse_arguments, train
from autotune.shipped.script.read_text import read_text
from autotune.shipped.script.several_devices import evaluate
from autotune.shipped.script.written import (
    COMMAND,
    DEVICE,
    GLOBAL_BATCH,
    MICRO_BATCH,
    PEAK_MEMORY_BYTES_BY_RANK,
    PROMISE,
    Training,
    save,
)


def main() -> None:
    arguments = parse_arguments()
    rank = join(DEVICE, command=COMMAND)
    if GLOBAL_BATCH % (MICRO_BATCH * rank.size):
        raise SystemExit(
            f"micro batches of {MICRO_BATCH} sequences on each of {rank.size} devices do not add "
            f"up to the global batch of {GLOBAL_BATCH}: start another number of processes"
        )
    with rank.first_alone():
        text, held_out = read_text(arguments.tokens, arguments.text)
    check_lengths(text, held_out)
    training = Training(rank)
    peak_memory = train(
        training,
        text,
        steps=arguments.steps,
        say=rank.say,
        ranks=rank.size,
        is_first=rank.index == 0,
    )
    rank.say(f"perplexity {math.exp(evaluate(training, held_out)):.4f}")
    peaks = rank.gather(peak_memory.read())
    for index, peak in enumerate(peaks):
        if peak:
            rank.say(f"peak memory {peak / 2**20:,.2f} MiB on rank {index}")
    if len(PEAK_MEMORY_BYTES_BY_RANK) == rank.size:
        for index, peak in enumerate(PEAK_MEMORY_BYTES_BY_RANK):
            mebibytes = f"{peak / 2**20:,.2f} MiB"
            rank.say(f"promised    {mebibytes} on rank {index}, measured in {PROMISE['trial']}")
    if arguments.save:
        save(training, arguments.save)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
