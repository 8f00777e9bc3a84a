"""The split-learning task every contestant of ``benchmarks.split`` solves: the same data, networks
and order of rows.

Shape suffixes: ``N`` rows, ``B`` batch, ``F`` features, ``E`` embedding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vfl_party.base.devices import plain_arithmetic

LEARNING_RATE = 0.01
_DATA_SEED, _MODEL_SEED, _ORDER_SEED = 11, 23, 37


@dataclass(frozen=True)
class Task:
    """One shape of the split task: K passive parties with features, one active party with binary
    labels only.
    """

    name: str
    parties: int
    batch: int
    embedding: int
    steps: int
    warmup: int = 30
    rows: int = 10_240
    features: int = 64
    bottom: Literal["mlp", "resnet18"] = "mlp"
    # All processes compute there.
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"

    @property
    def embedding_bytes(self) -> int:
        """The bytes of one float32 embedding of a batch; its gradient has as many."""
        return self.batch * self.embedding * 4

    @property
    def payload_bytes(self) -> int:
        """The bytes of tensors that a step must move: an embedding and a gradient for every passive
        party.
        """
        return 2 * self.parties * self.embedding_bytes

    @property
    def joint_threads(self) -> int:
        """The torch threads for the whole network in one process."""
        return 1 if self.bottom == "mlp" else os.cpu_count() or 1

    @property
    def passive_threads(self) -> int:
        """The torch threads of one passive process: one for the MLP, a fair share of the cores for
        the ResNet.
        """
        return 1 if self.bottom == "mlp" else max(1, (os.cpu_count() or 1) // self.parties)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Task:
        """Make the task from `to_json`'s fields."""
        return cls(**fields)


def begin(task: Task, threads: int) -> torch.autocast:
    """Set torch as parties do, float32 in full; return the context of a forward pass."""
    torch.set_num_threads(threads)
    plain_arithmetic()
    device = torch.device(task.device).type
    return torch.autocast(device, torch.bfloat16, enabled=task.precision == "bfloat16")


def features_of(task: Task, party: int) -> Tensor:
    """Return the rows of passive ``party``: x_NF for the MLP, x_N3HW (32 × 32) for the ResNet."""
    generator = torch.Generator().manual_seed(_DATA_SEED + 1 + party)
    shape = (task.features,) if task.bottom == "mlp" else (3, 32, 32)
    return torch.randn(task.rows, *shape, generator=generator).to(task.device)


def labels_of(task: Task) -> Tensor:
    """Return the active party's labels y_N1, zeros and ones as float32."""
    generator = torch.Generator().manual_seed(_DATA_SEED)
    return torch.randint(0, 2, (task.rows, 1), generator=generator).float().to(task.device)


def bottom_of(task: Task, party: int) -> nn.Module:
    """Return passive ``party``'s network, F → E; the same weights in every process that asks."""
    torch.manual_seed(_MODEL_SEED + 1 + party)
    if task.bottom == "mlp":
        layers = nn.Linear(task.features, 256), nn.ReLU(), nn.Linear(256, task.embedding)
        return nn.Sequential(*layers).to(task.device)
    # 170 MB and a second: only the image task pays.
    from torchvision.models import resnet18

    network: nn.Module = resnet18(num_classes=task.embedding)
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network.to(task.device)


def top_of(task: Task) -> nn.Module:
    """Return the active party's top model, E → 1 logit."""
    torch.manual_seed(_MODEL_SEED)
    return nn.Linear(task.embedding, 1).to(task.device)


def sgd(network: nn.Module) -> torch.optim.SGD:
    """Return the optimiser every contestant uses."""
    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)


def batches(task: Task) -> Iterator[Tensor]:
    """Yield the row numbers i_B of warm-up and measured steps, reshuffled each epoch, alike in
    every process.
    """
    epoch = produced = 0
    total = task.warmup + task.steps
    while True:
        generator = torch.Generator().manual_seed(_ORDER_SEED + epoch)
        order_N = torch.randperm(task.rows, generator=generator)
        for i_B in order_N[: task.rows - task.rows % task.batch].split(task.batch):
            if produced == total:
                return
            produced += 1
            yield i_B
        epoch += 1
