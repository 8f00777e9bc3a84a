"""The documents say what the code declares: the tables of what crosses the network, excerpts of the
example, links.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.summary import ExchangeSummary
from vfl_party import methods
from vfl_party.assembly.party import Assembled, assemble, expected_rows, open_party
from vfl_party.outbound.chains import PASSIVES, summarised
from vfl_party.outbound.policies import Policy
from vfl_party.predict.prediction import PHASE, embeddings

REPO = Path(__file__).parents[2]
README = REPO / "README.md"
EXCHANGES = REPO / "docs" / "exchanges.md"
HOW_TO = REPO / "docs" / "how-to.md"
DOCUMENTS = [README, REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
BEGIN, END = "<!-- exchanges -->\n", "<!-- /exchanges -->\n"
HEADINGS = ("kind", "exchange", "from", "to", "carries", "when")
Row = tuple[str, ...]

FEDHSSL = {
    "kind": "fedhssl",
    "rounds": 1,
    "batch_size": 16,
    "cross": True,
    "local": True,
    "aggregate": True,
}
# Settings with which all exchanges of a kind occur.
PHASES: dict[str, dict[str, Any]] = {
    "splitnn": {"epochs": 1, "early_stopping": {"patience": 1}},
    "evaluate": {},
    "fedhssl": FEDHSSL | {"ssl": "simsiam", "projector": [8, 8, 8], "predictor": 8},
    "fedcvt": {"epochs": 1, "unlabelled_batch_size": 0, "own_batch_size": 16},
    "contrastive": {"rounds": 1, "batch_size": 16, "ssl": "simclr"},
    "fedonce": {"epochs": 1},
    "head": {"epochs": 1, "deadline_s": 10},
    "gbdt": {},
    "secureboost": {
        "early_stopping": 1,
        "encryption": "paillier",
        "goss": {"top": 0.2, "rest": 0.3},
    },
    "mocosfl": {"epochs": 1, "batch_size": 16, "image": [1, 8, 8], "cut": 1},
    "probe": {},
}
# Each party has rows of its own; a probe needs what the other has trained.
OWN_ROWS = ("mocosfl", "probe")


def recipe(kind: str, align: str = "digest") -> Recipe:
    made = cases.recipe(2)
    if kind in OWN_ROWS:
        made = cases.recipe(
            2, active_features=False, model={"encoder": {"kind": "cnn", "channels": [4, 8]}}
        )
        align = "none"
    phases = [
        {"kind": each, **PHASES[each]} for each in (OWN_ROWS if kind in OWN_ROWS else (kind,))
    ]
    # The others are a party's own.
    some = {} if align == "none" else {"aligned": 0.6}
    return Recipe.model_validate(
        made | {"phases": phases, "rows": {**made["rows"], "align": align, **some}}
    )


def assembled(kind: str, policy: Policy | None = None, align: str = "digest") -> Assembled:
    """A passive party of a recipe with one phase, or of one that ends with it."""
    made, name = recipe(kind, align), "p1"
    data = cases.digits(2)[name]
    if kind in OWN_ROWS:
        data = {"source": "sklearn:digits", "limit": 100, "scale": "minmax"}
    opened = open_party(made, name, DataSettings.model_validate(data), made.model.encoder)
    return assemble(opened, expected_rows(opened), policy=policy)


def rows_of(kind: str, lines: list[ExchangeSummary]) -> list[Row]:
    """The table's rows of one kind of phase; none if it exchanges nothing."""
    made = cases.recipe(2)
    names = {made["parties"][0]["name"]: "active party", "server": "server", PASSIVES: PASSIVES}
    names["every party"] = "every party"
    found: list[Row] = []
    for each in lines:
        # Their number follows from the encoder.
        sent = re.sub(r": \d+ tensors, ", " ", each.carries)
        found.append(
            (
                f"`{kind}`",
                f"`{each.exchange}`",
                names[each.sender],
                names[each.receiver],
                sent,
                each.when,
            )
        )
    return found


def predicting(party: Assembled) -> list[Row]:
    """The table's rows of a prediction with what this party has trained."""
    exchange = embeddings(party.party)
    chains = party.party.chains(PHASE, exchange)
    return rows_of("predict", summarised(party.party.recipe, PHASE, exchange, chains))


def of_phase(party: Assembled, kind: str) -> list[Row]:
    return rows_of(kind, [line for line in party.exchanges if line.phase == kind])


def of_all_methods() -> list[Row]:
    """The table of docs/exchanges.md, as the declarations give it."""
    silent: list[str] = []
    rows = of_phase(assembled("splitnn", align="psi"), "align")
    rows += of_phase(assembled("splitnn"), "open") + of_phase(assembled("mocosfl"), "open")
    for kind in PHASES:
        party = assembled(kind)
        own = of_phase(party, kind)
        rows += own
        silent += [] if own else [f"`{kind}`"]
        if kind == "evaluate":
            rows += predicting(party)
    return [*rows, (", ".join(silent), "–", "–", "–", "nothing", "–")]


def of_split_training() -> list[Row]:
    """The table of the README: a run of examples/breast-cancer.toml's phases, and a prediction."""
    training, testing = assembled("splitnn"), assembled("evaluate")
    rows = of_phase(training, "open") + of_phase(training, "splitnn")
    return rows + of_phase(testing, "evaluate") + predicting(testing)


def test_the_table_has_every_kind_of_phase() -> None:
    """A plug-in that is installed here is no part of it."""
    assert sorted(PHASES) == sorted(
        module.name for module in pkgutil.iter_modules(methods.__path__)
    )


@pytest.mark.parametrize(
    ("document", "table"),
    [(EXCHANGES, of_all_methods), (README, of_split_training)],
    ids=["all methods", "split training"],
)
def test_the_documents_say_what_crosses_the_network(
    document: Path, table: Callable[[], list[Row]]
) -> None:
    text = document.read_text()
    want = "".join(
        f"| {' | '.join(line)} |\n" for line in [HEADINGS, ("---",) * len(HEADINGS), *table()]
    )
    assert text.count(BEGIN) == text.count(END) == 1
    got = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n") + "\n"
    assert got == want, (
        f"{document.name}: between {BEGIN.strip()} and {END.strip()} there should be:\n\n{want}"
    )


def test_the_guide_to_plug_ins_shows_the_example_as_it_is() -> None:
    """Every block of section 14 with the name of a file is a part of that file."""
    text = HOW_TO.read_text()
    section = text[text.index("\n## 14.") : text.index("\n## 15.")]
    blocks = re.findall(r"^```\w+ ([\w.]+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    modules = {
        "clipped_laplace.py",
        "plain_split.py",
        "residual.py",
        "row_clip.py",
        "saturating.py",
    }
    assert {name for name, _ in blocks} == modules | {"pyproject.toml", "Dockerfile"}
    for name, block in blocks:
        assert block in (REPO / "examples" / "plugin" / name).read_text(), (
            f"{name} does not have:\n\n{block}"
        )


def test_the_guides_policy_lets_out_embeddings_alone() -> None:
    code = next(
        each
        for each in re.findall(r"^```python\n(.*?)^```", HOW_TO.read_text(), re.M | re.S)
        if "Only" in each
    )
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own document
    policy = names["EmbeddingsOnly"]()
    assert [line.chain for line in assembled("splitnn", policy).leaves][1:] == [
        "embeddings only -> identity"
    ] * 2
    with pytest.raises(InputError, match="policy: weights of phase fedhssl may not leave"):
        assembled("fedhssl", policy)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {anchor_of(heading) for heading in headings}, (
                f"{document.name}: {link}"
            )


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_threat_model_names_tests_that_exist() -> None:
    page, file, named = (REPO / "docs" / "threat-model.md").read_text(), "", 0
    for reference in re.findall(r"`((?:tests/[\w/]+\.py|scripts/[\w-]+)?(?:::\w+)?)`", page):
        path, _, test = reference.partition("::")
        # A name alone is of the file before it.
        file = path or file
        assert (REPO / file).is_file(), reference
        if test:
            named += 1
            assert f"def {test}(" in (REPO / file).read_text(), f"{file} has no {test}"
    assert named > 30
