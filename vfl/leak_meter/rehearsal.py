"""A rehearsal runs all parties in one process, records what each receives, and plays attacks on it.

It needs the rows of all parties on one machine, so it is for research, and for data that resemble
the real ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vfl.leak_meter import attacks as kinds
from vfl.leak_meter.report.gaps import gaps
from vfl.leak_meter.scene.build import Scenes
from vfl.leak_meter.scene.record import Seen
from vfl.leak_meter.scene.recording import ROW_TENSORS, Recording
from vfl.leak_meter.scene.scene import (
    Attack,
    Figure,
    Scene,
    UnfitError,
)
from vfl.leak_meter.wiretap.sizes import MessageSizes, read_sizes
from vfl.leak_meter.wiretap.times import Times, read_times
from vfl.library.recipe import Recipe
from vfl.library.run import Run
from vfl.library.simulate import carry_out, in_process
from vfl.simulation.inprocess import Attach
from vfl_common.bundle import Kind
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names
from vfl_party.assembly.party import Assembled
from vfl_party.base.plugins import where_it_failed
from vfl_party.outbound.declared import Role
from vfl_party.outbound.exchange import Answering, Asking

log = logging.getLogger(__name__)

# What attacks by each role read.
_ASSETS: dict[Role, str] = {"passive": "labels", "active": "columns"}


@dataclass(frozen=True)
class Played:
    """The figures of one attack by one attacker in one run.

    ``why_not``: the reason if it could not be played.
    """

    attack: str
    about: str
    attacker: str
    figures: tuple[Figure, ...] = ()
    why_not: str = ""


class Rehearsal:
    """Records a run, then plays attacks.

    Args:
        folder: for the record; it must exist and be empty.
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
                "from "
                "the recipe.",
            )
        self.recording.attach(name, party)
        self._scenes.begin(name)

    def scene(self, attacker: str, seed: int) -> Scene:
        """Returns what ``attacker`` has, and the truth; ``seed``: the seed of attacks."""
        return self._scenes.of(attacker, seed)

    def play(
        self, attacks: Sequence[str], seed: int, *, tell: Callable[[str], None] = lambda _text: None
    ) -> list[Played]:
        """Plays each attack by every party that has the role of its attacker.

        ``tell``: called with a sentence before each attack. Raises InputError for an unknown
        attack.
        """
        played = []
        for number, name in enumerate(attacks, 1):
            attack = kinds.load(name, "attacks")
            tell(f"attack {number} of {len(attacks)}: {name}")
            known = {
                of
                for (role, _), readable in self._readable().items()
                if role == attack.by
                for of in readable
            }
            known |= self._encoders() | self._weights_shared()
            for attacker in self._attackers(attack):
                if attack.reads and attack.reads not in known:
                    played.append(
                        Played(name, attack.about, attacker, why_not=_missing(attack.reads))
                    )
                    continue
                try:
                    figures = _check_figures(attack.play(self.scene(attacker, seed)))
                    played.append(Played(name, attack.about, attacker, figures))
                except UnfitError as why:
                    played.append(Played(name, attack.about, attacker, why_not=str(why)))
                except Exception as error:
                    # An attack of a plug-in may fail without losing the figures of the others.
                    log.exception("the attack %s failed", name)
                    why_not = f"it failed {where_it_failed(error)}. Correct the attack."
                    played.append(Played(name, attack.about, attacker, why_not=why_not))
        return played

    def sizes(self) -> list[MessageSizes]:
        """Returns what the sizes of embeddings and gradients reveal to any observer of the network,
        for the recorded rounds.
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
        """Returns a sentence for each role that has phases which no attack supports."""
        chosen, sentences = [kinds.load(name, "attacks") for name in attacks], []
        for role, assets in _ASSETS.items():
            reads = {attack.reads for attack in chosen if attack.by == role}
            readable = {kind: here for (of, kind), here in self._readable().items() if of == role}
            phases = [
                kind for kind, here in readable.items() if not (here | self._encoders()) & reads
            ]
            if reads and phases:
                sentences.append(
                    f"None of the chosen attacks on {assets} supports {list_names(phases)}. See "
                    "docs/explanation/security.md."
                )
        return sentences

    def gaps(self) -> list[str]:
        """Returns a sentence for each exchange whose embeddings or gradients lack a transform that
        others have.
        """
        return gaps(party.party for party in self.parties.values())

    def _attackers(self, attack: Attack) -> list[str]:
        """Returns the names of the parties that can play an attack."""
        own = [party.party for party in self.parties.values()]
        if attack.by == "server":
            return [own[0].recipe.server]
        return [party.name for party in own if attack.by in ("party", party.role)]

    def _weights_shared(self) -> set[str]:
        """Returns {"weights"} if a phase shares weights that can be recorded."""
        phases = self.recording.phases.values()
        opened = [
            key
            for party in self.parties.values()
            for key, own in party.party.exchanges.items()
            if _shares(own)
        ]
        return (
            {"weights"}
            if any(
                (phase, exchange) in opened
                for of_party in phases
                for phase, readable in of_party.items()
                for exchange in readable.overheard
            )
            else set()
        )

    def _encoders(self) -> set[str]:
        """Returns {"encoder"} if a phase has trained one."""
        return {"encoder"} if any(map(self._scenes.is_trained, self.parties)) else set()

    def _readable(self) -> dict[tuple[Role, str], set[str]]:
        """Returns {(receiver's role, kind of a phase): what attacks can read of it}, if it sends
        tensors of rows.

        It is the phase's kind, and gradients or embeddings if they came and the phase names their
        rows.
        """
        readable_by_kind: dict[tuple[Role, str], set[str]] = {}
        of_kind = {
            phase.name: phase.kind
            for party in self.parties.values()
            for phase in party.party.recipe.phases
        }
        for party in self.parties.values():
            me = party.party
            for (phase, _), opened in me.exchanges.items():
                came = opened.exchange.down if me.role == "passive" else opened.exchange.up
                if (
                    opened.exchange.asks == "active"
                    and came.kind in ROW_TENSORS
                    and came.tensors
                    and phase in of_kind
                ):
                    readable_by_kind.setdefault((me.role, of_kind[phase]), {of_kind[phase]})
        seen: set[tuple[str, str, str]] = set()
        for key in self.recording.rows.keys():  # noqa: SIM118 - not a dict
            place = (key.phase, key.exchange, key.receiver)
            if key.meant or place in seen or key.phase not in of_kind:
                continue
            seen.add(place)
            party = self.parties[key.receiver]
            if self.recording.rows_of(key) is not None:
                role, exchange = (
                    party.party.role,
                    party.party.exchanges[key.phase, key.exchange].exchange,
                )
                kind = (exchange.down if role == "passive" else exchange.up).kind.label
                readable_by_kind.setdefault((role, of_kind[key.phase]), {of_kind[key.phase]}).add(
                    f"{kind}s"
                )
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
        data: as in ``simulate``.
        out: the folder of runs.
        attach: called with each party once it is assembled.
        quiet: whether to show nothing while it goes on.
        secrets: see ``run_in_process``.

    Raises VflError: bad input, or a run that failed.
    """
    how = partial(in_process, quiet, None, attach=attach, secrets=secrets)
    return carry_out(recipe, data, how, baseline=None, out=out)


def _check_figures(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Raises ValueError if a figure is not finite, because it sorts above all others."""
    if odd := next((figure for figure in figures if not math.isfinite(figure.value)), None):
        raise ValueError(f"its figure of {odd.of} is {odd.value}")
    return tuple(figures)


def _shares(opened: Asking | Answering) -> bool:
    return opened.exchange.asks == "server" and opened.exchange.up.kind is Kind.WEIGHTS


def _missing(reads: str) -> str:
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
