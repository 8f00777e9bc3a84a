"""A process that hashes, checks and masks what ``pool`` gives it: ``python -m
vfl_party.psi.worker``.

It answers messages, see ``vfl_common.process.workers``.

- First, without an answer: the secret and the salt.
- Then ``own`` and ids, or ``others``, a party's name and points. The answer is ``done`` and points,
  or ``refused`` and code, text and party of a PeerError.
"""

from __future__ import annotations

from vfl_common.errors import PeerError
from vfl_common.process.workers import work
from vfl_party.psi import curve, lanes

OWN, OTHERS, DONE, REFUSED = b"own", b"others", b"done", b"refused"


def _answer(request: list[bytes], secret: bytes, salt: bytes) -> list[bytes]:
    kind, *rest = request
    if kind == OWN:
        return [DONE, lanes.hash_and_mask(rest, salt, secret)]
    party, points = rest
    try:
        curve.check(points, party.decode())
    except PeerError as error:
        return [REFUSED, str(int(error.code)).encode(), str(error).encode(), error.party.encode()]
    return [DONE, curve.mask(points, secret)]


def main() -> None:
    """Answers requests on standard input until it ends."""
    work(lambda first: lambda request: _answer(request, *first))


if __name__ == "__main__":
    main()
