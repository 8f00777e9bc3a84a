"""Lists MocoSFL's exchanges before the phase begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from vfl_common.bundle import StepKey
from vfl_party.methods.mocosfl.exchanges import declare_bottoms, declare_handout, declare_latents
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import (
    StepPlan,
    build_bottom,
    build_halves,
    get_averaged_parameters,
)
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party


def traffic(party: Party, name: str, settings: MocoSFLSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    if not party.recipe.passives:
        return Traffic()
    weights = None
    if not settings.frozen:
        bottom = build_bottom(party.recipe, settings)
        shared = get_averaged_parameters(
            bottom, None if party.recipe.preset == "released" else bottom
        )
        weights = declare_bottoms(shared, StepPlan.of(party, name, settings).draw)
    return Traffic(_yield_occurrences(party, name, settings, weights))


def _yield_occurrences(
    party: Party, name: str, settings: MocoSFLSettings, weights: Exchange | None
) -> Iterator[Occurrence]:
    plan, latents_exchange = StepPlan.of(party, name, settings), declare_latents(settings)
    channels, height, width = build_halves(party.recipe, settings).latent
    sizes = {"rows": settings.batch_size, "channels": channels, "height": height, "width": width}
    if plan.hands_out:
        yield Occurrence.of(
            declare_handout(build_bottom(party.recipe, settings)), StepKey(name, 0, 0)
        )
    for round_ in range(settings.rounds):
        drawn, takers = plan.participants(round_), plan.takers(round_)
        for step, _ in plan.steps(round_):
            yield replace(Occurrence.of(latents_exchange, step, **sizes), party=drawn)
        if weights is None:
            continue
        yield from _yield_averages(Occurrence.of(weights, StepKey(name, round_, 0)), drawn, takers)


def _yield_averages(
    occurrence: Occurrence, drawn: Sequence[str], takers: Sequence[str]
) -> Iterator[Occurrence]:
    """Yields the average that ends a round, for the parties that send their bottom models and for
    the parties that receive the mean.
    """
    senders_and_takers = tuple(holder for holder in drawn if holder in takers)
    if senders_and_takers:
        yield replace(occurrence, party=senders_and_takers)
    only_give = tuple(holder for holder in drawn if holder not in takers)
    if only_give:
        yield replace(occurrence, party=only_give, empty="down")
    only_take = tuple(holder for holder in takers if holder not in drawn)
    if only_take:
        yield replace(occurrence, party=only_take, empty="up")
