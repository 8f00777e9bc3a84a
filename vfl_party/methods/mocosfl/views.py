"""Makes the batches of a party that has rows, with two views of each: one for the bottom model and
one for its moving average.
"""

from __future__ import annotations

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed, full_batches
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.models import generator
from vfl_party.phases.context import Party
from vfl_party.selfsup.augment import Inputs, check_keys, make_augment
from vfl_party.selfsup.towers import require_rows


class AugmentedViews:
    """Makes two views of the batch of each step, in an order that only this party knows.

    Raises InputError if the party's rows do not have the shape ``settings.image``, or if there are
    fewer than a batch.
    """

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        self._party, self._phase, self._size = party, phase, settings.batch_size
        self._features = party.need_features()
        if self._features.spec.shape != settings.image:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: image must be the shape of the rows of {party.name}, "
                f"{list(self._features.spec.shape)} (got {list(settings.image)}). Correct image, "
                "or the rows.",
            )
        self._rows = require_rows(party, phase, "local", settings.batch_size)
        augment, self._raw = settings.views(party.recipe.preset)
        check_keys(party, phase, settings.augment)
        self._augment = make_augment(augment, self._features, self._rows)
        # The number of the current pass over the rows, and its batches.
        self._pass: tuple[int, list[Rows]] = (-1, [])

    @property
    def batches(self) -> int:
        """The number of full batches in a pass over the rows."""
        return len(self._rows) // self._size

    def rows(self, number: int) -> Rows:
        """Returns the rows of a step's batch, [B]. After the last batch, the rows begin again.
        ``number``: the number of the step, counted through the phase.
        """
        seed, (pass_, batch) = self._party.own_seed, divmod(number, self.batches)
        if self._pass[0] != pass_:
            seed = derive_seed(seed, self._party.name)
            batches = full_batches(seed, self._phase, pass_, self._rows, self._size)
            self._pass = pass_, batches
        return self._pass[1][batch]

    def make_views(self, number: int) -> tuple[Inputs, Inputs]:
        """Returns two views of the rows of a step. ``number``: see ``rows``."""
        inputs = self._features.inputs(self.rows(number))
        name, batch = self._party.name, number % self.batches
        random = generator(derive_seed(self._party.own_seed, "augment", self._phase, name, number))
        for next_rows in self._pass[1][batch + 1 : batch + 2]:
            self._features.expect(next_rows)
        if self._raw:
            return inputs, self._augment.one_view(inputs, random)
        return self._augment.two_views(inputs, random)
