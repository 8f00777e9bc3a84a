"""A transform: no row leaves with a larger L2 norm than ``norm``."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vfl.api import Filter, Section, Tensors, Transform


class RowClipSettings(Section):
    norm: Annotated[float, Field(gt=0.0)]


class RowClip(Filter):
    def __init__(self, settings: RowClipSettings) -> None:
        self._norm, self.text = settings.norm, f"rows clipped to {settings.norm:g}"

    def apply(self, tensors: Tensors) -> Tensors:
        return {
            name: torch.renorm(x.detach(), p=2, dim=0, maxnorm=self._norm)
            for name, x in tensors.items()
        }


TRANSFORM = Transform(RowClipSettings, RowClip)
