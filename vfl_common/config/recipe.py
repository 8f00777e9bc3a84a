"""The recipe: the settings on which all parties agree, and each party's data when all parties run
on one machine. The server compares the recipes when a party joins.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from vfl_common.config.base import Section, parse, read_tables
from vfl_common.config.data import NO_FEATURES, DataSettings, ViewSettings
from vfl_common.config.models import ModelSettings
from vfl_common.config.recipe_tables import (
    Name,
    PartySettings,
    PhaseSettings,
    PredictSettings,
    PsiSettings,
    ReportSettings,
    RowsSettings,
    RunSettings,
    SimulateSettings,
    StartSettings,
    WireSettings,
)
from vfl_common.config.spelling import Spelling, drop_newer_keys, flatten_tables
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.text import MEASURES, describe_method

# The phase names that the runner itself uses in step keys and in the ledger.
RESERVED_PHASES = frozenset({"open", "align", "control", "predict", "serve"})
# Names in the folder of a simulated run, next to the parties' folders.
RESERVED_FOLDERS = frozenset({"federation", "summary.json"})


class Recipe(Section):
    """An ordered list of phases, with all settings on which the parties must agree.

    The active party may be the only one: a baseline for one party, or for all columns in one place
    (Solo, Combine).

    A recipe of one phase may lack ``model``. Only the parties can check whether that phase works
    without encoders: see ``vfl_party.phases.course``.
    """

    name: Name
    """The recipe's name, which begins the id of each run."""
    preset: Literal["paper", "released"] = "paper"
    """Which of the two a method follows where its paper and its released code differ."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """The seed of the split and the batches. In ``vfl simulate``, and at a party whose file says
    ``init = "recipe"``, it is also the seed of initial weights, dropout and every other random
    number of a party.
    """
    server: Name = "server"
    """The name in the server's certificate."""
    task: TaskSettings
    """The kind of labels."""
    parties: tuple[PartySettings, ...]
    """The parties. Exactly one is active; it may be the only party."""
    rows: RowsSettings = RowsSettings()
    """How the parties find and divide their rows."""
    model: ModelSettings = ModelSettings(embedding_size=1)
    """The model. It can be left out only if the single phase trains no encoder."""
    phases: Annotated[tuple[PhaseSettings, ...], Field(min_length=1)]
    """The phases of the run, in order."""
    wire: tuple[WireSettings, ...] = ()
    """The codecs of messages, by phase, exchange and direction. If several tables match, the one
    that names the phase applies; if several remain, the one that names the exchange; then the one
    that names the direction.
    """
    start: StartSettings | None = None
    """The finished run from which the parties take their encoders."""
    run: RunSettings = RunSettings()
    """Deadlines and intervals."""
    predict: PredictSettings = PredictSettings()
    """Limits for predictions with a run of this recipe."""
    report: ReportSettings = ReportSettings()
    """The results that passive parties receive."""
    simulate: SimulateSettings | None = None
    """The data of each party when all run on one machine. Not part of the digest."""
    _modelled: tuple[PartySettings, ...] = PrivateAttr(())

    @model_validator(mode="before")
    @classmethod
    def _refuse_method(cls, value: Any) -> Any:
        if isinstance(value, dict) and "method" in value:
            raise ValueError(
                "the key 'method' is not used: the phases define the method. Remove it."
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _need_model(cls, value: Any) -> Any:
        """Refuses a recipe of several phases without the table ``model``."""
        if isinstance(value, dict) and "model" not in value:
            phases = value.get("phases")
            if isinstance(phases, (list, tuple)) and len(phases) > 1:
                raise ValidationError.from_exception_data(
                    "model", [{"type": "missing", "loc": ("model",), "input": value}]
                )
        return value

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        names = [party.name for party in self.parties] + [self.server]
        duplicate_names = sorted({name for name in names if names.count(name) > 1})
        if duplicate_names:
            raise ValueError(
                f"the name {duplicate_names[0]!r} is used twice among the parties and the server. "
                "Rename one."
            )
        lower_names = [name.lower() for name in names]
        similar_names = sorted(name for name in names if lower_names.count(name.lower()) > 1)
        if similar_names:
            raise ValueError(
                f"the names {similar_names[0]!r} and {similar_names[1]!r} differ only in case, "
                "which TLS ignores. Rename one."
            )
        if sum(party.role == "active" for party in self.parties) != 1:
            raise ValueError('parties: exactly one party has role = "active"')
        for party in self.parties:
            if party.role == "passive" and not party.features:
                raise ValueError(
                    f"parties: {party.name} is passive and must have features. Remove features = "
                    "false."
                )
            if party.embedding_size is not None:
                self._check_own_size(party)
        if not any(party.features for party in self.parties):
            raise ValueError(
                f"parties: {self.active.name} is the only party and must have features. Add "
                "features, or a passive party."
            )
        if self.rows.validation + self.rows.share_for_tests >= 1.0:
            tests = "test" if self.rows.folds is None else "the fold for testing"
            raise ValueError(f"rows: validation + {tests} leave no training rows. Reduce them.")
        if self.rows.align == "none":
            self._check_own_rows()
        if self.start is not None and self.start.held_by == "active" and self.rows.align != "none":
            raise ValueError('start: held_by = "active" needs rows.align = "none". Remove it.')
        self._check_alignment_settings()
        if self.task.label_epsilon is not None and self.rows.split != "random":
            raise ValueError(
                'task.label_epsilon: needs rows.split = "random", because a split that the active '
                f'party chooses may reveal labels (got "{self.rows.split}"). Change rows.split.'
            )
        if self.task.kind == "ranking" and self.rows.split not in ("grouped", "column"):
            raise ValueError(
                "rows: a ranking needs all rows of a query in one split (got split = "
                f'"{self.rows.split}"). Set split = "grouped".'
            )
        for name in names:
            if name in RESERVED_FOLDERS:
                raise ValueError(
                    f"parties: {name!r} is reserved in a run's folder. Use another name."
                )
        phase_names = [phase.name for phase in self.phases]
        if len(set(phase_names)) < len(phase_names):
            raise ValueError("phases: two phases have the same name. Rename one.")
        for name in phase_names:
            if name in RESERVED_PHASES:
                raise ValueError(f"phases: the name {name!r} is reserved. Use another name.")
        self._check_wire(phase_names)
        self._check_reported_metrics()
        return self

    def _check_alignment_settings(self) -> None:
        """Raises ValueError if the recipe has settings of an alignment by psi, but does not use
        psi.
        """
        rows = self.rows
        if rows.align not in ("psi", "fuzzy") and (
            rows.alignment is not None or rows.at_least != 1
        ):
            raise ValueError(
                'rows: alignment and at_least need align = "psi" or "fuzzy". Set it, or remove '
                "them."
            )
        if rows.partial and rows.align != "psi":
            raise ValueError('rows: partial = true needs align = "psi". Set it, or remove partial.')
        if rows.align != "psi" and rows.psi != PsiSettings():
            raise ValueError('rows: psi needs align = "psi". Set it, or remove psi.')
        if rows.psi.engine == "rr22" and (len(self.passives) != 1 or rows.partial):
            raise ValueError(
                'rows: psi.engine = "rr22" needs two parties without partial. Set "x25519".'
            )
        if rows.partial and not self.passives:
            raise ValueError(
                f"rows: partial: {self.active.name} is the only party, so no other party can hold "
                "some of its rows. Remove it, or add a passive party."
            )

    def _check_reported_metrics(self) -> None:
        """Raises ValueError if ``report.tell_passives`` names metrics that cannot be reported to
        the passive parties.
        """
        metrics, known = self.report.tell_passives, self.task.all_metrics
        where = "report: tell_passives"
        for name in metrics:
            if name not in known:
                raise ValueError(
                    f"{where}: a {self.task.kind} task has no {name}. Choose from: "
                    f"{', '.join(known)}."
                )
        if len(set(metrics)) < len(metrics):
            raise ValueError(f"{where}: a metric is named twice. Remove one.")
        if metrics and all(phase.kind != MEASURES for phase in self.phases):
            raise ValueError(
                f'{where}: needs a phase of kind = "{MEASURES}", which reports them. Add it.'
            )

    def _check_own_size(self, party: PartySettings) -> None:
        """Raises ValueError if the party may not set its own ``embedding_size``."""
        if not party.features:
            raise ValueError(
                f"parties: {party.name} has no features, so it sends no embeddings. Remove its "
                "embedding_size."
            )
        if self.model.combine != "concat":
            raise ValueError(
                f'parties: model.combine = "{self.model.combine}" needs embeddings of one width. '
                f'Remove the embedding_size of {party.name}, or use "concat".'
            )

    def _check_wire(self, phases: list[str]) -> None:
        """Raises ValueError if a table of ``wire`` names an unknown phase, or if two tables are for
        the same messages.
        """
        seen: list[tuple[str | None, str | None, str | None]] = []
        seen += [(phase.name, None, None) for phase in self.phases if phase.codec != "identity"]
        for number, table in enumerate(self.wire, 1):
            if table.phase is not None and table.phase not in phases:
                suggestions = difflib.get_close_matches(table.phase, phases, n=1)
                hint = (
                    f"did you mean {suggestions[0]!r}?"
                    if suggestions
                    else f"the recipe has {', '.join(phases)}"
                )
                raise ValueError(f"wire: table {number}: there is no phase {table.phase!r}; {hint}")
            if table.named in seen:
                raise ValueError(
                    f"wire: table {number}: another table, or the phase's codec, is for the same "
                    "phase, exchange and direction. Remove one."
                )
            seen.append(table.named)

    def _check_own_rows(self) -> None:
        """Raises ValueError if another setting of the recipe needs rows that all parties hold."""
        rows = self.rows
        is_joint_split = rows.split in ("stratified", "grouped")
        if rows.aligned < 1.0 or rows.labelled is not None or is_joint_split:
            split = rows.split if is_joint_split else "stratified"
            raise ValueError(
                f'rows: align = "none": aligned, labelled and split = "{split}" need rows that all '
                "parties hold. Remove them."
            )
        if self.active.features or not self.passives:
            raise ValueError(
                'rows: align = "none": the active party must have no features, and there must be '
                "passive parties. Set its features = false, and add passive parties."
            )

    @property
    def method(self) -> str:
        """The kinds of the phases that train, in order: ``fedhssl → head``."""
        return describe_method(phase.kind for phase in self.phases)

    @property
    def active(self) -> PartySettings:
        return next(party for party in self.parties if party.role == "active")

    # Cached, because a recipe never changes and computing it is slow with a thousand parties.
    @cached_property
    def passives(self) -> tuple[PartySettings, ...]:
        return tuple(party for party in self.parties if party.role == "passive")

    @property
    def own_rows(self) -> bool:
        """Whether the parties hold different rows, not different columns of the same rows."""
        return self.rows.align == "none" and bool(self.passives)

    @property
    def sharing(self) -> tuple[str, ...]:
        """The parties among whom ``simulate.data`` is divided, in the order of its parts."""
        own_data = self.simulate.parties if self.simulate is not None else {}
        return tuple(
            party.name for party in self.parties if party.features and party.name not in own_data
        )

    @property
    def modelled(self) -> tuple[PartySettings, ...]:
        """All parties with which the model was trained: ``parties``, and the parties that a
        prediction leaves out.
        """
        return self._modelled or self.parties

    def without(self, names: Collection[str]) -> Recipe:
        """Returns the recipe of a prediction without the passive parties ``names``; the model stays
        the model of all parties. Raises InputError if such a prediction is not possible.
        """
        passives = [party.name for party in self.passives]
        for name in names:
            if name == self.active.name:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"--without {name}: the active party has the model, so every prediction needs "
                    "it. Give passive parties.",
                )
            if name not in passives:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"--without {name}: is not a passive party of recipe {self.name}. Choose from: "
                    f"{', '.join(passives)}.",
                )
        remaining = tuple(party for party in self.parties if party.name not in names)
        if not any(party.features for party in remaining):
            raise InputError(
                Code.CONFIG_INVALID,
                f"--without {', '.join(names)}: no party with columns is left. Give fewer parties.",
            )
        reduced_recipe = self.model_copy(update={"parties": remaining})
        reduced_recipe._modelled = self.modelled
        return reduced_recipe

    def embedding_size(self, name: str) -> int:
        """Returns the width of a party's embedding."""
        party = self._modelled_by_name.get(name)
        own_size = party.embedding_size if party is not None else None
        return self.model.embedding_size if own_size is None else own_size

    def party(self, name: str) -> PartySettings | None:
        return self.by_name.get(name)

    @cached_property
    def by_name(self) -> dict[str, PartySettings]:
        """{party: its settings}."""
        return {party.name: party for party in reversed(self.parties)}

    @cached_property
    def _modelled_by_name(self) -> dict[str, PartySettings]:
        return {party.name: party for party in reversed(self.modelled)}

    def canonical_json(self) -> str:
        """Returns the recipe as JSON with sorted keys and defaults, without ``simulate``: the same
        text for the same settings.

        The text is also the same in every release, because keys that some releases do not know are
        left out unless they are set.
        """
        return self.canonical

    @cached_property
    def canonical(self) -> str:
        """See ``canonical_json``."""
        full = self.model_dump(mode="json", exclude={"simulate"})
        own = self.model_dump(mode="json", exclude={"simulate"}, exclude_defaults=True)
        return json.dumps(drop_newer_keys(full, own), sort_keys=True, separators=(",", ":"))

    def spelling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> Spelling:
        """Returns the recipe in the form in which it is compared with a recipe of another release:
        see ``Spelling.difference``.

        ``defaults``: tables in the layout of the recipe, with the defaults of methods and
        transforms, if the caller knows them.
        """
        without_defaults = self.own_spelling
        return (
            Spelling(
                flatten_tables(dict(defaults)) | dict(without_defaults.filled),
                without_defaults.written,
            )
            if defaults
            else without_defaults
        )

    @cached_property
    def own_spelling(self) -> Spelling:
        """The result of ``spelling`` without the defaults of methods and transforms."""
        full = self.model_dump(mode="json", exclude={"simulate"})
        written = self.model_dump(mode="json", exclude={"simulate"}, exclude_unset=True)
        return Spelling(flatten_tables(full), frozenset(flatten_tables(written)))

    def digest(self) -> str:
        """Returns the SHA-256 of the canonical form, hexadecimal."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def __copy__(self) -> Recipe:
        """Copies the recipe without its cached properties, because the copy may get other
        settings.
        """
        copied = super().__copy__()
        for name in [name for name in copied.__dict__ if name not in type(self).model_fields]:
            del copied.__dict__[name]
        return copied


def load_recipe(path: Path, *, seed: int | None = None) -> Recipe:
    """Reads a recipe; ``seed`` replaces the file's. Raises InputError."""
    tables = read_tables(path, "recipe")
    if seed is not None:
        tables["seed"] = seed
    return parse(Recipe, tables, str(path))


def read_recorded_recipe(value: Any, where: str) -> Recipe:
    """Reads the copy of a recipe in a run's folder. A copy from an early release may have the key
    ``method``, which is ignored. Raises InputError.
    """
    tables = (
        {key: item for key, item in value.items() if key != "method"}
        if isinstance(value, dict)
        else value
    )
    return parse(Recipe, tables, where)


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Replaces the prefix ``recipe: `` of errors in the block with the path of the recipe's file.
    Code that does not know the path uses this prefix.
    """
    try:
        yield
    except VflError as error:
        text = str(error)
        if text.startswith("recipe: "):
            error.privately(f"{path}: {text.removeprefix('recipe: ')}")
        raise


def get_simulate_settings(recipe: Recipe) -> SimulateSettings:
    """Returns the recipe's table [simulate]. Raises InputError if the recipe has none."""
    if recipe.simulate is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe {recipe.name}: simulate: missing. Give the party files in place of the "
            "recipe, or each party's data: [simulate.data] and simulate.scheme, or a "
            "[simulate.parties.NAME] for each party.",
        )
    return recipe.simulate


def divide(recipe: Recipe, base: Path) -> dict[str, DataSettings]:
    """Returns each party's data: its own source, or its part of the shared data set. Relative paths
    start at ``base``.

    The parts are assigned to the parties that have features, in the order of the recipe. An active
    party without features reads only the label. Raises InputError if a party has no data, or if the
    scheme does not fit the number of parties.
    """
    simulate = get_simulate_settings(recipe)
    roster = [party.name for party in recipe.parties]
    for key, settings in (
        ("parties", simulate.parties),
        ("devices", simulate.devices),
        ("policies", simulate.policies),
    ):
        for name in settings:
            if name not in roster:
                suggestions = difflib.get_close_matches(name, roster, n=1)
                hint = (
                    f"did you mean {suggestions[0]!r}?"
                    if suggestions
                    else f"parties: {', '.join(roster)}"
                )
                raise _invalid(recipe, f"{key}.{name}: not a party of the recipe; {hint}")
    data = {}
    for party in recipe.parties:
        own_data = simulate.parties.get(party.name)
        if own_data is None and simulate.data is None:
            raise _invalid(
                recipe,
                f"parties.{party.name}: missing. Add it, or add simulate.data for all parties.",
            )
        data[party.name] = (own_data or _select_part(recipe, simulate, party)).absolute(
            base.resolve()
        )
    return data


def _select_part(recipe: Recipe, simulate: SimulateSettings, party: PartySettings) -> DataSettings:
    """Returns one party's part of the shared data set."""
    shared_data = simulate.data
    assert shared_data is not None  # noqa: S101 - checked by the caller
    if shared_data.view is not None:
        raise _invalid(recipe, "data.view: simulate.scheme divides the data set. Remove the view.")
    if not party.features:
        return shared_data.model_copy(update=NO_FEATURES)
    sharers = recipe.sharing
    view = {"scheme": simulate.scheme, "part": sharers.index(party.name), "parts": len(sharers)}
    where = f"recipe {recipe.name}: simulate.scheme ({len(sharers)} parties share the data set)"
    return shared_data.model_copy(update={"view": parse(ViewSettings, view, where)})


def _invalid(recipe: Recipe, what: str) -> InputError:
    return InputError(Code.CONFIG_INVALID, f"recipe {recipe.name}: simulate.{what}")
