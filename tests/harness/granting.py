"""Grants of made-up parties, and a federation whose parties ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tests.harness.federation import Federation
from vfl_common.config.base import parse
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.pem import compute_pin, parse_certificates
from vfl_governance.grants.store import Grant
from vfl_party.cli import cli

DIGEST, COLUMNS, IDS = "1" * 64, "2" * 64, "3" * 64
PINS = {"p0": f"sha256:{'a' * 64}", "server": f"sha256:{'b' * 64}"}
# Noon of 2027-01-15, and the last second of the grant.
NOON_S, LAST_S = 1_800_014_400.0, 1_801_439_999.0


def made(**more: Any) -> Grant:
    """A grant of p1: two runs and ten predictions until 2027-01-31."""
    given: dict[str, Any] = {
        "grant": "0123456789ab",
        "party": "p1",
        "recipe": "case",
        "digest": DIGEST,
        "columns": COLUMNS,
        "ids": IDS,
        "peers": PINS,
        "phases": ["splitnn", "predict"],
        "purpose": "credit risk",
        "until": "2027-01-31",
        "runs": 2,
        "predictions": 10,
        "at": 1_799_000_000,
    }
    return parse(Grant, given | more, "made")


def pin(credentials: Credentials) -> str:
    return compute_pin(credentials.certificate)


def needs_grants(federation: Federation, *names: str) -> None:
    """Has parties ask for grants, with the keys of all others pinned."""
    certs = federation.folder / "certs"
    pins = {
        name: compute_pin(parse_certificates((certs / f"{name}.pem").read_bytes(), certs)[0])
        for name in [*federation.names, "server"]
    }
    for name in names:
        own = {
            "policy": {"level": "open", "approval": "each"},
            "pins": {key: value for key, value in pins.items() if key != name},
        }
        federation.extra[name] = federation.extra.get(name, {}) | own


def command(folder: Path, *words: str) -> Result:
    """Runs ``vfl-party``, with party files of ``folder``."""
    given = [str(folder / word) if word.endswith(".toml") else word for word in words]
    return CliRunner().invoke(cli, given)


def approve(federation: Federation, name: str, *words: str) -> str:
    """Signs a grant without asking; returns its id."""
    # Nobody is asked.
    federation.address = federation.address or "127.0.0.1:1"
    path = federation.write_party(name)
    found = command(federation.folder, "approve", path.name, "--yes", *words)
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output.split("the grant ")[-1].split()[0]
