"""What ``vfl-party check`` says, in words for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.federation import toml
from vfl.certs.authority import create_authority, issue
from vfl_party.preflight import check


def said(folder: Path, about: str, **splits: Any) -> list[str]:
    """What ``check`` finds at p1 about one subject."""
    create_authority(folder / "certs", "f")
    tls = issue(folder / "certs", "p1").model_dump(mode="json", exclude_defaults=True)
    recipe = cases.recipe(2, rows={"validation": 0.1, "test": 0.2, **splits})
    (folder / "recipe.toml").write_text(toml(recipe))
    party = {"name": "p1", "recipe": str(folder / "recipe.toml"), "server": "127.0.0.1:9", "tls": tls}
    (folder / "p1.toml").write_text(toml(party | {"data": cases.digits(2)["p1"]}))
    found = list(check(folder / "p1.toml", None, offline=True))
    assert all(finding.fine for finding in found), found
    return [finding.text for finding in found if finding.about == about]


def test_what_is_said_to_the_server_has_plain_words(tmp_path: Path) -> None:
    session = [text.removeprefix("session with server: ") for text in said(tmp_path, "leaves")]
    assert "heartbeat: no content (it is alive)" in session
    assert "alone: no content (active party: it needs nobody any more)" in session
    assert not [text for text in session if "label" in text]  # a label is what only the active party has


@pytest.mark.parametrize(
    ("splits", "more"),
    [
        ({}, ""),
        ({"labelled": 5}, " aligned (for training, with or without labels)"),
        ({"aligned": 0.5}, " local (for training, aligned or this party's alone)"),
    ],
)
def test_only_splits_that_differ_are_counted(tmp_path: Path, splits: dict[str, Any], more: str) -> None:
    (text,) = said(tmp_path, "rows", **splits)
    parts = text.split(", ", 3)
    assert [part.split()[1] for part in parts[:3]] == ["test", "validation", "train"]
    assert "".join(parts[3:]).lstrip("0123456789") == more
