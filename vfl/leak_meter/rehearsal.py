"""A rehearsal: all parties of a run in one process, with what each received recorded, and attacks
played on it.

It needs all parties' rows in one place, so it is for research and for data that stand in for the
real ones.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl.leak_meter import attacks as kinds
from vfl.leak_meter.scene.record import Key, Record
from vfl.leak_meter.scene.scene import (
    Attack,
    Beginning,
    EncoderInputs,
    Figure,
    Heard,
    Image,
    Intercepted,
    Owner,
    Scene,
    UnfitError,
)
from vfl.leak_meter.wiretap.sizes import MessageSizes, Seen, told
from vfl.leak_meter.wiretap.times import Passed, Times
from vfl.leak_meter.wiretap.times import told as told_by_times
from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.text import listed
from vfl_party.assembly.party import Assembled
from vfl_party.base.phase import Phase
from vfl_party.base.plugins import blaming, where_it_failed
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.data.inputs.preprocess import HIDDEN, UNKNOWN, Preprocessor
from vfl_party.methods import handed_on, parse_settings
from vfl_party.models import deterministic
from vfl_party.outbound.declared import Exchange, Role, Sent
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.filter import Passage, Tensors

log = logging.getLogger(__name__)

# What attacks of a role read.
_ASSETS: dict[Role, str] = {"passive": "labels", "active": "columns"}
# Tensors that are recorded, by the kind of their bundle.
_WHAT = {Kind.GRADIENT: "dz", Kind.EMBEDDING: "z"}
# Pixels of an image's height and width.
_LEAST_SIDE = 2


@dataclass(frozen=True)
class Played:
    """The figures of one attack by one attacker in one run. ``why_not``: the reason if it could not
    be played.
    """

    attack: str
    about: str
    attacker: str
    figures: tuple[Figure, ...] = ()
    why_not: str = ""


@dataclass
class Rehearsal:
    """Records a run in memory, then plays attacks. ``folder``: for the record; it must exist and be
    empty.
    """

    folder: Path
    every: int = 1
    parties: dict[str, Assembled] = field(default_factory=dict)
    # Each encoder's parameters before the first phase.
    _begun: dict[str, list[Tensor]] = field(default_factory=dict)
    _passed: list[Passed] = field(default_factory=list)
    # With the rows of the message.
    _seen: list[tuple[Seen, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = Record(self.folder, self.every)
        (self.folder / "overheard").mkdir()
        self.overheard = Record(self.folder / "overheard", self.every)

    def attach(self, name: str, party: Assembled) -> None:
        """Listens at all exchanges that a party's phases have opened; called once the party is
        assembled.
        """
        self.parties[name] = party
        self._begun[name] = [each.detach().cpu().clone() for each in self._weights(name)]
        for each in party.party.exchanges.values():
            each.tap = partial(self._hear, name, each.exchange)

    def _hear(
        self,
        me: str,
        exchange: Exchange,
        what: str,
        step: StepKey,
        peer: str,
        tensors: Tensors,
        payload_bytes: int = 0,
    ) -> None:
        asks = exchange.asks == "server" or self.parties[me].party.role == "passive"
        # Of two ends one is enough.
        if asks and what != "meant":
            ends = (me, peer) if what == "sent" else (peer, me)
            self._passed.append(
                Passed(step.phase, exchange.name, *ends, step.round, time.monotonic())
            )
        if exchange.asks == "server":
            self._hear_shared(me, exchange, what, step, peer, tensors)
            return
        if what == "sent":
            return
        came = what == "came"
        sender, receiver = (peer, me) if came else (me, peer)
        for tensor_name in _WHAT.values():
            if tensor_name in tensors:
                self.record.note(
                    exchange.name, step, tensors[tensor_name], sender, receiver, meant=not came
                )
        rows = {
            len(tensors[name])
            for name in _WHAT.values()
            if name in tensors and tensors[name].dim() == 2
        }
        if came and rows and step.round % self.every == 0:
            message = Seen(step.phase, exchange.name, sender, receiver, step.round, payload_bytes)
            self._seen.append((message, max(rows)))
        if came and exchange.name in self._phase(me, step.phase).overheard:
            for named, tensor in tensors.items():
                self.overheard.note(
                    exchange.name, step, tensor, peer, me, named=named if len(tensors) > 1 else ""
                )
            behind = self._phase(peer, step.phase).behind(exchange.name)
            if behind is not None:
                self.overheard.note(exchange.name, step, behind, peer, me, meant=True)

    def _hear_shared(
        self, me: str, exchange: Exchange, what: str, step: StepKey, peer: str, tensors: Tensors
    ) -> None:
        """Keeps what a party and the server tell each other, tensor by tensor, as the receiver has
        it.
        """
        if exchange.name not in self._phase(me, step.phase).overheard:
            return
        sender, receiver = (me, peer) if what == "sent" else (peer, me)
        if what == "sent":
            up = self.parties[me].party.exchanges[step.phase, exchange.name].chains.up
            tensors = up.undo(dict(tensors), Passage(step, me, peer), exchange.up.spec())
        for named, tensor in tensors.items():
            self.overheard.note(exchange.name, step, tensor, sender, receiver, named=named)

    def _phase(self, party: str, name: str) -> Phase:
        return next(phase for phase in self.parties[party].phases if phase.name == name)

    def _heard(self, attacker: str) -> Iterator[Heard]:
        """Yields what was overheard between the attacker and others, in order."""
        held: tuple[Key, Tensor] | None = None
        for key, tensor in self.overheard.messages():
            if attacker not in (key.sender, key.receiver):
                continue
            if held is not None:
                yield _as_heard(*held, tensor if key.meant else None)
            held = None if key.meant else (key, tensor)
        if held is not None:
            yield _as_heard(*held, None)

    def play(
        self, attacks: Sequence[str], seed: int, *, tell: Callable[[str], None] = lambda _text: None
    ) -> list[Played]:
        """Plays attacks, each by every party whose role it is for. Raises InputError if there is no
        such attack.

        ``tell``: called before each attack, with a sentence.
        """
        found = []
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
                    found.append(
                        Played(name, attack.about, attacker, why_not=_missing(attack.reads))
                    )
                    continue
                try:
                    figures = _checked(attack.play(self.scene(attacker, seed)))
                    found.append(Played(name, attack.about, attacker, figures))
                except UnfitError as why:
                    found.append(Played(name, attack.about, attacker, why_not=str(why)))
                except Exception as error:
                    # Somebody's own: the figures of the others are kept.
                    log.exception("the attack %s failed", name)
                    words = f"it failed {where_it_failed(error)}; correct the attack"
                    found.append(Played(name, attack.about, attacker, why_not=words))
        return found

    def sizes(self) -> list[MessageSizes]:
        """Returns what the sizes of embeddings and gradients tell anybody on the network; of the
        recorded rounds.
        """
        seen: dict[int, list[Seen]] = {}
        for message, rows in self._seen:
            seen.setdefault(message.payload_bytes // max(1, rows), []).append(message)
        return [
            line
            for row_bytes, messages in seen.items()
            if row_bytes
            for line in told(messages, row_bytes)
        ]

    def times(self) -> list[Times]:
        """Returns what the times of messages tell anybody on the network; of all rounds."""
        phases = [phase for each in self.parties.values() for phase in each.phases]
        return told_by_times(self._passed, {phase.name: phase.rounds for phase in phases})

    def unknown(self, attacks: Sequence[str]) -> list[str]:
        """Returns a sentence for each kind of phase that no attack of a role knows."""
        chosen, found = [kinds.load(name, "attacks") for name in attacks], []
        for role, assets in _ASSETS.items():
            reads = {attack.reads for attack in chosen if attack.by == role}
            readable = {kind: here for (of, kind), here in self._readable().items() if of == role}
            phases = [
                kind for kind, here in readable.items() if not (here | self._encoders()) & reads
            ]
            if reads and phases:
                found.append(
                    f"No attack on {assets} that was chosen knows {listed(phases)}; see "
                    "docs/explanation/security.md."
                )
        return found

    def gaps(self) -> list[str]:
        """Returns a sentence for each exchange whose embeddings or gradients lack a transform that
        others have.
        """
        found: dict[str, None] = {}
        for party in self.parties.values():
            # Kind of tensors: {phase and exchange: transforms}.
            of_kind: dict[str, dict[str, set[str]]] = {}
            for (phase, name), opened in party.party.exchanges.items():
                passive = party.party.role == "passive"
                sent = opened.exchange.up if passive else opened.exchange.down
                if opened.exchange.asks == "active" and sent.kind in _WHAT:
                    used = _transforms(party.party.recipe, phase, name, sent, party.party.role)
                    of_kind.setdefault(sent.kind.label, {})[f"{phase}/{name}"] = used
            for kind, places in of_kind.items():
                named = sorted(set().union(*places.values()))
                variants = Counter(each.partition(" (")[0] for each in named)
                for transform in named:
                    without = [place for place, own in places.items() if transform not in own]
                    having = [place for place in places if place not in without]
                    if without:
                        short = transform.partition(" (")[0]
                        shown = short if variants[short] == 1 else transform
                        found[_gap(f"{kind}s", shown, without, having)] = None
        return list(found)

    def scene(self, attacker: str, seed: int) -> Scene:
        """Returns what ``attacker`` has, and the truth."""
        active = next(each.party for each in self.parties.values() if each.party.role == "active")
        owners = {name: held for name in self.parties if (held := self._owner(name)) is not None}
        if attacker == active.recipe.server:
            labels = _classes(active.targets, active.recipe.task.kind)
            of_server, heard = derive_seed(seed, "attack", attacker), partial(self._heard, attacker)
            task = active.recipe.task
            return Scene(
                attacker,
                "server",
                task,
                labels,
                {},
                of_server,
                _nothing,
                heard=heard,
                owners=owners,
            )
        own = self.parties[attacker].party
        senders = [name for name in self.parties if name != attacker]
        features = own.features
        return Scene(
            attacker=attacker,
            role=own.role,
            task=own.recipe.task,
            labels=_classes(active.targets, own.recipe.task.kind),
            targets=_numbers(active.targets, own.recipe.task.kind),
            rows=own.splits,
            seed=derive_seed(seed, "attack", attacker),
            gradients=partial(self._batches, active.name, attacker, "gradient"),
            embeddings={
                name: partial(self._batches, name, attacker, "embedding") for name in senders
            },
            encoder=deterministic(own.models["encoder"].eval())
            if self._trained(attacker)
            else None,
            inputs=features.inputs if features is not None else None,
            make_encoder=own.make_encoder,
            heard=partial(self._heard, attacker),
            columns={
                name: each for name in self.parties if (each := self._columns(name)) is not None
            },
            owners=owners,
            beginnings={
                name: of for name in senders if (of := self._beginning(attacker, name)) is not None
            },
        )

    def _beginning(self, attacker: str, name: str) -> Beginning | None:
        """Returns how a passive party's encoder began; None if it does not begin with split
        training.
        """
        me, own = self.parties[attacker].party, self.parties[name].party
        recipe, make = own.recipe, own.make_encoder
        first = recipe.phases[0]
        if (
            me.role != "active"
            or make is None
            or first.kind != "splitnn"
            or recipe.start is not None
        ):
            return None
        settings: Any = parse_settings(first)
        return Beginning(
            first.name,
            lambda root: deterministic(handed_on(recipe, replace(make, secret=root))),
            recipe.seed,
            own.own_seed,
            settings.optimizer,
            settings.epochs_over(len(own.splits["train"])),
            settings.plain,
            partial(self._batches, attacker, name, "gradient"),
        )

    def _owner(self, name: str) -> Owner | None:
        own = self.parties[name].party
        if own.features is None or "encoder" not in own.models:
            return None
        return Owner(deterministic(own.models["encoder"].eval()), own.features.inputs, own.splits)

    def _attackers(self, attack: Attack) -> list[str]:
        """Returns the names of those for whom an attack is."""
        own = [each.party for each in self.parties.values()]
        if attack.by == "server":
            return [own[0].recipe.server]
        return [each.name for each in own if attack.by in ("party", each.role)]

    def _weights_shared(self) -> set[str]:
        """Returns {"weights"} if a phase shares some and lets them be overheard."""
        phases = [phase for each in self.parties.values() for phase in each.phases]
        opened = [
            key
            for each in self.parties.values()
            for key, own in each.party.exchanges.items()
            if _shares(own)
        ]
        return (
            {"weights"}
            if any((each.name, name) in opened for each in phases for name in each.overheard)
            else set()
        )

    def _weights(self, name: str) -> list[Tensor]:
        models = self.parties[name].party.models
        return [*models["encoder"].parameters()] if "encoder" in models else []

    def _trained(self, name: str) -> bool:
        """Whether a phase, or the run that this one starts from, has trained a party's encoder."""
        if (
            "encoder" not in self.parties[name].party.models
            or self.parties[name].party.recipe.start is not None
        ):
            return "encoder" in self.parties[name].party.models
        now, begun = self._weights(name), self._begun[name]
        return not begun or any(
            not torch.equal(one.cpu(), other) for one, other in zip(now, begun, strict=True)
        )

    def _encoders(self) -> set[str]:
        """Returns {"encoder"} if phases have trained one, whatever they have sent."""
        return {"encoder"} if any(self._trained(name) for name in self._begun) else set()

    def _readable(self) -> dict[tuple[Role, str], set[str]]:
        """Returns {(receiver's role, kind of a phase): what attacks can read of it}, if it sends
        tensors of rows.

        It is the phase's kind, and gradients or embeddings if they came and the phase names their
        rows.
        """
        found: dict[tuple[Role, str], set[str]] = {}
        of_kind = {
            phase.name: phase.kind
            for each in self.parties.values()
            for phase in each.party.recipe.phases
        }
        for party in self.parties.values():
            me = party.party
            for (phase, _), opened in me.exchanges.items():
                came = opened.exchange.down if me.role == "passive" else opened.exchange.up
                if (
                    opened.exchange.asks == "active"
                    and came.kind in _WHAT
                    and came.tensors
                    and phase in of_kind
                ):
                    found.setdefault((me.role, of_kind[phase]), {of_kind[phase]})
        seen: set[tuple[str, str, str]] = set()
        for key in self.record.keys():  # noqa: SIM118 - it is no dict
            place = (key.phase, key.exchange, key.receiver)
            if key.meant or place in seen or key.phase not in of_kind:
                continue
            seen.add(place)
            party = self.parties[key.receiver]
            asked = next(each for each in party.phases if each.name == key.phase)
            if _rows_of(asked, key) is not None:
                role, exchange = (
                    party.party.role,
                    party.party.exchanges[key.phase, key.exchange].exchange,
                )
                kind = (exchange.down if role == "passive" else exchange.up).kind.label
                found.setdefault((role, of_kind[key.phase]), {of_kind[key.phase]}).add(f"{kind}s")
        return found

    def _batches(self, sender: str, receiver: str, kind: str) -> Iterator[Intercepted]:
        """Yields the batches that one party sent another, of exchanges whose rows are known."""
        meant: dict[Key, Tensor] = {}
        party = self.parties[receiver]
        phases: dict[str, Phase] = {phase.name: phase for phase in party.phases}
        for key, tensor in self.record.messages(sender=sender, receiver=receiver):
            exchange = party.party.exchanges[key.phase, key.exchange].exchange
            asks = exchange.asks == "active" and self.parties[sender].party.role == "passive"
            if (
                exchange.up if asks else exchange.down
            ).kind.label != kind or key.phase not in phases:
                continue
            rows = _rows_of(phases[key.phase], key)
            if rows is None or len(rows) != len(tensor):
                continue
            if key.meant:
                meant[key] = tensor
                continue
            before = Key(
                key.phase, key.exchange, key.round, key.batch, key.sender, key.receiver, meant=True
            )
            yield Intercepted(
                key.phase, key.round, key.batch, rows, tensor, meant.pop(before, None), key.exchange
            )

    def _columns(self, name: str) -> EncoderInputs | None:
        features, preprocessor = (
            self.parties[name].party.features,
            self.parties[name].prepared.preprocessor,
        )
        if features is None or preprocessor is None:
            return None
        values = features.x.flatten(1)
        numbers, groups = preprocessor.numeric_names, dict[str, range]()
        names = [*numbers]
        for column, words in zip(
            preprocessor.categorical_names, preprocessor.vocabularies, strict=True
        ):
            groups[column] = range(len(names), len(names) + 1 + len(words))
            names += [f"{column}={word}" for word in ("missing", *words)]
        if features.categories is not None:
            codes = features.categories.cpu()
            hot = torch.where(codes == UNKNOWN, -1, (codes - HIDDEN).clamp_min(0))
            return EncoderInputs(tuple(names), values, hot, groups)
        if preprocessor.image_shape is not None:
            image = _image(preprocessor)
            return EncoderInputs(
                tuple(f"x{number}" for number in range(values.shape[1])), values, image=image
            )
        return EncoderInputs(tuple(names), values, groups=groups)


@blaming()
def _rows_of(phase: Phase, message: Key) -> Rows | None:
    return phase.rows_at(message.exchange, StepKey(message.phase, message.round, message.batch))


def _checked(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Raises ValueError if a figure is no number: it would stand above all others."""
    if odd := next((each for each in figures if not math.isfinite(each.value)), None):
        raise ValueError(f"its figure of {odd.of} is {odd.value}")
    return tuple(figures)


def _nothing() -> Iterator[Intercepted]:
    """Returns no batches: none come to the server."""
    return iter(())


def _shares(opened: Asking | Answering) -> bool:
    return opened.exchange.asks == "server" and opened.exchange.up.kind is Kind.WEIGHTS


def _missing(reads: str) -> str:
    if reads == "weights":
        return "no phase shares weights that can be overheard"
    if reads == "encoder":
        return "no phase trains an encoder"
    rows = reads in ("gradients", "embeddings")
    return (
        f"no {reads} came whose rows a phase names"
        if rows
        else f"there is no phase of kind {reads}"
    )


def _transforms(recipe: Recipe, phase: str, exchange: str, sent: Sent, role: Role) -> set[str]:
    """Returns the names of the transforms, the method's and the recipe's, through which a direction
    is sent.
    """
    own = {_named(use.kind, use.settings) for use in sent.through if use.role in (None, role)}
    asked = [
        each for settings in recipe.phases if settings.name == phase for each in settings.transforms
    ]
    used = [each for each in asked if each.exchange == exchange and each.sent_by == role]
    return own | {_named(each.kind, each.settings) for each in used}


def _named(kind: str, settings: Mapping[str, Any]) -> str:
    """Names a transform with its settings: a defence that is weaker elsewhere is another one."""
    said = ", ".join(f"{key} = {value}" for key, value in sorted(settings.items()))
    return f"{kind} ({said})" if said else kind


def _gap(what: str, transform: str, without: Sequence[str], having: Sequence[str]) -> str:
    leave = f"{listed(without)} {'leaves' if len(without) == 1 else 'leave'} without it"
    todo = "Name each exchange in its phase's transforms."
    return f"{transform} protects {what} of {listed(having)} only: {leave}. {todo}"


def _as_heard(key: Key, tensor: Tensor, behind: Tensor | None) -> Heard:
    return Heard(
        key.phase, key.exchange, key.round, key.sender, key.receiver, tensor, behind, key.tensor
    )


def _image(preprocessor: Preprocessor) -> Image | None:
    """Returns how pixels are an image; None if it is a line of them, which has no structure to
    compare.
    """
    channels, height, width = preprocessor.image_shape or (0, 0, 0)
    if min(height, width) < _LEAST_SIDE:
        return None
    return Image((channels, height, width), preprocessor.shift, preprocessor.scale)


def _classes(targets: Tensor | None, kind: str) -> Tensor:
    """Returns each row's class, int64 [N]; -1 everywhere for a regression."""
    assert targets is not None  # noqa: S101 - the active party has them
    if kind == "regression":
        return torch.full((len(targets),), -1)
    return targets.reshape(-1).long().cpu()


def _numbers(targets: Tensor | None, kind: str) -> Tensor | None:
    """Returns each row's label of a regression, float64 [N]."""
    return (
        targets.reshape(-1).double().cpu() if targets is not None and kind == "regression" else None
    )
