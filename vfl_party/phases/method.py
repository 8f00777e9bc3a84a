"""Method: the type that a method's folder, or a plug-in, exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor, nn

from vfl_common.config.base import Section
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.link import OLDEST
from vfl_party.base.phase import Phase
from vfl_party.base.seeds import Rows
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.privacy.plan import PrivatePhase

S = TypeVar("S", bound=Section)


class Scores(Protocol):
    """One party's side of a joint prediction: ``scores`` at the active party, ``answer`` at the
    others.
    """

    def scores(self, round_: int, batch: int, rows: Rows) -> tuple[Tensor, int]:
        """Returns the outputs [N, O] for ``rows``, and the next batch number."""
        ...

    def answer(self, round_: int, batch: int, rows: Rows) -> int:
        """Helps to score ``rows``; returns the next batch number."""
        ...


@dataclass(frozen=True)
class Method(Generic[S]):
    """A method, as its folder or an entry point of ``vfl.methods`` exports it: settings, and a side
    for each role.

    ``encoder``: makes the encoder that the phase trains and later phases use. Without it, or if it
    returns None, the next phase's method is asked, and in the end it is a single encoder. ``part``:
    (that encoder, a name) -> one of its parts, for a run that starts with only that part; raises
    ValueError that says what is wrong and what to do. ``upper``: makes what the active party has of
    a network whose lower half is the encoder, {name: model}, from its settings, the recipe and the
    root of the party's own seeds (see ``Party.own_seed``): the top model gets the features of
    ``tail``; ``bottom``, if any, starts as the encoder of the run that this one starts from.
    ``own``: makes a model of every party that is no encoder and no top, {name: model}; its phase
    must be the only one. ``scores``: a party's side of the joint prediction with that model; the
    phase's name is that of the prediction's. ``rows``: what it trains on: ``aligned`` rows, of
    which each party has other columns, or each party's ``own``, with the same columns. ``noise``: σ
    of the noise on the embeddings that a passive party sends for evaluation and prediction, if any.
    ``protects``: how the encoders that it makes protect the embeddings that they give, in words; ''
    if they do not. ``private``: (the phase's name, its settings, the recipe, the number of training
    rows) -> the phase's privacy budget, if its settings have ``dp``. ``late``: what stands in for a
    passive party that is late or away, if the phase goes on without it. ``in_flight``: the most
    exchanges of one passive party that may be under way. ``trains``: whether rows leave a trace in
    the models. ``kept``: whether the party's models hold what it learns; if not, it must be the
    recipe's only phase. ``traffic``: the exchanges of the phase, for a forecast; the function
    exchanges nothing, and must work for a party without features and models. ``protocol``: the
    oldest protocol (``vfl_common.link.PROTOCOL``) with which it can be run, training and
    prediction. ``encodes``: all its forward passes are ``Party.encode`` and ``Party.outputs``,
    which apply the recipe's precision and use all of a party's GPUs.
    """

    settings: type[S]
    # Party, the phase's name, its settings.
    active: Callable[[Party, str, S], Phase]
    passive: Callable[[Party, str, S], Phase]
    encoder: Callable[[S, MakeEncoder], nn.Module | None] | None = None
    part: Callable[[nn.Module, str], nn.Module] | None = None
    upper: Callable[[S, Recipe, int], dict[str, nn.Module]] | None = None
    own: Callable[[], dict[str, nn.Module]] | None = None
    scores: Callable[[Party, str, S], Scores] | None = None
    rows: Literal["aligned", "own"] = "aligned"
    noise: Callable[[S], float] | None = None
    protects: Callable[[S], str] | None = None
    private: Callable[[str, S, Recipe, int], PrivatePhase | None] | None = None
    late: Callable[[S], LatePolicy] | None = None
    in_flight: Callable[[S], int] | None = None
    trains: bool = True
    kept: bool = True
    traffic: Callable[[Party, str, S], Traffic] | None = None
    protocol: int = OLDEST
    encodes: bool = False


def silent(_party: Party, _phase: str, _settings: Section) -> Traffic:
    """Returns the traffic of a phase in which every party works alone."""
    return Traffic()


def need_data(party: Party, phase: str, what: str) -> None:
    """Raises InputError if only the number of rows is known, but the sizes of ``what`` depend on
    the columns.
    """
    if party.features is None:
        text = f"phase {phase}: the sizes of {what} depend on the parties' columns"
        raise InputError(
            Code.CONFIG_INVALID,
            f"{text}: leave out --rows, and give a recipe or party file with data",
        )
