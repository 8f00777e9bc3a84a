"""Certificates for the tests of identities."""

from __future__ import annotations

from pathlib import Path

import pytest

from vfl.certs.authority import create_authority, issue
from vfl_common.config.party import TlsSettings


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", "f")
    return tmp_path / "ca"


@pytest.fixture
def tls(ca: Path) -> TlsSettings:
    return issue(ca, "bank")
