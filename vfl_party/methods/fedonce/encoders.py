"""What a party's encoder is where FedOnce trains it: with an output activation, or one linear map."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import MlpSettings
from vfl_common.errors import Code, InputError
from vfl_party.context import MakeEncoder
from vfl_party.methods.fedonce.settings import FedOnceSettings, Output


class WithOutput(nn.Module):
    """An encoder and what bounds its output: ``tanh``, or ``sphere``, every row scaled to norm 1.

    Part of the encoder, and not of the phase, because what is uploaded and predicted with has it too.
    """

    def __init__(self, body: nn.Module, output: Output) -> None:
        super().__init__()
        self.body, self.output = body, output

    def forward(self, *inputs: Tensor) -> Tensor:
        """inputs: as an encoder's; returns [B, D]."""
        z_BD: Tensor = self.body(*inputs)
        return z_BD.tanh() if self.output == "tanh" else F.normalize(z_BD)


def learnt_encoder(settings: FedOnceSettings, make: MakeEncoder) -> nn.Module:
    """The encoder that this phase trains, with its initial weights: see ``Method.encoder``."""
    if make.party == make.recipe.active.name and not settings.active:
        return make("encoder")
    if settings.objective == "pca":
        return _linear(make)
    columns = len(make.spec.shape) == 1
    output = settings.output or ("tanh" if settings.objective == "nat" and columns else "linear")
    encoder = make("encoder")
    return encoder if output == "linear" else WithOutput(encoder, output)


def _linear(make: MakeEncoder) -> nn.Module:
    """Flatten, then one linear layer, which PCA fills; split training after it goes on with it as with any other."""
    if make.spec.cardinalities:
        text = f"recipe: phases: objective = 'pca' needs numbers, and the encoder of {make.party} embeds categories"
        raise InputError(Code.CONFIG_INVALID, f"{text}; give it kind = 'mlp', which makes columns of them")
    return replace(make, settings=MlpSettings(hidden=()))("encoder")
