"""The table of all exchanges, as the code declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.harness import cases
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.summary import ExchangeSummary
from vfl_party.assembly.party import Assembled, assemble, expect_rows, open_party
from vfl_party.outbound.chains import PASSIVES, summarize_exchanges
from vfl_party.outbound.policies import Policy
from vfl_party.predict.prediction import PHASE, embeddings

HEADINGS = ("kind", "exchange", "from", "to", "carries", "when")
Row = tuple[str, ...]

_FEDHSSL = {
    "kind": "fedhssl",
    "rounds": 1,
    "batch_size": 16,
    "cross": True,
    "local": True,
    "aggregate": True,
}
PHASES: dict[str, dict[str, Any]] = {  # settings with which all exchanges of a kind occur
    "splitnn": {"epochs": 1, "early_stopping": {"patience": 1}},
    "evaluate": {"subsets": True, "importance": True},
    "fedhssl": _FEDHSSL | {"ssl": "simsiam", "projector": [8, 8, 8], "predictor": 8},
    "fedcvt": {"epochs": 1, "unlabelled_batch_size": 0, "own_batch_size": 16},
    "contrastive": {"rounds": 1, "batch_size": 16, "ssl": "simclr"},
    "fedonce": {"epochs": 1},
    "head": {"epochs": 1, "deadline_s": 10},
    "student": {"epochs": 1},
    "gbdt": {},
    "secureboost": {
        "early_stopping": 1,
        "encryption": "paillier",
        "goss": {"top": 0.2, "rest": 0.3},
    },
    "mocosfl": {"epochs": 1, "batch_size": 16, "image": [1, 8, 8], "cut": 1},
    "probe": {},
}
# Each party has rows of its own. A probe needs what the other phase has trained.
_OWN_ROWS = ("mocosfl", "probe")
# Phases that need others before them.
_COURSES = dict.fromkeys(_OWN_ROWS, _OWN_ROWS) | {"student": ("splitnn", "student")}


def rows() -> list[Row]:
    """Returns the lines of all kinds of phases, of alignment and of prediction."""
    silent: list[str] = []
    lines = _of_phase(assembled("splitnn", align="psi"), "align")
    rr22 = _of_phase(assembled("splitnn", align="psi", psi={"engine": "rr22"}), "align")
    lines += [line for line in rr22 if line not in lines]
    lines += _of_phase(assembled("splitnn", align="fuzzy", fuzzy={"fields": {"row": {}}}), "align")
    lines += _of_phase(assembled("splitnn"), "open")
    lines += _of_phase(assembled("splitnn", align="psi", partial=True), "open")
    lines += _of_phase(assembled("mocosfl"), "open")
    for kind in PHASES:
        party = assembled(kind)
        own = _of_phase(party, kind)
        lines += own
        silent += [] if own else [f"`{kind}`"]
        if kind == "evaluate":
            lines += _predicting(party)
    return [*lines, (", ".join(silent), "–", "–", "–", "nothing", "–")]


def assembled(
    kind: str, policy: Policy | None = None, align: str = "digest", **rows: Any
) -> Assembled:
    """Returns a passive party of a recipe with one phase, or of a recipe that ends with that phase.

    ``rows``: more keys of ``rows``.
    """
    made, name = _recipe(kind, align, rows), "p1"
    data = cases.digits(2)[name]
    if kind in _OWN_ROWS:
        data = {"source": "sklearn:digits", "limit": 100, "scale": "minmax"}
    if align == "fuzzy":
        data = {**data, "id": ["row"]}
    opened = open_party(made, name, DataSettings.model_validate(data), made.model.encoder)
    return assemble(opened, expect_rows(opened), policy=policy)


def _recipe(kind: str, align: str, rows: Mapping[str, Any]) -> Recipe:
    made = cases.recipe(2)
    if kind in _OWN_ROWS:
        made = cases.recipe(
            2, active_features=False, model={"encoder": {"kind": "cnn", "channels": [4, 8]}}
        )
        align = "none"
    phases = [{"kind": each, **PHASES[each]} for each in _COURSES.get(kind, (kind,))]
    some = {} if align == "none" else {"aligned": 0.6}  # the others are a party's own
    some |= rows
    told = {"report": {"tell_passives": ["auc"]}} if kind == "evaluate" else {}
    return Recipe.model_validate(
        made | told | {"phases": phases, "rows": {**made["rows"], "align": align, **some}}
    )


def _of_phase(party: Assembled, kind: str) -> list[Row]:
    return _lines(kind, [line for line in party.exchanges if line.phase == kind])


def _predicting(party: Assembled) -> list[Row]:
    """Returns the lines of a prediction with what this party has trained."""
    exchange = embeddings(party.party)
    return _lines(
        "predict",
        summarize_exchanges(
            party.party.recipe,
            PHASE,
            exchange,
            party.party.exchanges.make_chains(PHASE, exchange),
            after_labels=True,
        ),
    )


def _lines(kind: str, found: list[ExchangeSummary]) -> list[Row]:
    """Returns the table's lines of one kind of phase, without any if it exchanges nothing."""
    made = cases.recipe(2)
    names = {made["parties"][0]["name"]: "active party", "server": "server", PASSIVES: PASSIVES}
    names["every party"] = "every party"
    lines: list[Row] = []
    for each in found:
        sent = re.sub(
            r": \d+ tensors, ", " ", each.carries
        )  # their number follows from the encoder
        lines.append(
            (
                f"`{kind}`",
                f"`{each.exchange}`",
                names[each.sender],
                names[each.receiver],
                sent,
                each.when,
            )
        )
    return lines
