"""Makes a random view of each training batch in supervised phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.models import generator
from vfl_party.phases.context import Party
from vfl_party.selfsup.augment.check import check_keys
from vfl_party.selfsup.augment.settings import SupervisedAugment

if TYPE_CHECKING:
    from vfl_party.selfsup.augment import Augment


class BatchViews:
    """Makes the inputs of a party's encoder for training batches, with random changes.

    The random numbers of a batch are derived from the party's own seed, the phase and the batch's
    place in the phase. So there is no state to save, and a resumed run makes the same views. Raises
    InputError if ``settings`` do not apply to this party's rows.
    """

    def __init__(self, party: Party, phase: str, settings: SupervisedAugment) -> None:
        self._party, self._phase = party, phase
        self._augment: Augment | None = None
        where = f"recipe: phases: {phase}: augment"
        with_features = [member.name for member in party.recipe.parties if member.features]
        unknown = next((name for name in settings.parties if name not in with_features), None)
        if unknown is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}.parties: {unknown!r} is not a party with features. Choose from "
                f"{', '.join(with_features)}.",
            )
        features = party.features
        if features is None or party.name not in (settings.parties or with_features):
            return
        check_keys(party, phase, settings)
        images = len(features.spec.shape) == 3
        if not (settings.of_images if images else settings.corruption):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: corruption does not apply to the images of {party.name}. Name the "
                "parties whose rows are changed in augment.parties."
                if images
                else f"{where}: crops and colours do not apply to the columns of {party.name}. "
                "Name the parties whose rows are changed in augment.parties.",
            )
        # Imported only by a party that needs views.
        from vfl_party.selfsup.augment import make_augment

        self._augment = make_augment(settings.view(), features, party.rows("train"))

    def inputs(self, rows: Rows, *place: int) -> tuple[Tensor, ...]:
        """Returns the encoder's arguments for a batch, [B, …]. ``place``: Numbers that identify the
        batch in the phase.
        """
        party = self._party
        inputs = party.need_features().inputs(rows)
        if self._augment is None:
            return inputs
        seed = derive_seed(party.own_seed, "augment", self._phase, party.name, *place)
        return self._augment.one_view(inputs, generator(seed))
