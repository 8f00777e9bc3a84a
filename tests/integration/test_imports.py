"""What a party imports, and when: each import takes seconds and memory in every process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

import torch

from vfl_common.config.models import CnnSettings, OptimizerSettings, NetworkSettings, TaskSettings
from vfl_party.models.metrics import evaluate
from vfl_party.models import InputSpec, build_encoder
from vfl_party.models.training import backward
from vfl_party.models.training import build_optimizer, build_schedule, clip

encoder = build_encoder(CnnSettings(kind="cnn"), InputSpec((1, 8, 8)), 4)
for kind in ("sgd", "adam", "adagrad"):
    settings = OptimizerSettings(kind=kind, lr=0.1, clip_norm=1.0)
    optimizer = build_optimizer(settings, encoder.parameters())
    schedule = build_schedule(settings, optimizer, 2)
    backward(encoder(torch.ones(2, 1, 8, 8)), torch.ones(2, 4))
    clip(settings, encoder.parameters())
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert not {"torch._dynamo", "sympy"} & set(sys.modules)  # torch's own decorators import them

assert "torchmetrics" not in sys.modules
evaluate(TaskSettings(kind="binary"), torch.randn(4, 1), torch.tensor([[0.0], [1.0], [0.0], [1.0]]))
assert "torchmetrics" in sys.modules
assert not {"torch._dynamo", "torchvision", "matplotlib", "scipy.signal"} & set(sys.modules)
from lightning_utilities.core.imports import RequirementCache, package_available

assert RequirementCache("torchvision")
assert package_available("scipy")

build_encoder(NetworkSettings(kind="resnet18"), InputSpec((1, 8, 8)), 4)
assert "torchvision" in sys.modules
"""


def test_what_an_optimizer_a_metric_and_an_image_model_bring_in() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
