"""A rehearsal runs all parties in one process, records the messages, and plays attacks on them.

It needs the rows of all parties on one machine. Use it for research, or with data that resemble the
real data.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl.library.recipe import Recipe
from vfl.library.run import Run
from vfl.library.simulate import carry_out, in_process
from vfl.simulation.inprocess import Attach
from vfl_common.bundle import Kind
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import Code, InputError
from vfl_common.linkage import Encodings
from vfl_common.text import list_names
from vfl_leaks import attacks as kinds
from vfl_leaks.recording import ROW_TENSORS, Recording, Seen
from vfl_leaks.scene import (
    Attack,
    Beginning,
    EncoderInputs,
    Figure,
    Image,
    Intercepted,
    Owner,
    Scene,
    UnfitError,
)
from vfl_leaks.wiretap import MessageSizes, Times, read_sizes, read_times
from vfl_party.align.fuzzy import encode_table
from vfl_party.assembly.party import Assembled
from vfl_party.base.plugins import describe_failure
from vfl_party.base.seeds import derive_seed
from vfl_party.data.inputs.features import HIDDEN, UNKNOWN
from vfl_party.data.inputs.preprocess import Preprocessor
from vfl_party.models import deterministic
from vfl_party.outbound.declared import Role, Sent
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.phases.context import Party

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
            available |= {"encodings"} if self._scenes.list_encoded() else set()
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
                    "docs/security/who-learns-what.md."
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
            for key, opened in party.party.exchanges.opened.items()
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
            for (phase, _), opened in receiver.exchanges.opened.items():
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
                    party.party.exchanges.opened[key.phase, key.exchange].exchange,
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
    if reads == "encodings":
        return "no rows are linked by encodings"
    rows = reads in ("gradients", "embeddings")
    return (
        f"the attacker received no {reads} with known rows"
        if rows
        else f"the recipe has no phase of kind {reads}"
    )


# its data after a run, and the truth that judges attacks.
class Scenes:
    """Builds the scene of each attacker from the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._parties = recording, recording.parties
        # {party: the encoder's parameters before the first phase}
        self._initial_weights: dict[str, list[Tensor]] = {}

    def begin(self, name: str) -> None:
        """Stores a copy of a party's untrained weights; called before the party runs."""
        self._initial_weights[name] = [
            weight.detach().cpu().clone() for weight in self._weights(name)
        ]

    def build(self, attacker: str, seed: int) -> Scene:
        """Returns the scene of ``attacker``."""
        owner = next(party for party in self._parties.values() if party.party.role == "active")
        # An attacker wants the labels without any noise.
        active, targets = owner.party, owner.prepared.targets
        owners = {
            name: owner_ for name in self._parties if (owner_ := self._make_owner(name)) is not None
        }
        if attacker == active.recipe.server:
            task = active.recipe.task
            return Scene(
                attacker=attacker,
                role="server",
                task=task,
                labels=_get_classes(targets, task.kind),
                rows={},
                seed=derive_seed(seed, "attack", attacker),
                gradients=_yield_nothing,
                heard=partial(self._recording.messages_of, attacker),
                owners=owners,
                encode_rows={name: partial(self._encode, name) for name in self.list_encoded()},
            )
        own = self._parties[attacker].party
        senders = [name for name in self._parties if name != attacker]
        features = own.rows.features
        return Scene(
            attacker=attacker,
            role=own.role,
            task=own.recipe.task,
            labels=_get_classes(targets, own.recipe.task.kind),
            targets=_get_numbers(targets, own.recipe.task.kind),
            rows=own.rows.data.splits,
            seed=derive_seed(seed, "attack", attacker),
            gradients=partial(self._recording.batches, active.name, attacker, "gradient"),
            embeddings={
                name: partial(self._recording.batches, name, attacker, "embedding")
                for name in senders
            },
            encoder=deterministic(own.models["encoder"].eval())
            if self.is_trained(attacker)
            else None,
            inputs=features.inputs if features is not None else None,
            make_encoder=own.make_encoder,
            heard=partial(self._recording.messages_of, attacker),
            columns={
                name: inputs
                for name in self._parties
                if (inputs := make_inputs_table(self._parties[name])) is not None
            },
            owners=owners,
            beginnings={
                name: beginning
                for name in senders
                if (beginning := self._make_beginning(attacker, name)) is not None
            },
        )

    def list_encoded(self) -> list[str]:
        """Returns the parties whose rows the server links by encodings."""
        parties = [party.party for party in self._parties.values()]
        return [party.name for party in parties if party.recipe.rows.align == "fuzzy"]

    def _encode(self, name: str, key: bytes) -> Encodings:
        opened = self._parties[name].opened
        return encode_table(opened.table, opened.recipe.rows.fuzzy.fields, key)

    def _weights(self, name: str) -> list[Tensor]:
        models = self._parties[name].party.models
        return [*models["encoder"].parameters()] if "encoder" in models else []

    def is_trained(self, name: str) -> bool:
        """Whether a phase, or the run that this one starts from, has trained a party's encoder."""
        if (
            "encoder" not in self._parties[name].party.models
            or self._parties[name].party.recipe.start is not None
        ):
            return "encoder" in self._parties[name].party.models
        weights, initial = self._weights(name), self._initial_weights[name]
        return not initial or any(
            not torch.equal(weight.cpu(), before)
            for weight, before in zip(weights, initial, strict=True)
        )

    def _make_beginning(self, attacker: str, name: str) -> Beginning | None:
        """Returns how the training of a passive party's encoder begins; None if the first phase is
        not split training, or the attacker is not the active party.
        """
        attacker_party, sender_party = self._parties[attacker].party, self._parties[name].party
        recipe, make = sender_party.recipe, sender_party.make_encoder
        first = recipe.phases[0]
        if (
            attacker_party.role != "active"
            or make is None
            or first.kind != "splitnn"
            or recipe.start is not None
        ):
            return None
        settings: Any = sender_party.course.phases[0].settings
        return Beginning(
            first.name,
            lambda root: deterministic(sender_party.course.encoder(replace(make, secret=root))),
            recipe.seed,
            sender_party.own_seed,
            settings.optimizers.get(name, settings.optimizer),
            settings.epochs_over(len(sender_party.rows.data.splits["train"])),
            settings.plain,
            partial(self._recording.batches, attacker, name, "gradient"),
        )

    def _make_owner(self, name: str) -> Owner | None:
        party = self._parties[name].party
        if party.rows.features is None or "encoder" not in party.models:
            return None
        return Owner(
            deterministic(party.models["encoder"].eval()),
            party.rows.features.inputs,
            party.rows.data.splits,
        )


def _yield_nothing() -> Iterator[Intercepted]:
    """Returns no batches, because the server receives none."""
    return iter(())


def _get_classes(targets: Tensor | None, kind: str) -> Tensor:
    """Returns each row's class, int64 [N]; -1 everywhere for a regression."""
    assert targets is not None  # noqa: S101 - the active party has them
    if kind == "regression":
        return torch.full((len(targets),), -1)
    return targets.reshape(-1).long().cpu()


def _get_numbers(targets: Tensor | None, kind: str) -> Tensor | None:
    """Returns each row's label of a regression, float64 [N]."""
    return (
        targets.reshape(-1).double().cpu() if targets is not None and kind == "regression" else None
    )


# Minimum height and width of an image in pixels.
_MIN_SIDE = 2


def make_inputs_table(assembled: Assembled) -> EncoderInputs | None:
    """Returns a party's encoder inputs as a table; None if it has no features."""
    features, preprocessor = assembled.party.rows.features, assembled.prepared.preprocessor
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


def _image(preprocessor: Preprocessor) -> Image | None:
    """Returns the image format of the columns; None if an image is only a line of pixels, which
    cannot be compared by SSIM.
    """
    channels, height, width = preprocessor.image_shape or (0, 0, 0)
    if min(height, width) < _MIN_SIDE:
        return None
    return Image((channels, height, width), preprocessor.shift, preprocessor.scale)


def find_gaps(parties: Iterable[Party]) -> list[str]:
    """Returns a sentence for each transform that protects only some of the exchanges of embeddings
    or gradients.
    """
    sentences: dict[str, None] = {}
    for party in parties:
        # {kind of tensors: {phase and exchange: transforms}}
        of_kind: dict[str, dict[str, set[str]]] = {}
        for (phase, name), opened in party.exchanges.opened.items():
            passive = party.role == "passive"
            sent = opened.exchange.up if passive else opened.exchange.down
            if opened.exchange.asks == "active" and sent.kind in ROW_TENSORS:
                used = _transforms(party.recipe, phase, name, sent, party.role)
                of_kind.setdefault(sent.kind.label, {})[f"{phase}/{name}"] = used
        for kind, places in of_kind.items():
            transforms = sorted(set().union(*places.values()))
            variants = Counter(name.partition(" (")[0] for name in transforms)
            for transform in transforms:
                without = [place for place, used in places.items() if transform not in used]
                having = [place for place in places if place not in without]
                if without:
                    short = transform.partition(" (")[0]
                    label = short if variants[short] == 1 else transform
                    sentences[_describe_gap(f"{kind}s", label, without, having)] = None
    return list(sentences)


def _transforms(recipe: Settings, phase: str, exchange: str, sent: Sent, role: Role) -> set[str]:
    """Returns the transforms of the method and of the recipe that are applied to the tensors
    ``sent``.
    """
    of_method = {
        _describe(use.kind, use.settings) for use in sent.through if use.role in (None, role)
    }
    of_recipe = [
        transform
        for settings in recipe.phases
        if settings.name == phase
        for transform in settings.transforms
    ]
    used = [use for use in of_recipe if use.exchange == exchange and use.sent_by == role]
    return of_method | {_describe(use.kind, use.settings) for use in used}


def _describe(kind: str, settings: Mapping[str, Any]) -> str:
    """Returns a text of a transform and its settings, which make different defences."""
    settings_text = ", ".join(f"{key} = {value}" for key, value in sorted(settings.items()))
    return f"{kind} ({settings_text})" if settings_text else kind


def _describe_gap(what: str, transform: str, without: Sequence[str], having: Sequence[str]) -> str:
    return (
        f"{transform} protects {what} of {list_names(having)} only: {list_names(without)} "
        f"{'leaves' if len(without) == 1 else 'leave'} without it. Name each exchange in the "
        "transforms of its phase."
    )
