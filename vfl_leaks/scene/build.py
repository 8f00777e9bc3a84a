"""Builds the scene of each attacker: its data after a run, and the truth that judges attacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vfl_leaks.scene.recording import Recording
from vfl_leaks.scene.scene import Beginning, EncoderInputs, Image, Intercepted, Owner, Scene
from vfl_party.assembly.party import Assembled
from vfl_party.base.seeds import derive_seed
from vfl_party.data.inputs.features import HIDDEN, UNKNOWN
from vfl_party.data.inputs.preprocess import Preprocessor
from vfl_party.models import deterministic


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
            )
        own = self._parties[attacker].party
        senders = [name for name in self._parties if name != attacker]
        features = own.features
        return Scene(
            attacker=attacker,
            role=own.role,
            task=own.recipe.task,
            labels=_get_classes(targets, own.recipe.task.kind),
            targets=_get_numbers(targets, own.recipe.task.kind),
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
                if (inputs := make_inputs_table(self._parties[name])) is not None
            },
            owners=owners,
            beginnings={
                name: beginning
                for name in senders
                if (beginning := self._make_beginning(attacker, name)) is not None
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
            settings.epochs_over(len(sender_party.data.splits["train"])),
            settings.plain,
            partial(self._recording.batches, attacker, name, "gradient"),
        )

    def _make_owner(self, name: str) -> Owner | None:
        party = self._parties[name].party
        if party.features is None or "encoder" not in party.models:
            return None
        return Owner(
            deterministic(party.models["encoder"].eval()), party.features.inputs, party.data.splits
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
    features, preprocessor = assembled.party.features, assembled.prepared.preprocessor
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
