"""A rehearsal runs all parties in one process, records the messages, and plays attacks on them.

It needs the rows of all parties on one machine. Use it for research, or with data that resemble the
real data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vfl.library.recipe import Recipe
from vfl.library.run import Run
from vfl.library.simulate import carry_out, in_process
from vfl.simulation.inprocess import Attach
from vfl_common.bundle import Kind
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names
from vfl_leaks import attacks as kinds
from vfl_leaks.report.gaps import find_gaps
from vfl_leaks.scene.build import Scenes
from vfl_leaks.scene.record import Seen
from vfl_leaks.scene.recording import ROW_TENSORS, Recording
from vfl_leaks.scene.scene import (
    Attack,
    Figure,
    Scene,
    UnfitError,
)
from vfl_leaks.wiretap.sizes import MessageSizes, read_sizes
from vfl_leaks.wiretap.times import Times, read_times
from vfl_party.assembly.party import Assembled
from vfl_party.base.plugins import describe_failure
from vfl_party.outbound.declared import Role
from vfl_party.outbound.exchange import Answering, Asking

log = logging.getLogger(__name__)

# The data that attacks by each role infer.
_ASSETS: dict[Role, str] = {"passive": "labels", "active": "columns"}


@dataclass(frozen=True)
class Played:
    """The figures of one attack by one attacker in one run.

    ``why_not``: the reason if the attack could not be played.
    """

    attack: str
    about: str
    attacker: str
    figures: tuple[Figure, ...] = ()
    why_not: str = ""


class Rehearsal:
    """Records a run, then plays attacks.

    Args:
        folder: the folder for the recorded messages; it must exist and be empty.
        every: rounds 0, every, 2 x every and so on of each phase are recorded.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        self.recording = Recording(folder, every)
        self.parties = self.recording.parties
        self._scenes = Scenes(self.recording)

    def attach(self, name: str, party: Assembled) -> None:
        """Records all exchanges of a party's phases; called once the party is assembled.

        Raises InputError if the parties have different rows.
        """
        if party.party.recipe.rows.partial:
            raise InputError(
                Code.CONFIG_INVALID,
                "recipe: rows.partial: a rehearsal needs rows that all parties have. Remove it "
                "from the recipe.",
            )
        self.recording.attach(name, party)
        self._scenes.begin(name)

    def scene(self, attacker: str, seed: int) -> Scene:
        """Returns the scene of ``attacker``. ``seed``: the seed of the attacks."""
        return self._scenes.build(attacker, seed)

    def play(
        self, attacks: Sequence[str], seed: int, *, tell: Callable[[str], None] = lambda _text: None
    ) -> list[Played]:
        """Plays each attack from the view of every party that has the attacker's role.

        ``tell``: called with a sentence before each attack. Raises InputError for an unknown
        attack.
        """
        played = []
        for number, name in enumerate(attacks, 1):
            attack = kinds.load(name, "attacks")
            tell(f"attack {number} of {len(attacks)}: {name}")
            available = {
                data
                for (role, _), readable in self._readable().items()
                if role == attack.by
                for data in readable
            }
            available |= self._encoders() | self._weights_shared()
            for attacker in self._attackers(attack):
                if attack.reads and attack.reads not in available:
                    played.append(
                        Played(name, attack.about, attacker, why_not=_explain_missing(attack.reads))
                    )
                    continue
                try:
                    figures = _check_figures(attack.play(self.scene(attacker, seed)))
                    played.append(Played(name, attack.about, attacker, figures))
                except UnfitError as why:
                    played.append(Played(name, attack.about, attacker, why_not=str(why)))
                except Exception as error:
                    # If a plug-in's attack fails, the figures of the other attacks are kept.
                    log.exception("the attack %s failed", name)
                    why_not = f"it failed {describe_failure(error)}. Correct the attack."
                    played.append(Played(name, attack.about, attacker, why_not=why_not))
        return played

    def sizes(self) -> list[MessageSizes]:
        """Returns what the sizes of embeddings and gradients in the recorded rounds reveal to any
        observer of the network.
        """
        seen: dict[int, list[Seen]] = {}
        for message, rows in self.recording.seen:
            seen.setdefault(message.payload_bytes // max(1, rows), []).append(message)
        return [
            line
            for row_bytes, messages in seen.items()
            if row_bytes
            for line in read_sizes(messages, row_bytes)
        ]

    def times(self) -> list[Times]:
        """Returns what the times of all messages reveal to any observer of the network."""
        phases = [phase for party in self.parties.values() for phase in party.phases]
        return read_times(self.recording.passed, {phase.name: phase.rounds for phase in phases})

    def unknown(self, attacks: Sequence[str]) -> list[str]:
        """Returns a sentence for each attacker's role with phases that none of ``attacks``
        supports.
        """
        loaded, sentences = [kinds.load(name, "attacks") for name in attacks], []
        for role, assets in _ASSETS.items():
            reads = {attack.reads for attack in loaded if attack.by == role}
            phases = [
                kind
                for (receiver, kind), readable in self._readable().items()
                if receiver == role and not (readable | self._encoders()) & reads
            ]
            if reads and phases:
                sentences.append(
                    f"None of the chosen attacks on {assets} supports {list_names(phases)}. See "
                    "docs/explanation/security.md."
                )
        return sentences

    def list_gaps(self) -> list[str]:
        """Returns a sentence for each transform that protects only some of the exchanges of
        embeddings or gradients.
        """
        return find_gaps(party.party for party in self.parties.values())

    def _attackers(self, attack: Attack) -> list[str]:
        """Returns the names of the parties that can play an attack."""
        parties = [party.party for party in self.parties.values()]
        if attack.by == "server":
            return [parties[0].recipe.server]
        return [party.name for party in parties if attack.by in ("party", party.role)]

    def _weights_shared(self) -> set[str]:
        """Returns {"weights"} if a phase shares weights that can be overheard."""
        shared = [
            key
            for party in self.parties.values()
            for key, opened in party.party.exchanges.items()
            if _shares_weights(opened)
        ]
        return (
            {"weights"}
            if any(
                (phase, exchange) in shared
                for phases in self.recording.phases.values()
                for phase, facts in phases.items()
                for exchange in facts.overheard
            )
            else set()
        )

    def _encoders(self) -> set[str]:
        """Returns {"encoder"} if a phase has trained an encoder."""
        return {"encoder"} if any(map(self._scenes.is_trained, self.parties)) else set()

    def _readable(self) -> dict[tuple[Role, str], set[str]]:
        """Returns {(receiver's role, kind of a phase): the data that attacks can read}, for phases
        that send gradients or embeddings.

        The data are the phase's kind, and ``gradients`` or ``embeddings`` if they were received and
        their rows are known.
        """
        readable_by_kind: dict[tuple[Role, str], set[str]] = {}
        kind_of_phase = {
            phase.name: phase.kind
            for party in self.parties.values()
            for phase in party.party.recipe.phases
        }
        for party in self.parties.values():
            receiver = party.party
            for (phase, _), opened in receiver.exchanges.items():
                bundle = opened.exchange.down if receiver.role == "passive" else opened.exchange.up
                if (
                    opened.exchange.asks == "active"
                    and bundle.kind in ROW_TENSORS
                    and bundle.tensors
                    and phase in kind_of_phase
                ):
                    readable_by_kind.setdefault(
                        (receiver.role, kind_of_phase[phase]), {kind_of_phase[phase]}
                    )
        seen: set[tuple[str, str, str]] = set()
        for key in self.recording.rows.keys():  # noqa: SIM118 - not a dict
            place = (key.phase, key.exchange, key.receiver)
            if key.meant or place in seen or key.phase not in kind_of_phase:
                continue
            seen.add(place)
            party = self.parties[key.receiver]
            if self.recording.rows_of(key) is not None:
                role, exchange = (
                    party.party.role,
                    party.party.exchanges[key.phase, key.exchange].exchange,
                )
                kind = (exchange.down if role == "passive" else exchange.up).kind.label
                readable_by_kind.setdefault(
                    (role, kind_of_phase[key.phase]), {kind_of_phase[key.phase]}
                ).add(f"{kind}s")
        return readable_by_kind


def rehearse(
    recipe: Recipe,
    data: Mapping[str, Any],
    out: Path,
    attach: Attach,
    *,
    quiet: bool,
    secrets: Mapping[str, bytes] | None = None,
) -> Run:
    """Runs a recipe in this process, as ``simulate`` does.

    Args:
        recipe: the recipe.
        data: see ``simulate``.
        out: the folder of runs.
        attach: called with each party once it is assembled.
        quiet: whether to show no progress.
        secrets: see ``run_in_process``.

    Raises VflError: bad input, or a run that failed.
    """
    execute = partial(in_process, quiet, None, attach=attach, secrets=secrets)
    return carry_out(recipe, data, execute, baseline=None, out=out)


def _check_figures(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Returns the figures. Raises ValueError if a value is not finite, because NaN cannot be
    ranked.
    """
    for figure in figures:
        if not math.isfinite(figure.value):
            raise ValueError(f"its figure of {figure.of} is {figure.value}, which is not finite")
    return tuple(figures)


def _shares_weights(opened: Asking | Answering) -> bool:
    return opened.exchange.asks == "server" and opened.exchange.up.kind is Kind.WEIGHTS


def _explain_missing(reads: str) -> str:
    if reads == "weights":
        return "no phase shares weights that can be overheard"
    if reads == "encoder":
        return "no phase trains an encoder"
    rows = reads in ("gradients", "embeddings")
    return (
        f"the attacker received no {reads} with known rows"
        if rows
        else f"the recipe has no phase of kind {reads}"
    )
