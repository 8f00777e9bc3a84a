"""The guard of ``[policy]``: what it says of a run, before the party joins and when all have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vfl_common.config.party import Pin
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_party.policy.meeting import Asked


class WordsGuard:
    """Checks a run against a party's policy.

    Args:
        policy: the party file's.
        name: of the party.
        pins: {peer: the only key that it may have}; None: on one machine, where nobody has a key.
    """

    key = "policy"

    def __init__(
        self,
        policy: str | PolicySettings,
        name: str,
        recipe: Recipe,
        pins: Mapping[str, Pin] | None,
    ) -> None:
        self._policy, self._name, self._recipe, self._pins = policy, name, recipe, pins

    def before(self, asked: Asked) -> None:
        """See ``Guard``."""

    def shows(self) -> dict[str, Any]:
        """Returns the table of ``[policy]``, with its level's defaults, or the name of a plug-in."""
        if isinstance(self._policy, str):
            return {"plugin": self._policy}
        return self._policy.model_dump(mode="json", exclude_none=True)

    def met(self, run_id: str, shown: Mapping[str, Any]) -> None:
        """Raises PeerError if the server has not passed on what this party shows."""
        _ = run_id
        if isinstance(self._policy, PolicySettings) and shown.get(self._name) != self.shows():
            text = (
                "the server does not pass on the parties' policies as they are; install this "
                "release there, too"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self._recipe.server)
