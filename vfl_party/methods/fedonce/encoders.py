"""Makes the encoder that FedOnce trains: with an output activation, or as one linear layer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import MlpSettings
from vfl_common.errors import Code, InputError
from vfl_party.methods.fedonce.settings import FedOnceSettings, Output
from vfl_party.phases.context import MakeEncoder


class BoundedEncoder(nn.Module):
    """An encoder with a bound on its output: ``tanh``, or ``sphere``, which scales every row to
    norm 1.

    The bound is part of the encoder, not of the phase, because uploads and predictions need it too.
    """

    def __init__(self, body: nn.Module, output: Output) -> None:
        super().__init__()
        self.body, self.output = body, output

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, D]."""
        z_BD: Tensor = self.body(*inputs)
        return z_BD.tanh() if self.output == "tanh" else F.normalize(z_BD)


def make_learnt_encoder(settings: FedOnceSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that this phase trains, with its initial weights. See
    ``Method.encoder``.
    """
    if make.party == make.recipe.active.name and not settings.active:
        return make("encoder")
    if settings.objective == "pca":
        return _make_linear(make)
    is_table = len(make.spec.shape) == 1
    output = settings.output or ("tanh" if settings.objective == "nat" and is_table else "linear")
    encoder = make("encoder")
    return encoder if output == "linear" else BoundedEncoder(encoder, output)


def _make_linear(make: MakeEncoder) -> nn.Module:
    """Makes an encoder that flattens its input and has one linear layer, which PCA fills and later
    split training updates.
    """
    if make.spec.cardinalities:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: objective = 'pca' needs numeric inputs, but the encoder of "
            f"{make.party} embeds categories. Set its encoder to kind = 'mlp', which makes "
            "columns of them.",
        )
    return replace(make, settings=MlpSettings(hidden=()))("encoder")
