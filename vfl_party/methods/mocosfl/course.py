"""The course of a phase, the same at all parties: its steps, and the network with its cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.context import Party
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.models.halves import Halves, Tail
from vfl_party.models.init import seeded
from vfl_party.seeds import derive_seed


def halves_of(recipe: Recipe, settings: MocoSFLSettings) -> Halves:
    """Returns the network of a recipe. Raises InputError if its features are not the recipe's embedding."""
    halves = Halves(recipe.model.encoder, settings.image, settings.cut, settings.neck)
    if halves.features != recipe.model.embedding_size:
        text = f"model.embedding_size = {recipe.model.embedding_size}, but the network gives {halves.features} features"
        raise InputError(Code.CONFIG_INVALID, f"recipe: {text}; make them equal")
    return halves


def hands_out(recipe: Recipe) -> bool:
    """Whether the active party gives the others the bottom that they start with."""
    return recipe.start is not None and recipe.start.held_by == "active"


def build_bottom(recipe: Recipe, settings: MocoSFLSettings) -> nn.Sequential:
    """Builds the bottom with the same initial weights at all parties."""
    with seeded(derive_seed(recipe.seed, "init", "bottom")):
        return halves_of(recipe, settings).bottom()


def build_tail(recipe: Recipe, settings: MocoSFLSettings) -> Tail:
    """Builds the tail with its initial weights."""
    with seeded(derive_seed(recipe.seed, "init", "tail")):
        return halves_of(recipe, settings).tail(settings.width)


def averaged(bottom: nn.Module, momentum: nn.Module | None) -> dict[str, Tensor]:
    """Returns the parameters that the server averages; ``momentum``: the moving average, if it is averaged too."""
    found: dict[str, Tensor] = {f"online.{name}": each for name, each in bottom.named_parameters()}
    if momentum is not None:
        found |= {f"momentum.{name}": each for name, each in momentum.named_parameters()}
    return found


def momentum_of(module: nn.Module) -> nn.Module:
    """Makes the moving average of ``module`` as it is at first: a copy without gradient."""
    return deepcopy(module).requires_grad_(False)


def _check_handed_out(recipe: Recipe, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if, by the recipe's own words, the bottom that is handed out is not that of ``phase``."""
    for before in recipe.start.phases if recipe.start is not None else ():
        if before.kind != "mocosfl":
            continue
        theirs = MocoSFLSettings.model_validate(before.settings)
        for key in ("image", "cut", "bottleneck"):
            was, now = getattr(theirs, key), getattr(settings, key)
            if was != now:
                told = [f"{key} = {each}" if each is not None else f"no {key}" for each in (was, now)]
                text = f"recipe: phases: {phase}: start.phases has {told[0]}, and this phase {told[1]}"
                raise InputError(Code.CONFIG_INVALID, f"{text}; make them equal: it starts with that bottom")


@dataclass(frozen=True)
class Course:
    """What all parties know of a phase.

    ``holdings``: {party: {split: rows}} of the passive parties.
    """

    phase: str
    settings: MocoSFLSettings
    holdings: Mapping[str, Mapping[str, int]]
    hands_out: bool

    @classmethod
    def of(cls, party: Party, phase: str, settings: MocoSFLSettings) -> Course:
        """Returns the course as ``party`` knows it. Raises InputError if a party has less than a batch."""
        if settings.resist is not None:
            text = "resist is for a party that trains both halves alone, before the others get its bottom"
            raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {phase}: {text}; remove it here")
        for name, rows in party.holdings.items():
            if rows["local"] < settings.batch_size:
                text = f"batch_size = {settings.batch_size} is more than the {rows['local']} training rows of {name}"
                raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {phase}: {text}; take at most {rows['local']}")
        found = cls(phase, settings, party.holdings, hands_out(party.recipe))
        if found.hands_out:
            _check_handed_out(party.recipe, phase, settings)
        if party.holdings and settings.averages_per_epoch > found.steps_per_epoch:
            text = f"averages_per_epoch = {settings.averages_per_epoch}, but an epoch has {found.steps_per_epoch} steps"
            raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {phase}: {text}; take fewer")
        return found

    @property
    def note(self) -> str:
        """Words about what can be run, and is perhaps not meant; '' if there is nothing to say."""
        rows, found = sum(rows["local"] for rows in self.holdings.values()), []
        if self.settings.queue > rows:
            found.append(
                f"queue = {self.settings.queue:,} keys are more than the {rows:,} training rows of all parties, so a "
                "row's own keys are among its negatives"
            )
        if self.settings.frozen and not self.hands_out:
            found.append("frozen bottoms that no [start] gives stay as they are before this phase")
        return "; ".join(found)

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch: full batches of the party with most rows."""
        return max(rows["local"] for rows in self.holdings.values()) // self.settings.batch_size

    def numbers(self, round_: int) -> range:
        """Returns the numbers, counted through the phase, of the steps of a round."""
        epoch, part = divmod(round_, self.settings.averages_per_epoch)
        per, parts = self.steps_per_epoch, self.settings.averages_per_epoch
        return range(epoch * per + per * part // parts, epoch * per + per * (part + 1) // parts)

    def steps(self, round_: int) -> Iterator[tuple[StepKey, int]]:
        """Yields the key and the number of each step of a round. Peers say how many there are: no list is made."""
        first = 1 if self.hands_out and round_ == 0 else 0  # step 0 of the phase is the hand-out
        for batch, number in enumerate(self.numbers(round_), first):
            yield StepKey(self.phase, round_, batch), number

    def ends_epoch(self, round_: int) -> bool:
        """Whether a round is the last of its epoch."""
        return (round_ + 1) % self.settings.averages_per_epoch == 0
