"""Checks the recipe for a phase of MocoSFL before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.methods.mocosfl.settings import MocoSFLSettings

KIND = "mocosfl"
# Settings of the network that all phases must share.
_SAME = ("image", "cut", "bottleneck", "width")


def first_phase(recipe: Recipe) -> str | None:
    """Returns the name of the recipe's first phase of MocoSFL; None if it has none."""
    return next((phase.name for phase in recipe.phases if phase.kind == KIND), None)


def check_phase(recipe: Recipe, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if the network of a phase differs from that of other phases or parties."""
    for party in recipe.parties:
        if party.encoder is not None and party.encoder != recipe.model.encoder:
            raise other_encoder_error(f"recipe: parties.{party.name}.encoder")
    for where, theirs in _others(recipe, phase):
        for key in _SAME:
            was, now = getattr(theirs, key), getattr(settings, key)
            if was != now:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase}: {key} must be the same in all phases of mocosfl, "
                    f"which train one network (got {now}, and {was} in {where}). Make them equal.",
                )


def other_encoder_error(where: str) -> InputError:
    """Returns the error for a party that has its own encoder."""
    return InputError(
        Code.CONFIG_INVALID,
        f"{where}: mocosfl averages the bottom models, so all parties need the same network. "
        "Remove it, and set model.encoder.",
    )


def _others(recipe: Recipe, phase: str) -> Iterator[tuple[str, MocoSFLSettings]]:
    """Yields the place and the settings of each phase of MocoSFL before ``phase``; those of the
    earlier run first.
    """
    for other in recipe.start.phases if recipe.start is not None else ():
        if other.kind == KIND:
            yield "start.phases", MocoSFLSettings.model_validate(other.settings)
    for other in recipe.phases:
        if other.name == phase:
            return
        if other.kind == KIND:
            yield f"phase {other.name}", MocoSFLSettings.model_validate(other.settings)
