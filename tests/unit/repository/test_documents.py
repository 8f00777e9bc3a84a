"""The pages say what is: links lead somewhere, blocks of code run, excerpts are those of the examples."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.plugins import EXAMPLE
from tests.unit.repository.test_names import PACKAGES
from vfl_common.bundle import Kind
from vfl_common.config.data import DataSettings
from vfl_common.config.party import PartyFile
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import PhaseSettings
from vfl_common.errors import Code, InputError
from vfl_lab.searching.journal import parse_spaces
from vfl_lab.searching.search import SearchFile
from vfl_party.assembly.party import Assembled, assemble, expect_rows, open_party
from vfl_party.outbound.declared import Exchange, Sent, f32
from vfl_party.outbound.policies import Policy
from vfl_party.phases.course import NamedPhase

REPO = Path(__file__).parents[3]
DOCS = REPO / "docs"
README = REPO / "README.md"
NOTEBOOK = DOCS / "tutorials" / "notebook.md"
DECISIONS = DOCS / "contributing" / "decisions"
# The archive of decisions is not part of the site.
PAGES = sorted(set(DOCS.rglob("*.md")) - set(DECISIONS.glob("archive/*")))
ROOT = [REPO / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")]
DOCUMENTS = [README, *ROOT, *PAGES]
# What a person can read of the site. A commit that raises a budget says why.
MAX_README_WORDS, MAX_SITE_WORDS, MAX_PAGES = 650, 84_000, 139
HISTORY = re.compile(r"\b(not yet|for now|earlier release)s?\b", re.IGNORECASE)
NOT_PROSE = re.compile(
    r"<!-- (\w+) ?\S* -->\n.*?<!-- /\1 -->|^ *```.*?^ *```", re.DOTALL | re.MULTILINE
)
SENT = Sent(Kind.EMBEDDING, {"z": f32("rows", "width")})
NAMED_FILE = re.compile(
    r"(?<![\w/.])((?:(?:tests/)?(?:contract|faults|integration|unit)|scripts)/[\w/.-]*\w)(?:::(\w+))?"
    r"|(?<=`)::(\w+)"
)
CALL = re.compile(r"\s*(?:\$ )?(?:[./\w]*/bin/)?(vfl(?:-party|-server)?) ([^|;&#]*)")
OF_PLUGINS = re.compile(r'"(plain|saturating|row_clip|residual|quadratic|embeddings_only)"')


def named(path: Path) -> str:
    return str(path.relative_to(REPO))


def blocks(text: str, language: str, title: str = "") -> list[str]:
    """The blocks of a language, in order; with ``title``, those of that name."""
    head = rf'{language} title="{title}"' if title else rf"{language}"
    return re.findall(rf"^```{head}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def count_words(*paths: Path) -> int:
    """Words that people wrote, without code, generated parts and the signs of tables."""
    words = (word for path in paths for word in NOT_PROSE.sub("", path.read_text()).split())
    return sum(bool(re.search(r"\w", word)) for word in words)


def test_people_can_read_the_pages_to_their_end() -> None:
    assert count_words(README) <= MAX_README_WORDS
    assert count_words(*PAGES) <= MAX_SITE_WORDS
    assert len(PAGES) <= MAX_PAGES


def test_pages_say_what_is_true_today() -> None:
    pages = {page: page.read_text() for page in DOCUMENTS if DECISIONS not in page.parents}
    assert [page for page, text in pages.items() if HISTORY.search(NOT_PROSE.sub("", text))] == []


# -- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
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
    """As GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_pages_name_tests_and_scripts_that_exist() -> None:
    files = tests = 0
    for document in DOCUMENTS:
        file = Path()
        for path, *names in NAMED_FILE.findall(document.read_text()):
            if path:  # A name without a path belongs to the file before it.
                files += 1
                paths = [root / path for root in (REPO, REPO / "tests") if (root / path).exists()]
                assert paths, f"{document.name}: {path}"
                file = paths[0]
            if test := "".join(names):
                tests += 1
                assert f"def {test}(" in file.read_text(), f"{document.name}: {file} has no {test}"
    assert files > 150
    assert tests > 30


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=named)
def test_an_index_lists_the_page(page: Path) -> None:
    """The guides have one index for all of their folders."""
    guides = DOCS / "how-to"
    folders = [guides] if guides in page.parents else [page.parent, page.parent.parent]
    indices = [folder / "index.md" for folder in folders if (folder / "index.md").exists()]
    link = re.compile(r"\]\(([^)#\s]+\.md)")
    assert page in {
        (at.parent / to).resolve() for at in indices for to in link.findall(at.read_text())
    }


def test_decisions_are_listed_in_their_order() -> None:
    names = [page.name for page in sorted(DECISIONS.glob("0*.md"))]
    for listing in (DECISIONS / "index.md", REPO / "mkdocs.yml"):
        assert re.findall(r"\b(\d{4}-[\w-]+\.md)", listing.read_text()) == names


@pytest.mark.parametrize("page", sorted(DECISIONS.rglob("0*.md")), ids=named)
def test_a_decision_has_a_status_and_a_number_of_its_own(page: Path) -> None:
    number, status = page.name[:4], page.read_text().split("\n\n")[1]
    assert [other.name for other in DECISIONS.rglob(f"{number}-*")] == [page.name]
    archived = r"\*Status: (archived|superseded by \[decision \d+\]\(\S+\))\*"
    assert re.fullmatch(
        archived if page.parent.name == "archive" else r"\*Status: (?:accepted|proposed)\*", status
    )


def test_the_architecture_names_every_package_of_a_party_and_every_group_of_plug_ins() -> None:
    page = (DOCS / "contributing" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (REPO / "vfl_party").glob("*/__init__.py")}
    assert rooms | set(PACKAGES) <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    groups = r"^\| `(vfl\.\w+)`"
    plugins = (DOCS / "reference" / "plugins.md").read_text()
    of_plugins = set(re.findall(groups, plugins, re.MULTILINE))
    assert of_plugins <= set(re.findall(groups, page, re.MULTILINE))


def test_commands_and_options_that_are_shown_exist() -> None:
    """The page of commands has them all, as another test compares."""
    known: dict[str, set[str]] = {}
    reference = (DOCS / "reference" / "commands.md").read_text()
    for section in re.split(r"^#+ (?=vfl)", reference, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        rows = re.findall(r"^\| `(-[^`]+)`", body, re.MULTILINE)
        known[title] = set(re.findall(r"--[\w-]+", " ".join(rows)))
    count = 0
    for document in DOCUMENTS:
        for line in shown_lines(document.read_text().replace("\\\n", " ")):
            if (call := CALL.match(line)) is None:
                continue
            count += 1
            path, words = [call[1]], call[2].split()
            for word in words:
                path += [word] if " ".join([*path, word]) in known else []
            where = f"{document.name}: {line}"
            assert len(path) > 1 or not re.match(r"[a-z]", " ".join(words)), where
            titles = [" ".join(path[:end]) for end in range(1, len(path) + 1)]
            if "…" in words:  # Any command of the group.
                titles += [title for title in known if title.startswith(f"{titles[-1]} ")]
            options = {"--help", "--version"}.union(*(known[title] for title in titles))
            assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", call[2])) <= options, where
    assert count > 500


def shown_lines(text: str) -> list[str]:
    """Lines of blocks, and code within sentences."""
    pattern = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    lines = [line for block in pattern.findall(text) for line in block.splitlines()]
    codes = re.findall(r"(?<!`)`(vfl[^`]*)`", pattern.sub("", text))
    return lines + [" ".join(code.split()) for code in codes]


def test_what_is_to_be_installed_can_be() -> None:
    """The package is on no index, and an extra is one that it has."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    texts = [path.read_text() for name in PACKAGES for path in (REPO / name).rglob("*.py")]
    texts += [path.read_text() for path in DOCUMENTS]
    pattern = re.compile(r"pip install\s+['\"]?([\w./-]+)\[([\w,]+)\]")
    found = [each for text in texts for each in pattern.findall(text)]
    assert "vfl" not in {target for target, _ in found}
    chosen = {name for target, names in found if target == "." for name in names.split(",")}
    assert set() < chosen <= set(project["optional-dependencies"])


# -- code -----------------------------------------------------------------------------------------


def test_the_pages_of_plug_ins_show_the_example_as_it_is() -> None:
    """Every block with the name of a file is a part of that file, and every file is shown."""
    shown: set[str] = set()
    for page in sorted((DOCS / "how-to" / "plugins").glob("*.md")):
        for name, block in re.findall(
            r'^```\w+ title="([\w.]+)"\n(.*?)^```', page.read_text(), re.MULTILINE | re.DOTALL
        ):
            assert block in (EXAMPLE / name).read_text(), f"{name} does not have:\n\n{block}"
            shown.add(name)
    modules = {path.name for path in EXAMPLE.glob("*.py")}
    assert shown == modules | {"pyproject.toml", "Dockerfile"}


def test_plug_ins_that_are_shown_import_nothing_of_us_but_the_names_that_are_promised() -> None:
    """The example's files, the blocks of the how-to pages, and the cells of the notebook."""
    shown = [path.read_text() for path in EXAMPLE.glob("*.py")]
    for page in (DOCS / "how-to" / "plugins").glob("*.md"):
        shown += [code for kind in ("python", "py") for code in blocks(page.read_text(), kind)]
    notebook = json.loads((REPO / "examples" / "own-plugins.ipynb").read_text())
    shown += ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = {
        module
        for code in shown
        for node in ast.walk(ast.parse(textwrap.dedent(code)))
        for module in imported(node)
    }
    assert {each for each in found if each.partition(".")[0] in PACKAGES} == {"vfl", "vfl.api"}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [each.name for each in node.names] if isinstance(node, ast.Import) else []


def test_the_policy_that_is_shown_lets_out_embeddings_alone() -> None:
    policy = shown_policies()["EmbeddingsOnly"]()
    leaves = assembled("splitnn", policy).leaves
    assert [line.chain for line in leaves][1:] == ["embeddings only -> identity"] * 2
    both = {"local": True, "aggregate": True}
    with pytest.raises(InputError) as found:
        assembled("fedhssl", policy, ssl="simsiam", rounds=1, batch_size=16, cross=False, **both)
    assert found.value.code is Code.REFUSED


def test_the_policy_that_remembers_goes_on_counting_after_an_interruption() -> None:
    policy = shown_policies()["AtMost"]()
    leaves = assembled("splitnn", policy).leaves
    assert [line.chain for line in leaves][1:] == ["at most 10,000 bundles -> identity"] * 2
    exchange = Exchange("embedding", up=SENT, down=SENT)
    before, after = (policy("train", exchange, SENT) for _ in range(2))
    for _ in range(9_999):
        before.apply({})
    after.load_state(before.state())
    after.apply({})
    with pytest.raises(InputError) as found:
        after.apply({})
    assert found.value.code is Code.REFUSED


def shown_policies() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in blocks((DOCS / "how-to" / "plugins" / "other.md").read_text(), "python"):
        exec(code, names)  # noqa: S102 - our own document
    return names


def assembled(kind: str, policy: Policy, **settings: Any) -> Assembled:
    """A passive party of a recipe with one phase."""
    phase = settings or {"epochs": 1}
    recipe = Recipe.model_validate(cases.recipe(2) | {"phases": [{"kind": kind, **phase}]})
    data = DataSettings.model_validate(cases.digits(2)["p1"])
    opened = open_party(recipe, "p1", data, recipe.model.encoder)
    return assemble(opened, expect_rows(opened), policy=policy)


def test_the_codec_that_is_shown_gives_back_what_it_was_given() -> None:
    torch = pytest.importorskip("torch")
    code, *_ = blocks((DOCS / "how-to" / "plugins" / "transform.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own document
    codec, given = names["CODEC"](), {"z": torch.linspace(-1.0, 2.0, 12).reshape(3, 4)}
    written = codec.apply(given)
    assert written["z"].dtype == torch.uint8
    assert (codec.undo(written)["z"] - given["z"]).abs().max() <= 3.0 / 255 / 2 + 1e-6


# -- recipes and party files ----------------------------------------------------------------------


def tables() -> list[Any]:
    """Every block of TOML in the how-to pages that names no plug-in."""
    return [
        pytest.param(text, id=f"{page.parent.name}/{page.stem}-{number}")
        for page in sorted((DOCS / "how-to").rglob("*.md"))
        for number, text in enumerate(blocks(page.read_text(), "toml"))
        if not OF_PLUGINS.search(text)
    ]


@pytest.mark.parametrize("text", tables())
def test_recipes_and_party_files_that_are_shown_can_be_read(text: str) -> None:
    """Keys, values and the settings of each phase are those that the programs know."""
    found = tomllib.loads(text)
    if "methods" in found:  # a study
        phases = [found.get("finetune", [])]
        phases += [
            method.get(key, []) for method in found["methods"] for key in ("pretrain", "finetune")
        ]
        check_phases([phase for each in phases for phase in each])
        return
    if "search" in found:
        SearchFile.model_validate(found)
        parse_spaces(found["search"]["spaces"])
        return
    of_party = set(found) & (set(PartyFile.model_fields) - set(Recipe.model_fields))
    if "recipe" in found:  # a whole party file: its other keys have the names of keys of a recipe
        of_party = set(found)
    if of_party:
        DataSettings.model_validate({"source": "rows.csv", "id": "id"} | found.get("data", {}))
        tls = {"ca": "ca.pem", "certificate": "bank.pem", "key": "bank.key"}
        least = {"name": "bank", "recipe": "recipe.toml", "server": "here:7000", "tls": tls}
        PartyFile.model_validate(least | {key: found[key] for key in of_party})
    of_recipe = {key: value for key, value in found.items() if key not in of_party}
    if of_recipe:
        check_phases(of_recipe.get("phases", []))
        Recipe.model_validate(least_recipe(of_recipe) | of_recipe)


def check_phases(phases: list[dict[str, Any]]) -> None:
    for phase in phases:
        assert NamedPhase(PhaseSettings.model_validate(phase)).settings is not None


def least_recipe(found: dict[str, Any]) -> dict[str, Any]:
    """A recipe to which the tables that a page shows can be added."""
    if found.get("rows", {}).get("align") == "none":
        model = {"encoder": {"kind": "cnn", "channels": [4, 8]}}
        made = cases.recipe(2, active_features=False, model=model)
        return made | {"phases": [cases.MOCO, cases.PROBE]}
    least = cases.recipe(2)
    if {"parties", "phases"} <= set(found):
        return {key: least[key] for key in ("task", "model")}
    if "model" in found:
        found["model"] = least["model"] | found["model"]
    return least
