"""bfloat16 on a CPU: near float32, also where memory that nobody wrote is full of what malloc
leaves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

COMPARE = """
import json, torch
from torch import nn
from vfl_party.models.training import forward

torch.set_num_threads(1)
worst = {}
for height, width in ((8, 4), (4, 2), (8, 8)):
    torch.manual_seed(0)
    halving = [nn.Conv2d(n, 2 * n, 3, stride=2, padding=1) for n in (64, 128, 256)]
    model = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), *halving, nn.Flatten())
    x_NCHW = torch.randn(16, 1, height, width)
    found = {}
    for precision in ("float32", "bfloat16"):
        model.zero_grad()
        z_ND = forward(model, x_NCHW, precision=precision)
        z_ND.square().mean().backward()
        found[precision] = [z_ND.detach(), *(each.grad.clone() for each in model.parameters())]
    pairs = zip(found["bfloat16"], found["float32"], strict=True)
    worst[f"{height} x {width}"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
print(json.dumps(worst))
"""


def test_convolutions_of_small_images_are_near_float32() -> None:
    """oneDNN's were not, on a processor with AMX (torch 2.15): inf, NaN or finite nonsense with
    stride 2.
    """
    # Glibc's; elsewhere it does nothing.
    environment = os.environ | {"MALLOC_PERTURB_": "128"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worst = json.loads(done.stdout)
    assert max(worst.values()) < 0.02, worst
