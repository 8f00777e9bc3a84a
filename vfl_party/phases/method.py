"""Method: what a method's folder, or a plug-in, exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import nn

from vfl_common.config.base import Section
from vfl_common.config.models import GbdtTop
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.link import OLDEST
from vfl_party.base.phase import Phase
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.online import Online
from vfl_party.phases.scoring import Scorer
from vfl_party.phases.sets import Learnt
from vfl_party.privacy.plan import PrivatePhase

S = TypeVar("S", bound=Section)
# All that a loss can follow; see ``Method.follows``.
WHOLE_TASK = frozenset(
    {"loss", "label_smoothing", "class_weight", "weight", "multilabel", "survival", "ranking"}
)


@dataclass(frozen=True)
class Method(Generic[S]):
    """A method: its settings and a side for each role. A subclass overrides what it does otherwise.

    Its folder exports an instance as ``METHOD``; an entry point of ``vfl.methods`` names one.
    What a method says is equal at every party, unless it is about the party itself.

    Args:
        settings: the model of the phase's keys.
        active: makes the active party's side from the party, the phase's name and its settings.
        passive: makes a passive party's side, from the same.
        rows: what it trains on: ``aligned`` rows, of which each party has other columns; or each
            party's ``own`` rows, with the same columns.
        model: what it trains: ``shared``, the encoder and the top model, with which other phases
            work too; ``own``, the models that ``own_models`` makes; ``none``, nothing that is kept
            after the phase. A phase whose model is not shared is the recipe's only one.
        trains: whether rows leave a trace in the models.
        encodes: whether all its forward passes are ``Party.encode`` and ``Party.outputs``. These
            apply the recipe's precision and use all of a party's GPUs; so does ``Party.through``,
            except for the precision.
        protocol: the oldest protocol (``vfl_common.link.PROTOCOL``) with which it can be run,
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

    def __new__(cls, *args: Any, **named: Any) -> Method[S]:
        """Makes the instance. Raises TypeError if it is given what a subclass overrides now."""
        if len(args) > len(_PLACES):
            raise TypeError(
                f"{cls.__name__} takes {', '.join(_PLACES)} by place, and all else by name; "
                "override its methods in a subclass"
            )
        moved = [name for name in named if name in _FORMER or callable(getattr(cls, name, None))]
        if moved:
            name = _FORMER.get(moved[0], f"override {moved[0]}() in a subclass of Method")
            raise TypeError(f"{cls.__name__} takes no {moved[0]!r} any more; {name}")
        return super().__new__(cls)

    def encoder(self, settings: S, make: MakeEncoder) -> nn.Module | None:
        """Makes the encoder that the phase trains and later phases use. None: the next phase's
        method is asked, and at last it is a single encoder.

        Raises InputError.
        """
        _ = settings, make
        return None

    def part(self, encoder: nn.Module, name: str) -> nn.Module | None:
        """Returns the part ``name`` of the encoder, for a run that starts with that part alone.
        None: this method's encoder has no parts.

        Raises ValueError that says what is wrong and what to do.
        """
        _ = encoder, name
        return None

    def upper(self, settings: S, recipe: Recipe, seed: int) -> dict[str, nn.Module]:
        """Makes what the active party has of a network whose lower half is the encoder.

        Args:
            settings: the phase's.
            recipe: the whole recipe.
            seed: the root of the party's own seeds, see ``Party.own_seed``.

        Returns:
            {name: model}: the top model gets the features of ``tail``; ``bottom``, if there is
            one, starts as the encoder of the run that this one starts from. Empty: the network is
            not cut.
        """
        _ = settings, recipe, seed
        return {}

    def solo(self, settings: S, make: MakeEncoder) -> nn.Module | None:
        """Makes the model with which the active party scores rows by itself, from the inputs of its
        encoder to outputs [B, O]; the phase trains it, and the run keeps it. None: it makes none.

        A method that overrides it also learns from the labels of rows that only the active party
        has.

        Raises InputError.
        """
        _ = settings, make
        return None

    def own_models(self) -> dict[str, nn.Module]:
        """Makes the models of every party, {name: model}, if ``model`` is ``own``."""
        return {}

    def own_sizes(self, settings: S) -> bool:
        """Returns whether the phase works if parties have embeddings of several widths."""
        _ = settings
        return False

    # -- what crosses
    # ----------------------------------------------------------------------

    def scores(self, party: Party, phase: str, settings: S) -> Scorer | None:
        """Makes a party's side of the joint prediction, if it is not that of shared encoders and a
        top model. None: the parties embed the same rows, and the active party scores.

        ``phase``: the name of the prediction's phase.
        """
        _ = party, phase, settings
        return None

    def scores_own_rows(self, settings: S) -> bool:
        """Returns whether the phase leaves a head that scores rows which different parties hold, if
        ``rows`` is ``own``; ``scores`` then makes each party's side.
        """
        _ = settings
        return False

    def online(self, party: Party, settings: S) -> Online | None:
        """Makes a party's side of the scoring by id, while a model of ``own_models`` is served.
        None: the parties embed, and the active party scores, or the model cannot be served.
        """
        _ = party, settings
        return None

    def noise(self, settings: S) -> float:
        """Returns σ of the noise on the embeddings that a passive party sends for evaluation and
        prediction.
        """
        _ = settings
        return 0.0

    def protects(self, settings: S) -> str:
        """Says how the encoders that it makes protect the embeddings that they give; '' if they
        do not.
        """
        _ = settings
        return ""

    def traffic(self, party: Party, phase: str, settings: S) -> Traffic | None:
        """Returns the exchanges of the phase, for a forecast. None: they are not known.

        It exchanges nothing, and works for a party without features and models.
        """
        _ = party, phase, settings
        return None

    def in_flight(self, settings: S) -> int:
        """Returns how many exchanges of one passive party may be under way."""
        _ = settings
        return 1

    # -- how it trains
    # ----------------------------------------------------------------------

    def follows(self, settings: S) -> frozenset[str] | None:
        """Returns what its loss follows of the recipe beyond the kind of the task: ``loss``,
        ``label_smoothing`` and ``class_weight`` of ``[task]``, ``weight`` of ``[data]``, and
        ``multilabel``, ``survival`` and ``ranking`` tasks.

        A recipe with anything else is refused. None: the phase trains without labels, or not.
        """
        _ = settings
        return frozenset()

    def check_top(self, phase: str, settings: S, recipe: Recipe) -> None:
        """Raises InputError if the phase cannot train the recipe's top model. By default no phase
        that learns from labels can grow trees.
        """
        learns = self.trains and self.model == "shared" and self.follows(settings) is not None
        if learns and isinstance(recipe.model.top, GbdtTop):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: this kind of phase cannot grow trees (got "
                'model.top.kind = "gbdt"). Use a phase of kind "head", or another top.',
            )

    def idle(self, settings: S, recipe: Recipe) -> frozenset[str]:
        """Returns the parties that train nothing in the phase. By default those without features,
        in a phase that trains without labels.
        """
        if self.follows(settings) is not None:
            return frozenset()
        return frozenset(party.name for party in recipe.parties if not party.features)

    def private(self, phase: str, settings: S, recipe: Recipe, rows: int) -> PrivatePhase | None:
        """Returns the phase's privacy budget over ``rows`` training rows. None: its settings have
        no ``dp``.
        """
        _ = phase, settings, recipe, rows
        return None

    def late_policy(self, settings: S) -> LatePolicy:
        """Returns what stands in for a passive party that is late or away. ``wait``: the phase
        waits for it.
        """
        _ = settings
        return "wait"

    def no_partial(self, settings: S) -> str:
        """Says why the phase needs rows that all parties hold; '' if it can do with rows that only
        some of them hold (``rows.partial``).
        """
        _ = settings
        return "its kind needs rows that all parties hold"

    def one_process(self, settings: S) -> str:
        """Says why a party must be one process in the phase; '' if it may be several: if all passes
        through encoders are ``Party.encode`` and ``Party.through``, of batches that its features or
        augmentation gave.
        """
        _ = settings
        return "" if self.encodes else "has its own forward passes"

    def learns(self, settings: S) -> Learnt:
        """Returns what the phase teaches the model to do without a party; '' for nothing."""
        _ = settings
        return ""

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        """Returns whether the recipe's ``preset`` changes what the phase does. ``written``: the
        phase's keys, as the recipe has them.
        """
        _ = written
        return False


_PLACES = ("settings", "active", "passive")
# What the constructor took before, in addition to the names of today's methods.
_FORMER = {
    "own": 'give model = "own", and override own_models() in a subclass of Method',
    "late": "override late_policy() in a subclass of Method",
    "kept": 'give model = "none" instead of kept = False',
}


def need_data(party: Party, phase: str, what: str) -> None:
    """Raises InputError if only the number of rows is known, but the sizes of ``what`` depend on
    the columns.
    """
    if party.features is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"phase {phase}: the sizes of {what} depend on the parties' columns. Leave out --rows, "
            "and give a recipe or party file with data.",
        )
