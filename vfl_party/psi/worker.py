"""A worker process that hashes, checks and masks ids for ``pool``: ``python -m
vfl_party.psi.worker``.

The process reads messages from its standard input, see ``vfl_common.process.workers``:

- The first message holds the secret and the salt, and has no answer.
- Each later message holds ``own`` and ids, or ``others``, a party's name and points. The answer is
  ``done`` and points, or ``refused`` and the code, text and party of a PeerError.
"""

from __future__ import annotations

from vfl_common.errors import PeerError
from vfl_common.process.workers import work
from vfl_party.psi import curve, lanes

OWN, OTHERS, DONE, REFUSED = b"own", b"others", b"done", b"refused"


def _answer(request: list[bytes], secret: bytes, salt: bytes) -> list[bytes]:
    kind, *fields = request
    if kind == OWN:
        return [DONE, lanes.hash_and_mask(fields, salt, secret)]
    party, points = fields
    try:
        curve.check_points(points, party.decode())
    except PeerError as error:
        return [REFUSED, str(int(error.code)).encode(), str(error).encode(), error.party.encode()]
    return [DONE, curve.mask(points, secret)]


def main() -> None:
    """Answers requests on standard input until it ends."""
    work(lambda secrets: lambda request: _answer(request, *secrets))


if __name__ == "__main__":
    main()
