"""The reference says what the code knows: keys, errors, exchanges, files, metrics, commands."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

import vfl
from scripts.reference import exchanges, figures, keys
from scripts.reference.errors import REMEDY
from scripts.reference.pages import DOCS, PAGES, filled, named, pages, parts
from vfl import api
from vfl_common.config.models import ENCODERS, PluginSettings
from vfl_common.config.party import PartyFile
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import LOWER_IS_BETTER, METRICS
from vfl_common.errors import Code
from vfl_common.summary import Summary
from vfl_party import methods
from vfl_party.outbound import codecs, transforms
from vfl_party.phases.course import load_method

REPO = Path(__file__).parents[3]
# What a type checker reads of the names for plug-ins.
SEEN = (REPO / "vfl" / "api.py").read_text().partition("\n__all__")[0]


def models() -> set[type[BaseModel]]:
    """All sections that a person may write into a recipe or a party file, without plug-ins'."""
    roots: list[type[BaseModel]] = [Recipe, PartyFile]
    roots += [load_method(kind).settings for kind in own(methods)]
    roots += [transforms.load(kind, "").settings for kind in transforms.TRANSFORMS]
    roots += [each for kind in codecs.CODECS if (each := codecs.settings_of(kind, "")) is not None]
    return keys.reached(roots)


def own(package: object) -> Iterator[str]:
    """The names of a package's modules: a plug-in that is installed here is not among them."""
    for module in pkgutil.iter_modules(package.__path__):  # type: ignore[attr-defined]
        yield module.name


MADE = [page for page in pages() if parts(page.read_text())]


@pytest.mark.parametrize("page", MADE, ids=lambda path: path.name)
def test_a_page_has_what_is_generated(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run python -m scripts.reference"


def test_pages_of_all_sorts_are_generated() -> None:
    assert {kind for page in MADE for kind, _ in parts(page.read_text())} == {
        "api",
        "keys",
        "commands",
        "errors",
        "exchanges",
        "figures",
        "packages",
        "seams",
    }


@pytest.mark.parametrize("figure", figures.load(), ids=lambda figure: figure["id"])
def test_a_canonical_figure_is_on_its_page(figure: dict[str, str]) -> None:
    page = (DOCS / "results" / figure["page"].partition("#")[0]).read_text()
    for number in re.findall(r"[+−]?\d[\d,.]*\d|\d", figure["value"]):
        assert number in page, number


def test_every_key_has_a_description() -> None:
    lacking = [
        f"{model.__name__}.{name}"
        for model in models()
        for name in model.model_fields
        if not keys.descriptions(model).get(name, "").endswith(".")
    ]
    assert not lacking, "write a docstring, a sentence or more, below each of these"


def test_a_key_without_a_description_is_named() -> None:
    class Bare(BaseModel):
        key: int = 3

    with pytest.raises(LookupError, match=r"Bare\.key"):
        list(keys.rows(Bare))


def test_every_section_has_a_table() -> None:
    shown = {
        named(of)
        for page in PAGES.glob("*.md")
        for kind, of in parts(page.read_text())
        if kind == "keys"
    }
    assert {each for each in models() if each.model_fields} - shown == set()


def test_types_and_bounds_are_said_in_words() -> None:
    said = {line[0]: line[1:3] for line in keys.rows(Recipe)}
    assert said["`seed`"] == ("whole number, 0 to 2^63 - 1", "`0`")
    assert said["`preset`"] == ("`paper`, `released`", '`"paper"`')
    assert said["`phases`"] == ("list of tables", "required")
    place = {line[0]: line[1:3] for line in keys.rows(PluginSettings)}
    assert place["any other key"] == ("table", "`{}`")
    file = {line[0]: line[1:3] for line in keys.rows(PartyFile)}
    assert file["`server`"] == ("HOST:PORT", "required")
    assert file["`encoder`"] == ("table with a `kind`", "–")


def test_every_error_has_a_remedy() -> None:
    assert set(REMEDY) == set(Code)


def test_the_table_of_exchanges_has_every_kind_of_phase() -> None:
    assert sorted(exchanges.PHASES) == sorted(own(methods))


def test_every_encoder_codec_and_transform_is_named() -> None:
    recipe, page = (PAGES / "recipe.md").read_text(), (PAGES / "codecs.md").read_text()
    assert all(f"### {kind}\n" in recipe for kind in ENCODERS)
    for kind in [*codecs.CODECS, *transforms.TRANSFORMS]:
        assert f"### {kind}\n" in page or f"| `{kind}` |" in page, kind


def test_the_page_of_files_names_every_key_of_the_summary() -> None:
    text = (PAGES / "files.md").read_text()
    found = {name for model in keys.reached([Summary]) for name in model.model_fields}
    assert {name for name in found if f"`{name}`" not in text} == set()


def test_the_page_of_metrics_names_every_metric() -> None:
    source = "".join(path.read_text() for path in REPO.glob("vfl_*/**/prometheus.py"))
    families = set(re.findall(r'"(vfl_[a-z_]+)"', source)) - {"vfl_party", "vfl_server"}
    page = (PAGES / "metrics.md").read_text()
    shown = set(re.findall(r"`(vfl_[a-z_]+)`", page)) - {"vfl_party_info", "vfl_server_info"}
    assert families == shown
    of_models = page.partition("## Prometheus")[0]
    rows = "".join(line for line in of_models.splitlines() if line.startswith("|"))
    assert {name for name in METRICS if f"`{name}`" not in rows} == set()
    smaller = of_models.partition("Smaller is better for")[2].partition("plug-in")[0]
    assert set(re.findall(r"`(\w+)`", smaller)) == LOWER_IS_BETTER


def test_the_page_of_metrics_names_every_event_of_a_log() -> None:
    page = (PAGES / "metrics.md").read_text()
    source = "".join(
        path.read_text()
        for package in (
            "vfl_common",
            "vfl_governance",
            "vfl_hub",
            "vfl_party",
            "vfl_serve",
            "vfl_server",
        )
        for path in (REPO / package).rglob("*.py")
    )
    events = set(re.findall(r'extra=\{\s*"event": "([a-z_-]+)"', source))
    assert len(events) > 20
    assert {event for event in events if f"`{event}`" not in page} == set()


def test_every_program_has_its_commands_on_the_page() -> None:
    page = (PAGES / "commands.md").read_text()
    programs = entry_points(group="console_scripts")
    ours = {each.name: each.module for each in programs if each.module.startswith("vfl")}
    assert len(ours) == 3
    for name, module in ours.items():
        commands = f"{module.removesuffix('.__main__')}.cli"
        group = import_module(commands).cli
        assert isinstance(group, click.Group)
        assert f"<!-- commands {commands}:cli -->\n\n## {name}\n" in page
        context = click.Context(group)
        # With the commands that packages add as entry points.
        keys = group.list_commands(context)
        commands_by_key = {key: group.get_command(context, key) for key in keys}
        assert "run" in keys or "simulate" in keys
        for key, command in commands_by_key.items():
            assert command is not None
            assert command.hidden or f"### {name} {key}\n" in page


def test_the_page_of_python_has_every_public_name() -> None:
    page = (PAGES / "api.md").read_text()
    for name in vfl.__all__:
        assert f"`{name}`" in page, name
        made = getattr(vfl, name)
        if name != "Code":  # the table of errors has its members
            assert f"::: {made.__module__}.{name}\n" in page, name


def test_the_page_of_names_for_plug_ins_lists_exactly_those() -> None:
    """With the first words of each, and its room; they can all be had."""
    page = (PAGES / "api-for-plugins.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\S.*) \| `(vfl[\w.]+)` \|$", page, re.MULTILINE)
    of_satellites = {each.name: each.module for each in entry_points(group="vfl.api")}
    assert {name for name, _, _ in listed} == {*api.__all__, *of_satellites} == {*dir(api)}
    assert set(api.FROM) == set(api.__all__)
    leaks = {name for name, module in of_satellites.items() if module.startswith("vfl_leaks.")}
    papers = {name for name, module in of_satellites.items() if module.startswith("vfl_papers.")}
    assert leaks == {"Attack", "Figure", "Scene", "Tally", "UnfitError"}
    data_set = {"Content", "DataSet", "Form", "Need", "PaperUse", "Request", "blocks_of"}
    assert papers == data_set | {"COLUMNS", "IMAGE_DIVISIONS"} == {*of_satellites} - leaks
    for name, _, room in listed:
        assert getattr(api, name) is getattr(import_module(room), name)
        # A type checker sees it too.
        assert re.search(rf"\b{name}\b", SEEN), name
    with pytest.raises(AttributeError):
        _ = api.nothing_of_that_name


def test_the_page_of_plug_ins_names_things_that_exist() -> None:
    page = (PAGES / "plugins.md").read_text()
    directives = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    assert len(directives) > 15
    for each in directives:
        module, _, name = each.rpartition(".")
        assert hasattr(import_module(module), name), each
    source = "".join(path.read_text() for path in REPO.glob("vfl*/**/*.py"))
    groups = set(re.findall(r'"(vfl\.[a-z]+)"', source)) & set(re.findall(r"`(vfl\.[a-z]+)`", page))
    # It is the names for plug-ins, and no type of them.
    assert groups - {"vfl.api"} == set(re.findall(r"^\| `(vfl\.[a-z]+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize("page", ["architecture.md", "walks.md"])
def test_a_page_about_the_code_names_files_that_exist(page: str) -> None:
    text = (DOCS / "contributing" / page).read_text()
    files = [path.relative_to(REPO).as_posix() for path in REPO.glob("[bstv]*/**/*.py")]
    named_files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named_files) > 10
    assert {
        name for name in named_files if not any(f"/{each}".endswith(f"/{name}") for each in files)
    } == set()
