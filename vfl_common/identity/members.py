"""The members of a federation: which certificate stands for which member, and the pinned keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity import pem
from vfl_common.text import count


@dataclass(frozen=True)
class Members:
    """The names of the server and of all parties, and the pins of some of them.

    A certificate may have other DNS names besides a member's (a company's own host names), but
    never the names of two members. Names are compared exactly; another member's name counts in any
    spelling (``SERVER``, ``server.``), because TLS treats these as equal.
    """

    # Empty if the members are not known.
    names: frozenset[str] = frozenset()
    # {name: ``sha256:…`` of the public key}.
    pins: Mapping[str, str] = field(default_factory=dict)

    def stands_for(self, certificate: x509.Certificate, name: str) -> bool:
        """Returns whether the certificate is for ``name`` and for no other member."""
        return name in pem.dns_names(certificate) and not self._others(certificate, name)

    def find_name(self, certificate: x509.Certificate) -> str:
        """Returns the name that a caller's certificate is for: a member's, or its only name.

        Raises PeerError (IDENTITY_MISMATCH) if it has no name, or several of which not exactly one
        is a member's.
        """
        names = pem.dns_names(certificate)
        members = sorted(self.names.intersection(names))
        if len(names) == 1 and not members:
            return names[0]
        if len(members) != 1 or self._others(certificate, members[0]):
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                "a caller's certificate must have the name of exactly one member (got "
                f"{count(len(names), 'name')}). Have one issued for one member.",
            )
        return members[0]

    def _others(self, certificate: x509.Certificate, name: str) -> list[str]:
        names = {_plain(dns_name) for dns_name in pem.dns_names(certificate)}
        return [other for other in self.names if other != name and _plain(other) in names]

    def words(self, certificate: x509.Certificate, name: str) -> str:
        """Returns whom the certificate is for, if it does not stand for ``name`` alone."""
        others = self._others(certificate, name)
        if name in pem.dns_names(certificate) and others:
            return f"for {name!r} and also for {pem.quote_names(tuple(sorted(others)))}"
        return f"for {pem.quote_names(pem.names(certificate))}"

    def require_pin(self, name: str, certificate: x509.Certificate) -> None:
        """Raises PeerError (IDENTITY_MISMATCH) if the certificate of ``name`` has another key than
        the pinned one.
        """
        pinned, pin = self.pins.get(name), pem.pin_of(certificate)
        if pinned is not None and pinned != pin:
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"the certificate of {name} has another key than the one pinned for it",
                party=name,
            ).privately(
                f"the certificate of {name} has another key than the one pinned for it (got {pin}, "
                f"pinned {pinned}). Ask {name} whether it has a new key, then correct the pin."
            )


def members_of(*recipes: Recipe, pins: Mapping[str, str] | None = None) -> Members:
    """Returns the members of recipes. Raises InputError (CONFIG_INVALID) if a pin is for a name
    that is not a member's.
    """
    names = frozenset(
        name
        for recipe in recipes
        for name in (recipe.server, *(party.name for party in recipe.parties))
    )
    for name in pins or {}:
        if name not in names:
            raise InputError(
                Code.CONFIG_INVALID,
                f"pins: {name!r} is neither the server nor a party of recipe "
                f"{' or '.join(dict.fromkeys(recipe.name for recipe in recipes))}. Choose one of "
                f"{', '.join(sorted(names))}.",
            )
    return Members(names, dict(pins or {}))


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
