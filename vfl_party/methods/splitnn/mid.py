"""MID: the encoder of a passive party draws embeddings at random
(``vfl_party.models.layers``).
"""

from __future__ import annotations

from torch import nn

from vfl_common.errors import Code, InputError
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.models import StochasticEncoder
from vfl_party.phases.context import MakeEncoder, Party


def make_stochastic_encoder(settings: SplitNNSettings, make: MakeEncoder) -> nn.Module | None:
    """Makes a passive party's encoder if the phase has ``mid``, else returns None; see
    ``Method.encoder``.
    """
    if not settings.mid or make.party == make.recipe.active.name:
        return None
    return StochasticEncoder(make("encoder", width=2 * make.width), make.width, settings.mid)


def describe_protection(settings: SplitNNSettings) -> str:
    """Returns a text about how embeddings are protected; see ``Method.protects``."""
    return f"drawn by MID, λ = {settings.mid:g}" if settings.mid else ""


def check_encoder(party: Party, phase: str, settings: SplitNNSettings) -> None:
    """Raises InputError if the encoder of a passive party does not match the setting ``mid``."""
    encoder = party.models.get("encoder")
    if encoder is None:
        return
    weight = encoder.weight if isinstance(encoder, StochasticEncoder) else 0.0
    if weight == settings.mid or party.role == "active":
        return
    raise InputError(
        Code.CONFIG_INVALID,
        f"recipe: phases: {phase}: mid = {settings.mid:g}: all phases share one encoder, but the "
        f"encoder of {party.name} {f'has mid = {weight:g}' if weight else 'is not stochastic'}. "
        "Set the same mid in all splitnn phases, also in the run to start from, or remove mid.",
    )
