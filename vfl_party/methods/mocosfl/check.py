"""Checks the recipe for a phase of MocoSFL before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.methods.mocosfl.settings import MocoSFLSettings

KIND = "mocosfl"
# The settings of the network that must be the same in all phases.
_NETWORK_KEYS = ("image", "cut", "bottleneck", "width")


def find_first_phase(recipe: Recipe) -> str | None:
    """Returns the name of the recipe's first phase of MocoSFL; None if it has none."""
    return next((phase.name for phase in recipe.phases if phase.kind == KIND), None)


def check_phase(recipe: Recipe, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if the network of a phase differs from the network of another phase or
    party.
    """
    for party in recipe.parties:
        if party.encoder is not None and party.encoder != recipe.model.encoder:
            raise other_encoder_error(f"recipe: parties.{party.name}.encoder")
    for where, other_settings in _yield_earlier_phases(recipe, phase):
        for key in _NETWORK_KEYS:
            other_value, value = getattr(other_settings, key), getattr(settings, key)
            if other_value != value:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase}: {key} must be the same in all phases of mocosfl, "
                    f"which train one network (got {value}, and {other_value} in {where}). Set "
                    "the same value.",
                )


def other_encoder_error(where: str) -> InputError:
    """Returns the error for a party that has its own encoder."""
    return InputError(
        Code.CONFIG_INVALID,
        f"{where}: mocosfl averages the bottom models, so all parties need the same network. "
        "Remove this encoder, and set model.encoder.",
    )


def _yield_earlier_phases(recipe: Recipe, phase: str) -> Iterator[tuple[str, MocoSFLSettings]]:
    """Yields the place and the settings of each MocoSFL phase before ``phase``, starting with the
    phases of the earlier run.
    """
    for earlier in recipe.start.phases if recipe.start is not None else ():
        if earlier.kind == KIND:
            yield "start.phases", MocoSFLSettings.model_validate(earlier.settings)
    for earlier in recipe.phases:
        if earlier.name == phase:
            return
        if earlier.kind == KIND:
            yield f"phase {earlier.name}", MocoSFLSettings.model_validate(earlier.settings)
