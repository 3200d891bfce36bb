"""A training script that fails in its sixth step in the way that the variable ENDS_BADLY names."""

import os
import time

import torch

import autotune

SEQUENCES, LENGTH, WIDTH = 8, 64, 256
STEPS, BAD_STEP = 12, 5


def end_badly(device: str) -> None:
    how = os.environ["ENDS_BADLY"]
    if how == "sleeps":
        time.sleep(3600)
    elif how == "never-ending kernels":
        while True:
            torch.cuda._sleep(10**9)
            torch.cuda.synchronize()
    elif how == "out of memory":
        held = [torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(4096)]
        raise AssertionError(f"{len(held)} GiB are there")
    elif how == "illegal access":
        index = torch.full((4,), 10**6, device=device)
        torch.zeros(4, device=device)[index].sum().item()
    elif how == "kills itself":
        os.kill(os.getpid(), 9)
    else:
        raise AssertionError(how)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, WIDTH), *layers, torch.nn.Linear(WIDTH, 256)
    ).to(device)
    model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters()))
    for step in range(STEPS):
        if step == BAD_STEP:
            end_badly(device)
        tokens = torch.randint(256, (SEQUENCES, LENGTH), device=device)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        autotune.report(tokens=SEQUENCES * LENGTH, loss=loss)


if __name__ == "__main__":
    main()
