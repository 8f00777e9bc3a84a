"""Plug-ins of a test as one would write them in cells: functions, classes, and objects of them.

A test gives them to the library, from here or from ``__main__``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from vfl.api import (
    Attack,
    BundleSpec,
    Code,
    Combination,
    DType,
    Encoder,
    Exchange,
    Figure,
    Filter,
    InputError,
    InputSpec,
    Kind,
    LossOfRows,
    Metric,
    Scene,
    Section,
    Sent,
    Tensors,
    TensorSpec,
    Top,
    Transform,
)


def quadratic(scores: Tensor, targets: Tensor) -> float:
    return float((scores - targets).square().mean())


LOW_QUADRATIC = Metric(quadratic, lower_is_better=True)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each row, from its definition."""
    right = torch.where(targets == 1, outputs.sigmoid(), 1 - outputs.sigmoid())
    return -right.log()[:, 0]


class TiltSettings(Section):
    tilt: Annotated[float, Field(gt=0.0)]


def _tilted(settings: TiltSettings, outputs: Tensor, targets: Tensor) -> Tensor:
    return entropy(outputs, targets) * (1 + settings.tilt * targets[:, 0])


TILTED = LossOfRows(TiltSettings, _tilted)


class DeepSettings(Section):
    width: Annotated[int, Field(ge=1)]


def _deep(settings: DeepSettings, width: int, outputs: int) -> nn.Module:
    hidden = nn.Linear(width, settings.width)
    return nn.Sequential(hidden, nn.Tanh(), nn.Linear(settings.width, outputs))


DEEP = Top(DeepSettings, _deep)


class GateSettings(Section):
    sharpness: Annotated[float, Field(gt=0.0)]


class Gated(nn.Module):
    """A sum of the embeddings with weights that follow from all of them."""

    def __init__(self, settings: GateSettings, width: int, embeddings: int) -> None:
        super().__init__()
        self.sharpness = settings.sharpness
        self.gate = nn.Linear(embeddings * width, embeddings)

    def forward(self, z_BKD: Tensor) -> Tensor:
        gates_BK = (self.sharpness * self.gate(z_BKD.flatten(1))).sigmoid()
        return torch.einsum("bk,bkd->bd", gates_BK, z_BKD)


GATED = Combination(GateSettings, Gated)


def side_by_side(z_BKD: Tensor) -> Tensor:
    """A combination without settings and weights: what ``concat`` gives."""
    return z_BKD.flatten(1)


def halved(x: Tensor) -> Tensor:
    return x / 2


class Rounded(Filter):
    """To a 64th; a class of Filter is a transform without settings."""

    text = "rounded to 1/64"

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: (x.detach() * 64).round() / 64 for name, x in tensors.items()}


class CutSettings(Section):
    most: Annotated[float, Field(gt=0.0)]


class Cut(Filter):
    def __init__(self, settings: CutSettings) -> None:
        self._most, self.text = settings.most, f"cut at {settings.most:g}"

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x.detach().clamp(-self._most, self._most) for name, x in tensors.items()}


CUT = Transform(CutSettings, Cut)


class HalfBits(Filter):
    """A codec: float16 as its bytes."""

    text = "half"

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x.detach().half() for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return {name: x.float() for name, x in tensors.items()}

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        found = {name: TensorSpec(DType.FLOAT16, of.shape) for name, of in spec.tensors.items()}
        return BundleSpec(spec.kind, found)


class NoGradients:
    """A policy."""

    def __call__(self, phase: str, exchange: Exchange, sent: Sent) -> Filter:
        if sent.kind is Kind.GRADIENT:
            raise InputError(Code.REFUSED, f"policy: {exchange.name} of {phase} may not leave")
        return Filter()


class WideSettings(Section):
    width: int = 8


class Wide(nn.Module):
    def __init__(self, settings: WideSettings, spec: InputSpec, embedding_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(spec.shape[0], settings.width)
        self.last = nn.Linear(settings.width, embedding_size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x).tanh())
        return found


WIDE = Encoder(WideSettings, Wide)


def counted(rest: str) -> dict[str, Any]:
    """A source: as many rows as its text says."""
    n = int(rest)
    values = torch.linspace(-1.0, 1.0, n).numpy()
    return {
        "id": [f"r{i}" for i in range(n)],
        "a": values,
        "b": values**2,
        "target": (values > 0.1).astype("int64"),
    }


def _play(scene: Scene) -> Sequence[Figure]:
    batches = sum(1 for _ in scene.gradients())
    return [Figure("labels", "nothing", "AUC", 0.5, batches=batches)]


COUNTS = Attack("how many gradients come", "passive", _play, reads="gradients")

# One of each group but methods, which are those of the example.
ALL: dict[str, dict[str, Any]] = {
    "attacks": {"counts": COUNTS},
    "codecs": {"half_bits": HalfBits},
    "combinations": {"gated": GATED, "side_by_side": side_by_side},
    "encoders": {"wide": WIDE},
    "losses": {"tilted": TILTED},
    "metrics": {"quadratic": quadratic, "low_quadratic": LOW_QUADRATIC},
    "policies": {"no_gradients": NoGradients},
    "sources": {"counted": counted},
    "tops": {"deep": DEEP},
    "transforms": {"halved": halved, "rounded": Rounded, "cut": CUT},
}
