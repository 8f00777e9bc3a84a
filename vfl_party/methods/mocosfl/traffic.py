"""Lists MocoSFL's exchanges before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.bundle import StepKey
from vfl_party.methods.mocosfl.exchanges import bottoms, handout, latents
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import StepPlan, averaged, build_bottom, halves_of
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party


def traffic(party: Party, name: str, settings: MocoSFLSettings) -> Traffic:
    """See ``Method.traffic``."""
    if not party.recipe.passives:
        return Traffic()
    weights = None
    if not settings.frozen:
        bottom = build_bottom(party.recipe, settings)
        weights = bottoms(averaged(bottom, None if party.recipe.preset == "released" else bottom))
    return Traffic(_occurrences(party, name, settings, weights))


def _occurrences(
    party: Party, name: str, settings: MocoSFLSettings, weights: Exchange | None
) -> Iterator[Occurrence]:
    course, of = StepPlan.of(party, name, settings), latents(settings)
    channels, height, width = halves_of(party.recipe, settings).latent
    sizes = {"rows": settings.batch_size, "channels": channels, "height": height, "width": width}
    if course.hands_out:
        yield Occurrence.of(handout(build_bottom(party.recipe, settings)), StepKey(name, 0, 0))
    for round_ in range(settings.rounds):
        for step, _ in course.steps(round_):
            yield Occurrence.of(of, step, **sizes)
        if weights is not None:
            yield Occurrence.of(weights, StepKey(name, round_, 0))
