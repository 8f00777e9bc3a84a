"""Defines Method, the type that a method's folder or a plug-in exports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Generic, Literal, TypeVar, get_args

from torch import nn

from vfl_common.bundle import OLDEST
from vfl_common.config.base import Section
from vfl_common.config.models import GbdtTop
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.online import Online
from vfl_party.phases.scoring import Scorer
from vfl_party.phases.sets import Learnt
from vfl_party.privacy.plan import PrivatePhase

S = TypeVar("S", bound=Section)
# All settings that a loss can support; see ``MethodFacts.follows``.
WHOLE_TASK = frozenset(
    {"loss", "label_smoothing", "class_weight", "weight", "multilabel", "survival", "ranking"}
)


_MAX_IN_FLIGHT = 1024


@dataclass(frozen=True)
class MethodFacts:
    """What the settings of a phase imply for the run, the same at every party.

    Args:
        own_sizes: Whether the phase supports parties with embeddings of different widths.
        scores_own_rows: Whether the phase trains a head that scores rows of different parties, if
            ``rows`` is ``own``. Then ``Method.scores`` makes each party's side.
        noise: The standard deviation of the noise on the embeddings that a passive party sends for
            evaluation and prediction.
        protects: A phrase that says how the method's encoders protect their embeddings; '' if they
            do not.
        in_flight: The maximum number of concurrent exchanges of one passive party.
        follows: The settings of the recipe that the phase's loss supports: ``loss``,
            ``label_smoothing`` and ``class_weight`` of ``[task]``, ``weight`` of ``[data]``, and
            ``multilabel``, ``survival`` and ``ranking`` tasks. A recipe with another of these
            settings is refused. None if the phase does not train on labels.
        idle: The role that trains nothing in the phase; '' for none. In a phase without labels,
            parties without features train nothing either.
        late_policy: The policy for the embeddings of a passive party that is late or away. With
            ``wait``, the phase waits for the party.
        no_partial: The reason why the phase needs rows that all parties have; '' if it supports
            rows that only some parties have (``rows.partial``).
        one_process: The reason why a party must be a single process in the phase; '' if it may be
            several processes. It may be several if all passes through encoders are calls of
            ``Party.encode`` and ``encode.through`` with batches from the features or an
            augmentation. None for a reason that follows from ``Method.encodes``.
        learns: How the phase trains the model for missing parties; '' if it does not.
    """

    own_sizes: bool = False
    scores_own_rows: bool = False
    noise: float = 0.0
    protects: str = ""
    in_flight: int = 1
    follows: frozenset[str] | None = frozenset()
    idle: Literal["", "active", "passive"] = ""
    late_policy: LatePolicy = "wait"
    no_partial: str = "its kind needs rows that all parties have"
    one_process: str | None = None
    learns: Learnt = ""

    def __post_init__(self) -> None:
        """Checks the values, which a plug-in may give. Raises ValueError."""
        noise, in_flight, follows = self.noise, self.in_flight, self.follows
        right = {
            "noise": isinstance(noise, int | float) and 0 <= noise < math.inf,
            "in_flight": type(in_flight) is int and 1 <= in_flight <= _MAX_IN_FLIGHT,
            "follows": follows is None
            or (isinstance(follows, frozenset) and follows <= WHOLE_TASK),
            "idle": self.idle in ("", "active", "passive"),
            "late_policy": self.late_policy in get_args(LatePolicy),
            "learns": self.learns in get_args(Learnt),
            "protects": isinstance(self.protects, str),
            "no_partial": isinstance(self.no_partial, str),
            "one_process": self.one_process is None or isinstance(self.one_process, str),
        }
        for name, is_right in right.items():
            if not is_right:
                raise ValueError(
                    f"MethodFacts.{name}: is not a valid value (got {getattr(self, name)!r}). Give "
                    "one that its documentation lists."
                )


@dataclass(frozen=True)
class Method(Generic[S]):
    """A method: its settings and the functions that make a phase for each role. A subclass
    overrides the methods below where it differs from the defaults.

    A folder exports an instance as ``METHOD``, and an entry point of ``vfl.methods`` names one. The
    methods below return the same at every party, except where they take the party as an argument.

    Args:
        settings: The pydantic model of the phase's keys.
        active: Makes the active party's side from the party, the phase's name and its settings.
        passive: Makes a passive party's side from the same arguments.
        rows: The rows on which it trains: ``aligned`` rows, of which each party has other columns;
            or each party's ``own`` rows, with the same columns.
        model: The models that it trains: ``shared``, the encoder and the top model, which other
            phases use too; ``own``, the models that ``own_models`` makes; ``none``, models that are
            not kept after the phase. A phase whose model is not ``shared`` must be the recipe's
            only phase.
        trains: Whether the phase changes the models.
        encodes: Whether all its forward passes are calls of ``Party.encode`` and ``Party.outputs``.
            These apply the recipe's precision and use all of a party's GPUs. ``encode.through``
            also uses all GPUs, but does not apply the precision.
        protocol: The oldest protocol version (``PROTOCOL``) with which it can run,
            in training and prediction.
    """

    settings: type[S]
    active: Callable[[Party, str, S], Phase]
    passive: Callable[[Party, str, S], Phase]
    _: KW_ONLY
    rows: Literal["aligned", "own"] = "aligned"
    model: Literal["shared", "own", "none"] = "shared"
    trains: bool = True
    encodes: bool = False
    protocol: int = OLDEST

    def __init_subclass__(cls, **named: Any) -> None:
        """Refuses attributes that are fields of ``MethodFacts``: they would have no effect. Raises
        TypeError.
        """
        super().__init_subclass__(**named)
        for field in fields(MethodFacts):
            if field.name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{field.name}: is a field of MethodFacts (got an attribute of "
                    "Method). Return it from facts()."
                )

    def __post_init__(self) -> None:
        """Checks ``rows`` and ``model``. Raises ValueError."""
        if self.rows not in ("aligned", "own") or self.model not in ("shared", "own", "none"):
            raise ValueError(
                f"{type(self).__name__}: rows must be aligned or own, and model shared, own or "
                f"none (got {self.rows!r}, {self.model!r}). Correct them."
            )

    def facts(self, settings: S) -> MethodFacts:
        """Returns what the phase's settings imply for the run."""
        _ = settings
        return MethodFacts()

    def encoder(self, settings: S, make: MakeEncoder) -> nn.Module | None:
        """Makes the encoder that the phase trains and later phases use. Returns None to leave the
        choice to the next phase's method; without any choice, it is a single encoder.

        Raises InputError.
        """
        _ = settings, make
        return None

    def part(self, encoder: nn.Module, name: str) -> nn.Module | None:
        """Returns the part ``name`` of the encoder, for a run that starts with only this part.
        Returns None if this method's encoder has no parts.

        Raises ValueError with the problem and the fix.
        """
        _ = encoder, name
        return None

    def upper(self, settings: S, recipe: Recipe, seed: int) -> dict[str, nn.Module]:
        """Makes the active party's upper part of a network that is split between the parties, whose
        lower part is the encoder.

        Args:
            settings: The phase's settings.
            recipe: The whole recipe.
            seed: The root of the party's own seeds, see ``Party.own_seed``.

        Returns:
            {name: model}. ``tail`` computes the features for the top model. ``bottom``, if there is
            one, is initialized with the encoder of the run from which this run starts. Empty if the
            network is not split.
        """
        _ = settings, recipe, seed
        return {}

    def solo(self, settings: S, make: MakeEncoder) -> nn.Module | None:
        """Makes a model with which the active party scores rows without the other parties. The
        model maps the inputs of the party's encoder to outputs [B, O]. The phase trains the model,
        and the run keeps it. Returns None if the phase trains no such model.

        A method that overrides ``solo`` also trains on labelled rows that only the active party
        has.

        Raises InputError.
        """
        _ = settings, make
        return None

    def own_models(self) -> dict[str, nn.Module]:
        """Makes the models of a party, {name: model}, if ``model`` is ``own``."""
        return {}

    # -- what crosses
    # ----------------------------------------------------------------------

    def scores(self, party: Party, phase: str, settings: S) -> Scorer | None:
        """Makes a party's side of the joint prediction. Returns None for the default, in which all
        parties embed the same rows and the active party scores them with the top model.

        ``phase``: The name of the prediction's phase.
        """
        _ = party, phase, settings
        return None

    def online(self, party: Party, settings: S) -> Online | None:
        """Makes a party's side of scoring by id, for serving a model of ``own_models``. Returns
        None for the default, in which the parties embed and the active party scores, or if the
        model cannot be served.
        """
        _ = party, settings
        return None

    def traffic(self, party: Party, phase: str, settings: S) -> Traffic | None:
        """Returns the exchanges of the phase, for a forecast. Returns None if they are not known.

        Must not exchange anything, and must work for a party without features and models.
        """
        _ = party, phase, settings
        return None

    # -- how it trains
    # ----------------------------------------------------------------------

    def check_top(self, phase: str, settings: S, recipe: Recipe) -> None:
        """Raises InputError if the phase cannot train the recipe's top model. By default, phases
        that learn from labels cannot train trees.
        """
        learns = get_facts(self, settings).follows is not None
        if (
            learns
            and self.trains
            and self.model == "shared"
            and isinstance(recipe.model.top, GbdtTop)
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: this kind of phase cannot train trees (got "
                'model.top.kind = "gbdt"). Use a phase of kind "head", or another top.',
            )

    def private(self, phase: str, settings: S, recipe: Recipe, rows: int) -> PrivatePhase | None:
        """Returns the phase's privacy budget over ``rows`` training rows. Returns None if its
        settings have no ``dp``.
        """
        _ = phase, settings, recipe, rows
        return None

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        """Returns whether the recipe's ``preset`` affects the phase. ``written``: The phase's keys
        in the recipe.
        """
        _ = written
        return False


def get_facts(method: Method[S], settings: S) -> MethodFacts:
    """Returns the facts of a method with ``one_process`` filled in."""
    facts = method.facts(settings)
    if not isinstance(facts, MethodFacts):
        raise TypeError(
            f"{type(method).__name__}.facts: must return MethodFacts (got {type(facts).__name__}). "
            "Return one."
        )
    if facts.one_process is not None:
        return facts
    return replace(facts, one_process="" if method.encodes else "has its own forward passes")


def list_idle(facts: MethodFacts, recipe: Recipe) -> frozenset[str]:
    """Returns the parties that train nothing in a phase; see ``MethodFacts.idle``."""
    without_labels = facts.follows is None
    return frozenset(
        party.name
        for party in recipe.parties
        if (without_labels and not party.features)
        or facts.idle == ("active" if party.name == recipe.active.name else "passive")
    )


def need_data(party: Party, phase: str, what: str) -> None:
    """Raises InputError if a forecast knows only the number of rows, because the sizes of ``what``
    depend on the columns.
    """
    if party.rows.features is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"phase {phase}: the sizes of {what} depend on the parties' columns. Leave out --rows, "
            "and give a recipe or party file with data.",
        )
