"""A served model, as the gRPC port asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_common.config.party import ServeSettings
from vfl_common.process.logs import version
from vfl_common.rpc.inference.contents import Answer, Asked, Described
from vfl_common.rpc.inference.port import listening
from vfl_common.rpc.inference.service import Refused
from vfl_party.serve.http.served import Served
from vfl_party.serve.tokens import Denied, Token
from vfl_party.serve.v2.asked import columns_of, ids_of, least_of
from vfl_party.serve.v2.outputs import EXTENSIONS, chosen, described, outputs_of

# Of gRPC, for the statuses of HTTP that a request may get; both ports count the latter.
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
_STATUSES = {"OK": 200} | {code: status for status, code in reversed(_CODES.items())}


class InferenceModel:
    """See ``vfl_common.rpc.inference.service.Model``."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def admit(self, authorization: str) -> None:
        self._allowed(authorization)

    def server(self) -> tuple[str, str, list[str]]:
        return "vfl", version(), EXTENSIONS

    def describe(self, name: str, version: str, authorization: str) -> Described:
        self._allowed(authorization)
        served = self._served
        self._require(name, version)
        inputs, outputs = described(served.columns, served.parties)
        return Described(served.name, [served.run_id], "vfl", inputs, outputs)

    async def infer(self, asked: Asked, authorization: str) -> Answer:
        served, token = self._served, self._allowed(authorization)
        self._require(asked.model, asked.version)
        try:
            ids = ids_of(asked.inputs)
            columns = columns_of(asked.inputs, len(ids))
            scores = await served.score(ids, token, least_of(asked.parameters), columns)
            outputs = chosen(outputs_of(scores, served.parties), asked.outputs)
        except Denied as why:
            raise _refused(why) from None
        return Answer(served.name, served.run_id, outputs)

    def ended(self, method: str, code: str) -> None:
        _ = method
        self._served.counts.answered(_STATUSES[code])

    def _allowed(self, authorization: str) -> Token | None:
        try:
            return self._served.allow(authorization)
        except Denied as why:
            raise _refused(why) from None

    def _require(self, name: str, version: str) -> None:
        if name not in self._served.names or version not in ("", self._served.run_id):
            raise Refused("NOT_FOUND", "there is no such model here")


@contextmanager
def answering(served: Served, settings: ServeSettings) -> Iterator[str | None]:
    """Answers gRPC while the block runs, if ``serve.grpc`` asks for it; yields the address. Raises
    InputError.
    """
    if settings.grpc is None:
        yield None
        return
    secret = None
    # The HTTP port has found that both can be used.
    if settings.certificate is not None and settings.key is not None:
        secret = Path(settings.key).read_bytes(), Path(settings.certificate).read_bytes()
    with listening(InferenceModel(served), settings.grpc, secret) as address:
        yield address


def _refused(why: Denied) -> Refused:
    return Refused(_CODES.get(why.status, "INTERNAL"), why.why)
