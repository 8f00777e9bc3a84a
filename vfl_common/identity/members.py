"""Who has a part in a federation: by which name a certificate stands for one of them, and whose
keys are pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem


@dataclass(frozen=True)
class Members:
    """The names of the server and of all parties, and the pins of some of them.

    A certificate may have other DNS names beside a member's (a company's own host names), but never
    those of two members. Names are compared exactly; another member's name counts in any spelling
    (``SERVER``, ``server.``), because TLS takes those for the same.
    """

    # Empty: they are not known.
    names: frozenset[str] = frozenset()
    # {name: ``sha256:…`` of the public key}.
    pins: Mapping[str, str] = field(default_factory=dict)

    def stand_for(self, certificate: x509.Certificate, name: str) -> bool:
        """Whether the certificate is that of ``name`` and of no other member."""
        return name in pem.dns_names(certificate) and not self._others(certificate, name)

    def named(self, certificate: x509.Certificate) -> str:
        """Returns for whom a caller's certificate is: a member, or the only name that it has,
        whoever that is.

        Raises PeerError (IDENTITY_MISMATCH) if it has no name, or several of which not exactly one
        is a member's.
        """
        found = pem.dns_names(certificate)
        members = sorted(self.names.intersection(found))
        if len(found) == 1 and not members:
            return found[0]
        if len(members) != 1 or self._others(certificate, members[0]):
            text = (
                f"a caller's certificate has {len(found)} names; exactly one of them must be a "
                "member's"
            )
            raise PeerError(Code.IDENTITY_MISMATCH, text)
        return members[0]

    def _others(self, certificate: x509.Certificate, name: str) -> list[str]:
        spelt = {_plain(each) for each in pem.dns_names(certificate)}
        return [other for other in self.names if other != name and _plain(other) in spelt]

    def words(self, certificate: x509.Certificate, name: str) -> str:
        """Returns why the certificate does not stand for ``name``: for whom it is, or for whom as
        well.
        """
        others = self._others(certificate, name)
        if name in pem.dns_names(certificate) and others:
            return (
                f"for {name!r} and also for {pem.quoted(tuple(sorted(others)))}; it must name "
                "one member alone"
            )
        return f"for {pem.quoted(pem.names(certificate))}"

    def require_pin(self, name: str, certificate: x509.Certificate) -> None:
        """Raises PeerError (IDENTITY_MISMATCH) if another key of ``name`` is pinned here than the
        certificate has.
        """
        pinned, shown = self.pins.get(name), pem.pin_of(certificate)
        if pinned is not None and pinned != shown:
            text = f"the certificate of {name} has another key than the one pinned for it"
            private = (
                f"{text} ({shown} instead of {pinned}); ask {name} whether it has a new key, "
                "then correct the pin"
            )
            raise PeerError(Code.IDENTITY_MISMATCH, text, party=name).privately(private)


def members_of(*recipes: Recipe, pins: Mapping[str, str] | None = None) -> Members:
    """Makes the members of recipes. Raises InputError (CONFIG_INVALID) if a pin is for somebody
    else.
    """
    names = frozenset(
        name
        for recipe in recipes
        for name in (recipe.server, *(party.name for party in recipe.parties))
    )
    for name in pins or {}:
        if name not in names:
            of = " or ".join(dict.fromkeys(recipe.name for recipe in recipes))
            text = f"pins: {name!r} is neither the server nor a party of recipe {of}"
            raise InputError(
                Code.CONFIG_INVALID, f"{text} ({', '.join(sorted(names))}); correct the name"
            )
    return Members(names, dict(pins or {}))


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
