"""Checks that each key of ``augment`` applies to the rows of some party."""

from __future__ import annotations

from vfl_common.config.models import NETWORKS
from vfl_common.errors import Code, InputError
from vfl_party.phases.context import Party
from vfl_party.selfsup.augment.settings import OF_TABLES, AugmentSettings, SupervisedAugment

# {kind of encoder: {whether it takes images}}. An unknown kind takes both images and columns.
_IMAGES = ("cnn", "cnn0", "cnn1", *NETWORKS)
_INPUT_KINDS = {**{kind: {True} for kind in _IMAGES}, "mlp": {False}, "tabular": {False}}


def check_keys(party: Party, phase: str, settings: AugmentSettings | SupervisedAugment) -> None:
    """Raises InputError if ``settings`` contain a key for images but no encoder takes images, or a
    key for tables but all encoders take images. Considers only parties whose rows are changed.
    """
    names = settings.parties if isinstance(settings, SupervisedAugment) else ()
    kinds: set[bool] = set()
    for member in party.recipe.parties:
        if not member.features or (names and member.name not in names):
            continue
        if member.name == party.name and party.features is not None:
            kinds.add(len(party.features.spec.shape) == 3)
        else:
            encoder = member.encoder or party.recipe.model.encoder
            kinds |= _INPUT_KINDS.get(encoder.kind, {True, False})
    for key in sorted(settings.model_fields_set - {"parties"}):
        images = key not in OF_TABLES
        if kinds and images not in kinds:
            needed, available = ("images", "columns") if images else ("tables", "images")
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: augment: {key} is for {needed}, but the encoders of the "
                f"recipe take {available}. Remove {key}, or name a party in augment.parties whose "
                f"encoder takes {needed}.",
            )
