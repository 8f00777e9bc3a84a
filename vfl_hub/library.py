"""The node of a standing federation from Python: ``vfl.Hub``."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl_common.errors import Code, InputError, LostError, PeerError
from vfl_common.text import LINE, clean
from vfl_hub.schedule import ENDED

if TYPE_CHECKING:
    from vfl.library.recipe import Recipe

_TIMEOUT_S, _POLL_S, _ARRIVAL_S = 600.0, 0.3, 30.0


class NodeClient:
    """Asks a node on this machine, which is connected to the hub of a federation.

    Args:
        folder: The folder of the node, as ``folder`` in its file.
    """

    def __init__(self, folder: str | Path = "node") -> None:
        self._folder = Path(folder)

    def submit(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        data: Mapping[str, str],
        *,
        purpose: str = "",
        days: float = 7.0,
        approve: bool = False,
    ) -> str:
        """Proposes a run, and returns the id of the proposal.

        Args:
            recipe: The recipe, its tables, or the path of its file.
            data: {party: the name of its data set}.
            purpose: The purpose, for the people who approve it.
            days: The number of days in which the run may begin.
            approve: Whether this member approves it, too.

        Raises VflError if the node does not run, or if node or hub refuses the proposal.
        """
        # The list of commands does not need recipes.
        from vfl.library.recipe import Recipe

        tables = recipe.to_dict() if isinstance(recipe, Recipe) else recipe
        if not isinstance(tables, Mapping):
            tables = Recipe.load(tables).to_dict()
        asked = {"recipe": dict(tables), "data": dict(data), "purpose": purpose, "days": days}
        number = str(self.ask("/v1/proposals", asked)["id"])
        if approve:
            # The node receives its own proposal from the hub.
            next(self.follow(number))
            self.approve(number)
        return number

    def follow(self, proposal: str) -> Iterator[dict[str, Any]]:
        """Yields a proposal each time its state changes, until it has ended.

        Raises PeerError if the node does not know the proposal, and InputError if it does not
        answer for 30 s.
        """
        state, give_up_s = "", time.monotonic() + _ARRIVAL_S
        while state not in ENDED:
            try:
                row = self.ask(f"/v1/proposals/{proposal}")
                give_up_s = time.monotonic() + _ARRIVAL_S
            except (InputError, PeerError):
                # The node receives its own proposal from the hub, or is being started again.
                if time.monotonic() > give_up_s:
                    raise
                row = {"state": state}
            if row["state"] != state:
                state = str(row["state"])
                yield row
            elif state not in ENDED:
                time.sleep(_POLL_S)

    def wait(self, proposal: str) -> dict[str, Any]:
        """Waits until a proposal has ended, and returns it with ``state`` and ``reason``."""
        *_, last = self.follow(proposal)
        return last

    def proposals(self) -> list[dict[str, Any]]:
        """Returns the proposals of which this member is a party or the proposer, newest first."""
        return list(self.ask("/v1/proposals"))

    def approve(self, proposal: str) -> None:
        """Approves a proposal. ``proposal``: its id, or the beginning of it."""
        self.ask(f"/v1/proposals/{proposal}/approve", {})

    def deny(self, proposal: str, why: str = "") -> None:
        """Denies a proposal permanently."""
        self.ask(f"/v1/proposals/{proposal}/deny", {"why": why})

    def stop(self, proposal: str, why: str = "") -> None:
        """Stops the run of a proposal at all parties."""
        self.ask(f"/v1/proposals/{proposal}/stop", {"why": why})

    def members(self) -> dict[str, dict[str, Any]]:
        """Returns {member: its state, its pin at the hub, and the pin that this node knows}."""
        return dict(self.ask("/v1/members"))

    def ask(self, path: str, value: Any = None) -> Any:
        """Sends a request to the node's REST API, and returns the answer.

        Args:
            path: The path, such as ``/v1/status``.
            value: The JSON value of a POST request; None for a GET request.

        Raises InputError if the node does not run, PeerError if node or hub refuses the request,
        and LostError if the hub does not answer the node.
        """
        try:
            facts = json.loads((self._folder / "api.json").read_text())
            token = (self._folder / "api.token").read_text().strip()
        except (OSError, ValueError):
            raise InputError(
                Code.FILE_INVALID,
                f"{self._folder}: no node runs there. Start `vfl-party node`, or name its folder.",
            ) from None
        request = urllib.request.Request(  # noqa: S310 - the node's own address
            facts["url"] + path,
            data=None if value is None else json.dumps(value).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            try:
                detail = json.loads(error.read())["detail"]
            except (ValueError, KeyError, TypeError):
                detail = f"HTTP {error.code}"
            kind = LostError if error.code == 503 else PeerError
            code = Code.PARTY_LOST if error.code == 503 else Code.REFUSED
            raise kind(code, clean(str(detail), LINE)) from None
        except OSError as error:
            raise InputError(
                Code.UNREACHABLE, f"{facts['url']}: the node does not answer ({error}). Start it."
            ) from None


# The name in ``import vfl``.
Hub = NodeClient
