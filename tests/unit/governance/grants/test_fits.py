"""A grant fits what is asked, or says in a few words why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.granting import COLUMNS, DIGEST, IDS, LAST_S, NOON_S, PINS, made
from vfl_common.errors import InputError
from vfl_governance.grants.approval import GrantQuery, misfit
from vfl_governance.grants.store import Uses

OTHER = "9" * 64
TRAINING: dict[str, Any] = {
    "digest": DIGEST,
    "peers": PINS,
    "phases": ("splitnn",),
    "table": (COLUMNS, IDS),
}
PREDICTION: dict[str, Any] = {
    "digest": DIGEST,
    "peers": PINS,
    "phases": ("predict",),
    "trains": False,
}


def why(
    asked: dict[str, Any], uses: Uses | None = None, now_s: float = NOON_S, **grant: Any
) -> str:
    return misfit(made(**grant), GrantQuery(**asked), uses or Uses(), now_s)


@pytest.mark.parametrize(
    ("asked", "uses", "now_s"),
    [
        (TRAINING, Uses(), NOON_S),
        (TRAINING, Uses(frozenset({"one"})), NOON_S),
        (TRAINING, Uses(), LAST_S),
        (TRAINING, Uses(predictions=10), NOON_S),
        # A run that goes on is the same run.
        (TRAINING | {"run": "one"}, Uses(frozenset({"one", "two"})), NOON_S),
        (TRAINING | {"peers": {"p0": PINS["p0"]}}, Uses(), NOON_S),
        (PREDICTION, Uses(), NOON_S),
        (PREDICTION, Uses(frozenset({"one", "two"}), 9), NOON_S),
    ],
)
def test_a_grant_fits(asked: dict[str, Any], uses: Uses, now_s: float) -> None:
    assert why(asked, uses, now_s) == ""


@pytest.mark.parametrize(
    ("asked", "uses", "now_s", "grant", "words"),
    [
        (TRAINING | {"digest": OTHER}, Uses(), NOON_S, {}, "is for a recipe with digest 1111"),
        (PREDICTION | {"digest": OTHER}, Uses(), NOON_S, {}, "not 9999"),
        (TRAINING, Uses(), LAST_S + 1, {}, "was valid until the end of 2027-01-31 (UTC)"),
        (PREDICTION, Uses(), LAST_S + 1, {}, "was valid until the end of 2027-01-31 (UTC)"),
        (TRAINING, Uses(revoked_s=0.0), NOON_S, {}, "was revoked"),
        (TRAINING, Uses(revoked_s=0.0, why="over"), NOON_S, {}, "was revoked (over)"),
        (PREDICTION, Uses(revoked_s=0.0), NOON_S, {}, "was revoked"),
        # Even a run that it has allowed does not go on.
        (TRAINING | {"run": "one"}, Uses(frozenset({"one"}), 0, 0.0), NOON_S, {}, "revoked"),
        (TRAINING | {"run": "one"}, Uses(frozenset({"one"})), LAST_S + 1, {}, "was valid until"),
        (TRAINING | {"table": (OTHER, IDS)}, Uses(), NOON_S, {}, "a table with other columns"),
        (TRAINING | {"table": (COLUMNS, OTHER)}, Uses(), NOON_S, {}, "a table with other ids"),
        (TRAINING | {"table": (IDS, COLUMNS)}, Uses(), NOON_S, {}, "other columns"),
        (TRAINING, Uses(), NOON_S, {"peers": {"p0": PINS["p0"]}}, "does not name server"),
        (
            TRAINING | {"peers": {"p0": PINS["server"]}},
            Uses(),
            NOON_S,
            {},
            "is for the key sha256:aaaaaaaaaaaaaaaa of p0, but sha256:bbbbbbbbbbbbbbbb is pinned",
        ),
        (TRAINING | {"peers": {"p0": ""}}, Uses(), NOON_S, {}, "of p0, but none is pinned"),
        (TRAINING | {"phases": ("splitnn", "evaluate")}, Uses(), NOON_S, {}, "phase evaluate"),
        (PREDICTION | {"phases": ("serve",)}, Uses(), NOON_S, {}, "does not allow the phase serve"),
        (TRAINING, Uses(frozenset({"one", "two"})), NOON_S, {}, "allows 2 runs, and 2 were begun"),
        (
            TRAINING | {"run": "three"},
            Uses(frozenset({"one", "two"})),
            NOON_S,
            {},
            "allows 2 runs, and 2 were begun",
        ),
        (TRAINING, Uses(), NOON_S, {"runs": 0}, "allows 0 runs"),
        (
            PREDICTION,
            Uses(predictions=10),
            NOON_S,
            {},
            "allows 10 predicted rows, and 10 were predicted",
        ),
        (PREDICTION, Uses(), NOON_S, {"predictions": 0}, "allows 0 predicted rows"),
    ],
)
def test_a_grant_does_not_fit(
    asked: dict[str, Any], uses: Uses, now_s: float, grant: dict[str, Any], words: str
) -> None:
    assert words in why(asked, uses, now_s, **grant)


@pytest.mark.parametrize(
    "more",
    [
        {"until": "2027-02-30"},
        {"until": "20270131"},
        {"until": 20270131},
        {"runs": -1},
        {"runs": 10**6},
        {"runs": True},
        {"predictions": 1e3},
        {"purpose": "one\ntwo"},
        {"purpose": "x" * 501},
        {"peers": {"p0": "sha256:aa"}},
        {"peers": {"../p0": PINS["p0"]}},
        {"grant": "../../etc/pa"},
        {"digest": "zz"},
        {"party": ""},
        {"at": -1},
        {"more": 1},
    ],
)
def test_what_is_no_grant_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        made(**more)


def test_the_last_day_is_the_last_that_there_is() -> None:
    assert why(TRAINING, until="9999-12-31") == ""
