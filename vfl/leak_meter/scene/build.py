"""Builds what each attacker has after a run, and the truth by which attacks are judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vfl.leak_meter.scene.inputs import inputs_of
from vfl.leak_meter.scene.recording import Recording
from vfl.leak_meter.scene.scene import Beginning, Intercepted, Owner, Scene
from vfl_party.base.seeds import derive_seed
from vfl_party.models import deterministic


class Scenes:
    """Builds the scene of each attacker from the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._parties = recording, recording.parties
        # Each encoder's parameters before the first phase.
        self._begun: dict[str, list[Tensor]] = {}

    def begin(self, name: str) -> None:
        """Stores a party's untrained weights; called before it runs."""
        self._begun[name] = [weight.detach().cpu().clone() for weight in self._weights(name)]

    def of(self, attacker: str, seed: int) -> Scene:
        """Returns what ``attacker`` has, and the truth."""
        owner = next(party for party in self._parties.values() if party.party.role == "active")
        # The labels before any noise: those are what an attacker wants.
        active, targets = owner.party, owner.prepared.targets
        owners = {name: held for name in self._parties if (held := self._owner(name)) is not None}
        if attacker == active.recipe.server:
            task = active.recipe.task
            return Scene(
                attacker=attacker,
                role="server",
                task=task,
                labels=_classes(targets, task.kind),
                rows={},
                seed=derive_seed(seed, "attack", attacker),
                gradients=_nothing,
                heard=partial(self._recording.messages_of, attacker),
                owners=owners,
            )
        own = self._parties[attacker].party
        senders = [name for name in self._parties if name != attacker]
        features = own.features
        return Scene(
            attacker=attacker,
            role=own.role,
            task=own.recipe.task,
            labels=_classes(targets, own.recipe.task.kind),
            targets=_numbers(targets, own.recipe.task.kind),
            rows=own.data.splits,
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
                if (inputs := inputs_of(self._parties[name])) is not None
            },
            owners=owners,
            beginnings={
                name: of for name in senders if (of := self._beginning(attacker, name)) is not None
            },
        )

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
        now, begun = self._weights(name), self._begun[name]
        return not begun or any(
            not torch.equal(one.cpu(), other) for one, other in zip(now, begun, strict=True)
        )

    def _beginning(self, attacker: str, name: str) -> Beginning | None:
        """Returns how a passive party's encoder began; None if it does not begin with split
        training.
        """
        me, own = self._parties[attacker].party, self._parties[name].party
        recipe, make = own.recipe, own.make_encoder
        first = recipe.phases[0]
        if (
            me.role != "active"
            or make is None
            or first.kind != "splitnn"
            or recipe.start is not None
        ):
            return None
        settings: Any = own.course.phases[0].settings
        return Beginning(
            first.name,
            lambda root: deterministic(own.course.encoder(replace(make, secret=root))),
            recipe.seed,
            own.own_seed,
            settings.optimizers.get(name, settings.optimizer),
            settings.epochs_over(len(own.data.splits["train"])),
            settings.plain,
            partial(self._recording.batches, attacker, name, "gradient"),
        )

    def _owner(self, name: str) -> Owner | None:
        own = self._parties[name].party
        if own.features is None or "encoder" not in own.models:
            return None
        return Owner(
            deterministic(own.models["encoder"].eval()), own.features.inputs, own.data.splits
        )


def _nothing() -> Iterator[Intercepted]:
    """Returns no batches: none come to the server."""
    return iter(())


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
