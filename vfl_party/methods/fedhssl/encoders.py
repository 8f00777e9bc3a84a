"""Makes the two encoders of a party and selects the encoder for fine-tuning."""

from __future__ import annotations

from torch import nn

from vfl_common.errors import Code, InputError
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.models import TwoTowers
from vfl_party.phases.context import MakeEncoder, Party

# The names of the two encoders, from which the seeds of their initial weights are also derived.
CROSS, LOCAL = "cross", "local"


def make_kept_encoder(settings: FedHSSLSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that later phases get, with its initial weights. See ``Method.encoder``."""
    match settings.keep_rule:
        case "cross":
            return make(CROSS)
        case "local":
            return make(LOCAL, shared=settings.aggregate)
        case rule:
            width = None
            if rule == "concat":
                width = _halve_width(settings, make)
            return TwoTowers(
                make(CROSS, width=width), make(LOCAL, shared=settings.aggregate, width=width), rule
            )


def select_encoder(encoder: nn.Module, tower: str) -> nn.Module:
    """Returns one of the two encoders that ``make_kept_encoder`` has made. See ``Method.part``."""
    if not isinstance(encoder, TwoTowers):
        raise ValueError(
            "the phases of that run do not hand on two encoders. Remove it, or set start.phases "
            "as in that run."
        )
    if encoder.rule == "concat":
        raise ValueError(
            "with keep = 'concat' an encoder gives half of the embedding. Remove it, or pretrain "
            "with keep = 'mean'."
        )
    return encoder.cross if tower == CROSS else encoder.local


def collect_encoders(party: Party, settings: FedHSSLSettings) -> dict[str, nn.Module]:
    """Returns {"cross": encoder, "local": encoder}, on the party's device: each encoder that is
    kept or trained.
    """
    make, encoder = party.make_encoder, party.models["encoder"]
    assert make is not None  # noqa: S101 - a party with features has it
    if isinstance(encoder, TwoTowers):
        return {CROSS: encoder.cross, LOCAL: encoder.local}
    if settings.keep_rule not in (CROSS, LOCAL):
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: an earlier phase hands on one encoder, but keep = "
            f"{settings.keep_rule!r} needs two. Give both phases the same keep.",
        )
    encoders: dict[str, nn.Module] = {settings.keep_rule: encoder}
    # In FedGSSL* and FedHSSL*, later phases do not get the cross-party encoder, so it is made here.
    if settings.cross and CROSS not in encoders:
        encoders[CROSS] = make(CROSS).to(party.device)
    if settings.local and LOCAL not in encoders:
        encoders[LOCAL] = make(LOCAL, shared=settings.aggregate).to(party.device)
    return encoders


def _halve_width(settings: FedHSSLSettings, make: MakeEncoder) -> int:
    width = make.width
    if width % 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: keep = {settings.keep!r} gives each encoder half of the embedding, "
            f"so model.embedding_size must be even (got {width}). Set an even number.",
        )
    return width // 2
