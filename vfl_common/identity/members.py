"""The members of a federation: the member for which a certificate stands, and the pinned keys."""

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
    """The names of the server and all parties, and their pinned keys.

    A certificate may contain further DNS names, such as a company's host names, but never the names
    of two members. The expected name must match exactly. Another member's name is recognised in any
    spelling (``SERVER``, ``server.``), because TLS treats these as equal.
    """

    # Empty if the members are not known.
    names: frozenset[str] = frozenset()
    # {name: ``sha256:`` and the digest of the pinned public key}.
    pins: Mapping[str, str] = field(default_factory=dict)

    def stands_for(self, certificate: x509.Certificate, name: str) -> bool:
        """Returns whether the certificate is for ``name`` and for no other member."""
        return name in pem.list_dns_names(certificate) and not self._find_other_members(
            certificate, name
        )

    def find_name(self, certificate: x509.Certificate) -> str:
        """Returns the name for which a caller's certificate stands: the member's name in it, or its
        only name.

        Raises PeerError (IDENTITY_MISMATCH) if the certificate has no name, or several names that
        do not include exactly one member.
        """
        names = pem.list_dns_names(certificate)
        members = sorted(self.names.intersection(names))
        if len(names) == 1 and not members:
            return names[0]
        if len(members) != 1 or self._find_other_members(certificate, members[0]):
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                "a caller's certificate must have the name of exactly one member (got "
                f"{count(len(names), 'name')}). Have one issued for one member.",
            )
        return members[0]

    def _find_other_members(self, certificate: x509.Certificate, name: str) -> list[str]:
        names = {_normalise_name(dns_name) for dns_name in pem.list_dns_names(certificate)}
        return [other for other in self.names if other != name and _normalise_name(other) in names]

    def words(self, certificate: x509.Certificate, name: str) -> str:
        """Returns the words for a message that a certificate stands for other names than ``name``
        alone.
        """
        other_members = self._find_other_members(certificate, name)
        if name in pem.list_dns_names(certificate) and other_members:
            return f"for {name!r} and also for {pem.quote_names(tuple(sorted(other_members)))}"
        return f"for {pem.quote_names(pem.names(certificate))}"

    def require_pin(self, name: str, certificate: x509.Certificate) -> None:
        """Raises PeerError (IDENTITY_MISMATCH) if the key in the certificate of ``name`` is not the
        pinned key.
        """
        pinned, pin = self.pins.get(name), pem.compute_pin(certificate)
        if pinned is not None and pinned != pin:
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"the certificate of {name} has another key than the one pinned for it",
                party=name,
            ).privately(
                f"the certificate of {name} has another key than the one pinned for it (got {pin}, "
                f"pinned {pinned}). Ask {name} whether it has a new key, then correct the pin."
            )


def collect_members(*recipes: Recipe, pins: Mapping[str, str] | None = None) -> Members:
    """Returns the members of the recipes. Raises InputError (CONFIG_INVALID) if a pin is for a name
    that is not a member.
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


def _normalise_name(name: str) -> str:
    return name.lower().rstrip(".")
