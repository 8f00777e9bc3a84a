"""The plan of a phase, which is the same at all parties: its steps, its exchanges, and the network
with its cut layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.stages import Draw
from vfl_party.base.devices import seed_torch
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.settings import MocoSFLSettings, check_phase, find_first_phase
from vfl_party.models.halves import Halves, Tail
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, Traffic, f32
from vfl_party.phases.context import Party


def declare_latents(settings: MocoSFLSettings) -> Exchange:
    """Declares the exchange of latents. A passive party sends the latents of two views: q from the
    bottom model, and k from its moving average. The active party returns the gradient of q.
    """
    shape = ("rows", "channels", "height", "width")
    up = Sent(Kind.EMBEDDING, {"q": f32(*shape), "k": f32(*shape)})
    # The gradient belongs to the rows of the party that sent q.
    down = Sent(Kind.GRADIENT, {"dq": f32(*shape)}, label_free=True, rows_of="receiver")
    return Exchange("latents", up, NOTHING if settings.frozen else down)


def declare_handout(bottom: nn.Module) -> Exchange:
    """Declares the exchange in which the active party sends its bottom model to all passive parties
    at the beginning.
    """
    sent = Sent(
        Kind.WEIGHTS,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in bottom.state_dict().items()},
        label_free=True,
    )
    return Exchange("handout", NOTHING, sent, when="once")


def declare_bottoms(shared: Mapping[str, Tensor], draw: Draw | None) -> Exchange:
    """Declares the exchange of bottom models. The drawn passive parties send theirs, and the
    parties that are drawn next get the mean. ``shared``: {name: tensor} of the weights.
    """
    sent = Sent(
        Kind.WEIGHTS, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shared.items()}
    )
    return Exchange(
        "bottoms", sent, sent, asks="server", passive=True, draw=draw, when="every round"
    )


# The number of times that an epoch may repeat a party's rows before a warning.
_MAX_REPEATS = 100


def build_halves(recipe: Recipe, settings: MocoSFLSettings) -> Halves:
    """Returns the network of a recipe, with its two halves. Raises InputError if the network does
    not match ``embedding_size`` or ``image``.
    """
    halves = Halves(recipe.model.encoder, settings.image, settings.cut, settings.neck)
    if halves.features != recipe.model.embedding_size:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: model.embedding_size must be the number of features of the network, "
            f"{halves.features} (got {recipe.model.embedding_size}). Set model.embedding_size = "
            f"{halves.features}.",
        )
    if not halves.fits:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: image is too small for this network (got {list(settings.image)}). "
            "Correct image, or increase the channels.",
        )
    return halves


def sends_initial_bottom(recipe: Recipe) -> bool:
    """Whether the active party sends the passive parties their initial bottom model in the first
    MocoSFL phase.
    """
    return recipe.start is not None and recipe.start.held_by == "active"


def build_bottom(recipe: Recipe, settings: MocoSFLSettings) -> nn.Sequential:
    """Builds the bottom model with the same initial weights at all parties."""
    with seed_torch(derive_seed(recipe.seed, "init", "bottom")):
        return build_halves(recipe, settings).bottom()


def tail(recipe: Recipe, settings: MocoSFLSettings, seed: int) -> Tail:
    """Builds the tail with its initial weights. ``seed``: the active party's secret seed."""
    with seed_torch(derive_seed(seed, "init", "tail")):
        return build_halves(recipe, settings).tail(settings.width)


def get_averaged_parameters(bottom: nn.Module, momentum: nn.Module | None) -> dict[str, Tensor]:
    """Returns {name: parameter} for the parameters that the server averages. ``momentum``: the
    moving average, if it is averaged too.
    """
    parameters: dict[str, Tensor] = {
        f"online.{name}": parameter for name, parameter in bottom.named_parameters()
    }
    if momentum is not None:
        parameters |= {
            f"momentum.{name}": parameter for name, parameter in momentum.named_parameters()
        }
    return parameters


def make_moving_average(module: nn.Module) -> nn.Module:
    """Makes the initial moving average of ``module``: a copy without gradients."""
    return deepcopy(module).requires_grad_(False)


def _make_draw(recipe: Recipe, phase: str, settings: MocoSFLSettings) -> Draw | None:
    """Returns the random choice of parties for each epoch, as in the released code; None for all
    parties.
    """
    parties = len(recipe.passives)
    number = max(1, round(settings.sample * parties))
    if number == parties:
        return None
    return Draw(number, settings.averages_per_epoch, derive_seed(recipe.seed, "draw", phase))


@dataclass(frozen=True)
class StepPlan:
    """The plan of a phase, which is the same at all parties.

    ``holdings``: {passive party: {split: number of rows}}. ``hands_out``: whether the phase begins
    with the active party's bottom model. ``untrained``: whether the bottom models are untrained.
    ``draw``: the choice of parties for each round; None: all.
    """

    phase: str
    settings: MocoSFLSettings
    holdings: Mapping[str, Mapping[str, int]]
    hands_out: bool
    untrained: bool
    draw: Draw | None = None

    @classmethod
    def of(cls, party: Party, phase: str, settings: MocoSFLSettings) -> StepPlan:
        """Makes the plan from the data of ``party``. Raises InputError if a party has fewer rows
        than a batch needs.
        """
        if settings.resist is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: resist is for a party that trains both halves alone, "
                "before other parties get its bottom model. Remove resist.",
            )
        for name, rows in party.rows.data.holdings.items():
            if rows["local"] < settings.batch_size:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase}: batch_size must be at most {rows['local']}, the "
                    f"number of training rows of {name} (got {settings.batch_size}). Set a "
                    "smaller batch_size.",
                )
        check_phase(party.recipe, phase, settings)
        is_first = find_first_phase(party.recipe) == phase
        sends_bottom = is_first and sends_initial_bottom(party.recipe)
        plan = cls(
            phase,
            settings,
            party.rows.data.holdings,
            sends_bottom,
            is_first and party.recipe.start is None,
            _make_draw(party.recipe, phase, settings),
        )
        if party.rows.data.holdings and settings.averages_per_epoch > plan.steps_per_epoch:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: averages_per_epoch must be at most "
                f"{plan.steps_per_epoch}, the number of steps of an epoch (got "
                f"{settings.averages_per_epoch}). Set a smaller averages_per_epoch.",
            )
        return plan

    @property
    def note(self) -> str:
        """A note on settings that work but may be unintended; '' without one."""
        rows, notes = sum(rows["local"] for rows in self.holdings.values()), list[str]()
        if self.settings.queue > rows:
            notes.append(
                f"queue = {self.settings.queue:,} keys are more than the {rows:,} training rows of "
                "all parties, so a row's own keys are among its negatives"
            )
        if self.settings.frozen and self.untrained:
            notes.append("the frozen bottom models are untrained, because [start] is missing")
        return "; ".join(notes)

    def warn_of_long_epoch(self, party: str) -> str:
        """Returns a warning that an epoch repeats a party's rows many times; '' if it does not."""
        name = max(self.holdings, key=lambda holder: self.holdings[holder]["local"])
        largest = self.holdings[name]["local"]
        times = largest // self.holdings[party]["local"]
        if times < _MAX_REPEATS:
            return ""
        return (
            f"phase {self.phase}: an epoch goes {times:,} times over the rows of {party}, because "
            f"{name} announces {largest:,} training rows; ask {name} if that is right"
        )

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch: the full batches of the party with the most rows."""
        return max(rows["local"] for rows in self.holdings.values()) // self.settings.batch_size

    @cached_property
    def parties(self) -> tuple[str, ...]:
        """The names of the passive parties."""
        return tuple(self.holdings)

    def participants(self, round_: int) -> tuple[str, ...]:
        """Returns the passive parties that take part in a round."""
        return self.parties if self.draw is None else self.draw.of(round_, self.parties)

    def takers(self, round_: int) -> tuple[str, ...]:
        """Returns the passive parties that get the average of a round: the participants of the next
        round, or all parties after the last round.
        """
        return self.parties if round_ + 1 == self.settings.rounds else self.participants(round_ + 1)

    def idle(self, party: str) -> tuple[int, ...]:
        """Returns the rounds in which a passive party neither trains nor gets the average."""
        if self.draw is None:
            return ()
        return tuple(
            round_
            for round_ in range(1, self.settings.rounds)
            if party not in self.participants(round_) and party not in self.takers(round_)
        )

    def numbers(self, round_: int) -> range:
        """Returns the numbers of the steps of a round, counted through the phase."""
        epoch, part = divmod(round_, self.settings.averages_per_epoch)
        steps, parts = self.steps_per_epoch, self.settings.averages_per_epoch
        return range(
            epoch * steps + steps * part // parts, epoch * steps + steps * (part + 1) // parts
        )

    def steps(self, round_: int) -> Iterator[tuple[StepKey, int]]:
        """Yields the key and the number of each step of a round. Steps are not listed in advance,
        because peers report how many rows they have, which may be a huge number.
        """
        # Step 0 of the phase sends the initial bottom model.
        first = 1 if self.hands_out and round_ == 0 else 0
        for batch, number in enumerate(self.numbers(round_), first):
            yield StepKey(self.phase, round_, batch), number

    def ends_epoch(self, round_: int) -> bool:
        """Whether a round is the last of its epoch."""
        return (round_ + 1) % self.settings.averages_per_epoch == 0


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
