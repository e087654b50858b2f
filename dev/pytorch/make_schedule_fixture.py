"""Writes dev/test/fixtures/learning_rates.txt: learning rates of PyTorch's schedulers, with which the test of
learning-rate curves (dev/test/test_family.h) compares the program's.

    python dev/pytorch/make_schedule_fixture.py

A line is: shape, peak, minimum, warm-up steps, decay steps, steps, and then the learning rate of every step.
"""
import os
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

CASES = [("cosine", 3e-4, 3e-5, 10, 0, 100), ("cosine", 8e-5, 8e-7, 1, 0, 40), ("linear", 1e-3, 0.0, 7, 0, 60),
         ("linear", 2e-3, 2e-4, 3, 0, 4), ("constant", 5e-4, 5e-4, 9, 0, 30), ("wsd", 1e-3, 1e-4, 5, 20, 80),
         ("wsd", 6e-4, 0.0, 2, 8, 17), ("cosine", 1e-3, 1e-4, 0, 0, 25), ("linear", 1e-3, 0.0, 0, 0, 20),
         ("wsd", 1e-3, 0.0, 0, 5, 12)]


def rates(shape, peak, minimum, warmup, decay, steps):
    """The learning rate of steps 1 to `steps`. Schedulers count from 0, where the program's curve has its step 0."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    parts, ends = [], []
    if warmup:  # LinearLR does not begin at 0: its first value is that of step 1
        parts.append(LinearLR(optimizer, 1 / warmup, 1.0, max(1, warmup - 1)) if warmup > 1 else
                     ConstantLR(optimizer, 1.0, 1))
        ends.append(max(1, warmup - 1) if warmup > 1 else 0)
    after = steps - warmup
    if shape == "cosine": parts.append(CosineAnnealingLR(optimizer, after, minimum))
    if shape == "linear": parts.append(LinearLR(optimizer, 1.0, minimum / peak, after))
    if shape == "constant": parts.append(ConstantLR(optimizer, 1.0, 1))
    if shape == "wsd":
        parts.append(ConstantLR(optimizer, 1.0, 1))
        ends.append((ends[-1] if ends else 0) + after - decay)
        parts.append(LinearLR(optimizer, 1.0, minimum / peak, decay))
    if warmup == 1: parts, ends = parts[1:], [e for e in ends[1:]]
    scheduler = SequentialLR(optimizer, parts, ends) if len(parts) > 1 else parts[0]
    values = []
    for _ in range(steps + 1):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values[1:] if warmup == 0 else values[:steps]


def main():
    path = os.path.join(os.path.dirname(__file__), "../test/fixtures/learning_rates.txt")
    with open(path, "w") as f:
        for case in CASES:
            f.write(" ".join([case[0]] + [f"{x:.17g}" for x in case[1:]] + [f"{x:.17g}" for x in rates(*case)]) + "\n")


if __name__ == "__main__":
    main()
