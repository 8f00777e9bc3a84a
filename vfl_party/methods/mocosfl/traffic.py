"""Lists MocoSFL's exchanges before it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vfl_common.bundle import StepKey
from vfl_party.methods.mocosfl.exchanges import bottoms, handout, latents
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import (
    StepPlan,
    build_bottom,
    get_averaged_parameters,
    halves_of,
)
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party


def traffic(party: Party, name: str, settings: MocoSFLSettings) -> Traffic:
    """See ``Method.traffic``."""
    if not party.recipe.passives:
        return Traffic()
    weights = None
    if not settings.frozen:
        bottom = build_bottom(party.recipe, settings)
        shared = get_averaged_parameters(
            bottom, None if party.recipe.preset == "released" else bottom
        )
        weights = bottoms(shared, StepPlan.of(party, name, settings).draw)
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
        drawn, takers = course.participants(round_), course.takers(round_)
        for step, _ in course.steps(round_):
            yield replace(Occurrence.of(of, step, **sizes), party=drawn)
        if weights is None:
            continue
        yield from _averages(Occurrence.of(weights, StepKey(name, round_, 0)), drawn, takers)


def _averages(
    swap: Occurrence, drawn: Sequence[str], takers: Sequence[str]
) -> Iterator[Occurrence]:
    """Yields the average that ends a round, for the parties that send their bottom models and for
    those that receive the mean.
    """
    both = tuple(holder for holder in drawn if holder in takers)
    if both:
        yield replace(swap, party=both)
    only_give = tuple(holder for holder in drawn if holder not in takers)
    if only_give:
        yield replace(swap, party=only_give, empty="down")
    only_take = tuple(holder for holder in takers if holder not in drawn)
    if only_take:
        yield replace(swap, party=only_take, empty="up")
