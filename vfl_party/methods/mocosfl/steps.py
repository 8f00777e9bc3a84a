"""The schedule of a phase, the same at all parties: its steps, and the network with its cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.stages import Draw
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.check import check_phase, first_phase
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.models.halves import Halves, Tail
from vfl_party.models.init import seed_torch
from vfl_party.phases.context import Party

# An epoch that goes this many times over a party's rows causes a warning.
_LONGER = 100


def halves_of(recipe: Recipe, settings: MocoSFLSettings) -> Halves:
    """Returns the network of a recipe. Raises InputError if it does not match ``embedding_size`` or
    ``image``.
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


def hands_out(recipe: Recipe) -> bool:
    """Whether the active party sends the others their initial bottom model in the first phase of
    MocoSFL.
    """
    return recipe.start is not None and recipe.start.held_by == "active"


def build_bottom(recipe: Recipe, settings: MocoSFLSettings) -> nn.Sequential:
    """Builds the bottom model with the same initial weights at all parties."""
    with seed_torch(derive_seed(recipe.seed, "init", "bottom")):
        return halves_of(recipe, settings).bottom()


def build_tail(recipe: Recipe, settings: MocoSFLSettings, seed: int) -> Tail:
    """Builds the tail with its initial weights. ``seed``: the active party's own."""
    with seed_torch(derive_seed(seed, "init", "tail")):
        return halves_of(recipe, settings).tail(settings.width)


def get_averaged_parameters(bottom: nn.Module, momentum: nn.Module | None) -> dict[str, Tensor]:
    """Returns {name: parameter} of the parameters that the server averages. ``momentum``: the
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


def momentum_of(module: nn.Module) -> nn.Module:
    """Makes the moving average of ``module`` as it is at first: a copy without gradient."""
    return deepcopy(module).requires_grad_(False)


def _draw(recipe: Recipe, phase: str, settings: MocoSFLSettings) -> Draw | None:
    """Returns the draw of the parties of each epoch, as in the released code; None for all."""
    parties = len(recipe.passives)
    number = max(1, round(settings.sample * parties))
    if number == parties:
        return None
    return Draw(number, settings.averages_per_epoch, derive_seed(recipe.seed, "draw", phase))


@dataclass(frozen=True)
class StepPlan:
    """The plan of a phase, which all parties know.

    ``holdings``: {party: {split: rows}} of the passive parties. ``hands_out``: the phase begins
    with the active party's bottom model. ``untrained``: whether the bottom models are untrained.
    ``draw``: the parties of each round; None: all.
    """

    phase: str
    settings: MocoSFLSettings
    holdings: Mapping[str, Mapping[str, int]]
    hands_out: bool
    untrained: bool
    draw: Draw | None = None

    @classmethod
    def of(cls, party: Party, phase: str, settings: MocoSFLSettings) -> StepPlan:
        """Returns the plan as ``party`` knows it. Raises InputError if a party has fewer rows than
        a batch.
        """
        if settings.resist is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: resist is for a party that trains both halves alone, "
                "before the others get its bottom model. Remove resist.",
            )
        for name, rows in party.data.holdings.items():
            if rows["local"] < settings.batch_size:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: {phase}: batch_size must be at most {rows['local']}, the "
                    f"number of training rows of {name} (got {settings.batch_size}). Set a "
                    "smaller batch_size.",
                )
        check_phase(party.recipe, phase, settings)
        first = first_phase(party.recipe) == phase
        begins = first and hands_out(party.recipe)
        plan = cls(
            phase,
            settings,
            party.data.holdings,
            begins,
            first and party.recipe.start is None,
            _draw(party.recipe, phase, settings),
        )
        if party.data.holdings and settings.averages_per_epoch > plan.steps_per_epoch:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: averages_per_epoch must be at most "
                f"{plan.steps_per_epoch}, the number of steps of an epoch (got "
                f"{settings.averages_per_epoch}). Set a smaller averages_per_epoch.",
            )
        return plan

    @property
    def note(self) -> str:
        """Notes on settings that work but are perhaps unintended, or ''."""
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
        """Returns a warning that an epoch is far longer than a party's own rows; '' if it is
        not.
        """
        name = max(self.holdings, key=lambda holder: self.holdings[holder]["local"])
        largest = self.holdings[name]["local"]
        times = largest // self.holdings[party]["local"]
        if times < _LONGER:
            return ""
        return (
            f"phase {self.phase}: an epoch goes {times:,} times over the rows of {party}, because "
            f"{name} announces {largest:,} training rows; ask {name} if that is right"
        )

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch: full batches of the party with most rows."""
        return max(rows["local"] for rows in self.holdings.values()) // self.settings.batch_size

    @cached_property
    def parties(self) -> tuple[str, ...]:
        """The passive parties."""
        return tuple(self.holdings)

    def participants(self, round_: int) -> tuple[str, ...]:
        """Returns the passive parties that take part in a round."""
        return self.parties if self.draw is None else self.draw.of(round_, self.parties)

    def takers(self, round_: int) -> tuple[str, ...]:
        """Returns the passive parties that get the average of a round: those of the next one;
        after the last round, all.
        """
        return self.parties if round_ + 1 == self.settings.rounds else self.participants(round_ + 1)

    def idle(self, party: str) -> tuple[int, ...]:
        """Returns the rounds in which a passive party does nothing at all."""
        if self.draw is None:
            return ()
        return tuple(
            round_
            for round_ in range(1, self.settings.rounds)
            if party not in self.participants(round_) and party not in self.takers(round_)
        )

    def numbers(self, round_: int) -> range:
        """Returns the numbers, counted through the phase, of the steps of a round."""
        epoch, part = divmod(round_, self.settings.averages_per_epoch)
        per, parts = self.steps_per_epoch, self.settings.averages_per_epoch
        return range(epoch * per + per * part // parts, epoch * per + per * (part + 1) // parts)

    def steps(self, round_: int) -> Iterator[tuple[StepKey, int]]:
        """Yields the key and the number of each step of a round; an iterator, because peers decide
        how many there are.
        """
        # Step 0 of the phase is the hand-out.
        first = 1 if self.hands_out and round_ == 0 else 0
        for batch, number in enumerate(self.numbers(round_), first):
            yield StepKey(self.phase, round_, batch), number

    def ends_epoch(self, round_: int) -> bool:
        """Whether a round is the last of its epoch."""
        return (round_ + 1) % self.settings.averages_per_epoch == 0
