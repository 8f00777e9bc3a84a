"""What it costs that convolutions are summed in one order: ``python -m benchmarks.gpu.kernels``."""

from __future__ import annotations

import time
from typing import Any

import click
import torch
from torch import nn

from benchmarks.gpu.tell import device_option, tell, tiny_option
from benchmarks.task import Task, begin, bottom_of, features_of, sgd

WAYS = {
    "one order": (True, False),
    "any order": (False, False),
    "any order, searched": (False, True),
}


@click.command()
@device_option
@tiny_option
def main(device: str, tiny: bool) -> None:
    """Train a ResNet-18 with each, and say how long a step takes."""
    cudnn: Any = torch.backends.cudnn
    for precision in ("float32", "bfloat16"):
        for batch in (4,) if tiny else (256, 1024):
            rows = 2 * batch
            of = Task(
                "kernels",
                1,
                batch,
                64,
                1,
                1,
                rows,
                64,
                "resnet18",
                device,
                precision,  # type: ignore[arg-type]
            )
            autocast = begin(of, 1)
            x, bottom = features_of(of, 0), bottom_of(of, 0)
            optimizer = sgd(bottom)
            for way, flags in WAYS.items():
                cudnn.deterministic, cudnn.benchmark = flags
                took_s = [
                    step(bottom, x[:batch], optimizer, autocast) for _ in range(3 if tiny else 15)
                ]
                found = sorted(took_s[len(took_s) // 3 :])
                tell(
                    "step",
                    way=way,
                    batch=batch,
                    precision=precision,
                    ms=1e3 * found[len(found) // 2],
                )


def step(bottom: nn.Module, x: torch.Tensor, optimizer: Any, autocast: Any) -> float:
    """Return the seconds of one step."""
    began = time.perf_counter()
    optimizer.zero_grad()
    with autocast:
        z = bottom(x)
    z.float().square().mean().backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
