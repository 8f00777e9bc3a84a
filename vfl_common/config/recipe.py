"""The recipe: the settings on which all parties agree. It is compared when a party joins."""

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

from vfl_common.config.base import Section, parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.models import ModelSettings, TaskSettings
from vfl_common.config.recipe_tables import (
    Name,
    PartySettings,
    PhaseSettings,
    PredictSettings,
    ReportSettings,
    RowsSettings,
    RunSettings,
    SimulateSettings,
    StartSettings,
    WireSettings,
)
from vfl_common.config.spelling import Spelling, leaves, without_newer
from vfl_common.errors import Code, InputError, VflError
from vfl_common.text import MEASURES, method_of

# The runner's own, in step keys and the ledger.
RESERVED_PHASES = frozenset({"open", "align", "control", "predict", "serve"})
# Beside the parties' folders of a simulated run.
RESERVED_FOLDERS = frozenset({"federation", "summary.json"})


class Recipe(Section):
    """An ordered list of phases, with all settings on which the parties must agree.

    The active party may be the only one: a baseline for one party, or for all columns in one place
    (Solo, Combine).

    ``model``: a recipe of one phase may lack it. Whether that phase can do without encoders, only
    the parties know: see ``vfl_party.phases.course``.
    """

    name: Name
    """The recipe's name, which begins the id of each run."""
    preset: Literal["paper", "released"] = "paper"
    """What a method follows if its paper and its released code differ."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """The seed of the split and the batches. In ``vfl simulate``, and at a party whose file says
    ``init = "recipe"``, also the seed of initial weights, dropout and all else that a party draws
    alone.
    """
    server: Name = "server"
    """The name in the server's certificate."""
    task: TaskSettings
    """The kind of labels."""
    parties: tuple[PartySettings, ...]
    """The parties. Exactly one is active; it may be alone."""
    rows: RowsSettings = RowsSettings()
    """How the parties find and divide their rows."""
    model: ModelSettings = ModelSettings(embedding_size=1)
    """The model. Only a single phase that trains no encoder can do without it."""
    phases: Annotated[tuple[PhaseSettings, ...], Field(min_length=1)]
    """What the run does, in this order."""
    wire: tuple[WireSettings, ...] = ()
    """Codecs of what crosses, by phase, exchange and direction. If several tables fit, the one that
    names the phase counts; if that leaves several, the one that names the exchange; then the one
    that names the direction.
    """
    start: StartSettings | None = None
    """The finished run from which the parties take their encoders."""
    run: RunSettings = RunSettings()
    """Deadlines and intervals."""
    predict: PredictSettings = PredictSettings()
    """What a prediction with a run of this recipe refuses."""
    report: ReportSettings = ReportSettings()
    """What the passive parties learn of the result."""
    simulate: SimulateSettings | None = None
    """The data of each party if all run on one machine. Not part of the digest."""
    _modelled: tuple[PartySettings, ...] = PrivateAttr(())

    @model_validator(mode="before")
    @classmethod
    def _refuse_method(cls, value: Any) -> Any:
        if isinstance(value, dict) and "method" in value:
            raise ValueError("remove the key 'method': the phases say what the recipe does")
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
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(
                f"the name {doubles[0]!r} is used twice among the parties and the server"
            )
        plain = [name.lower() for name in names]
        alike = sorted(name for name in names if plain.count(name.lower()) > 1)
        if alike:
            text = (
                f"the names {alike[0]!r} and {alike[1]!r} differ by capitals alone, which TLS "
                "takes for the same"
            )
            raise ValueError(f"{text}. Take other names.")
        if sum(party.role == "active" for party in self.parties) != 1:
            raise ValueError('parties: exactly one party has role = "active"')
        for party in self.parties:
            if party.role == "passive" and not party.features:
                raise ValueError(f"parties: {party.name} is passive and must have features")
            if party.embedding_size is not None:
                self._check_own_size(party)
        if not any(party.features for party in self.parties):
            raise ValueError(
                f"parties: {self.active.name} is alone and must have features, or add a "
                "passive party"
            )
        if self.rows.validation + self.rows.share_for_tests >= 1.0:
            tests = "test" if self.rows.folds is None else "the fold for testing"
            raise ValueError(f"rows: validation + {tests} leave no training rows")
        if self.rows.align == "none":
            self._check_own_rows()
        if self.start is not None and self.start.held_by == "active" and self.rows.align != "none":
            raise ValueError(
                'start: held_by = "active" is for parties that hold rows of their own. Remove it.'
            )
        self._check_found_rows()
        if self.task.label_epsilon is not None and self.rows.split != "random":
            text = f'needs rows.split = "random" (got "{self.rows.split}")'
            raise ValueError(
                f"task.label_epsilon: {text}. A division by the active party may tell labels."
            )
        if self.task.kind == "ranking" and self.rows.split not in ("grouped", "column"):
            text = f'a ranking compares the rows of a query, and split = "{self.rows.split}"'
            raise ValueError(f'rows: {text} divides them. Set split = "grouped".')
        for name in names:
            if name in RESERVED_FOLDERS:
                raise ValueError(
                    f"parties: {name!r} is reserved in a run's folder. Take another name."
                )
        phase_names = [phase.name for phase in self.phases]
        if len(set(phase_names)) < len(phase_names):
            raise ValueError("phases: two phases have the same name; rename one")
        for name in phase_names:
            if name in RESERVED_PHASES:
                raise ValueError(f"phases: the name {name!r} is reserved. Take another.")
        self._check_wire(phase_names)
        self._check_told()
        return self

    def _check_found_rows(self) -> None:
        """Raises ValueError if the recipe says how rows are found, and does not have them found."""
        rows = self.rows
        if rows.align != "psi" and (rows.alignment is not None or rows.at_least != 1):
            raise ValueError(
                'rows: alignment and at_least are for align = "psi". Add that, or remove them.'
            )
        if rows.partial and rows.align != "psi":
            raise ValueError('rows: partial = true is for align = "psi". Add that, or remove it.')
        if rows.partial and not self.passives:
            text = f"{self.active.name} is alone, and no other party can hold some of its rows"
            raise ValueError(f"rows: partial: {text}. Remove it, or add a passive party.")

    def _check_told(self) -> None:
        """Raises ValueError if the passive parties could not be told what they are to be."""
        metrics, known = self.report.tell_passives, self.task.all_metrics
        where = "report: tell_passives"
        for name in metrics:
            if name not in known:
                text = f"a {self.task.kind} task has no {name}"
                raise ValueError(f"{where}: {text} (it has {', '.join(known)})")
        if len(set(metrics)) < len(metrics):
            raise ValueError(f"{where}: a metric is named twice. Remove one.")
        if metrics and all(phase.kind != MEASURES for phase in self.phases):
            raise ValueError(f'{where}: add a phase of kind = "{MEASURES}", which tells them')

    def _check_own_size(self, party: PartySettings) -> None:
        """Raises ValueError if the party cannot have embeddings of a width of its own."""
        if not party.features:
            text = f"{party.name} has no features, so it gives no embeddings"
            raise ValueError(f"parties: {text}. Remove embedding_size.")
        if self.model.combine != "concat":
            text = f'model.combine = "{self.model.combine}" needs embeddings of one width'
            raise ValueError(
                f'parties: {text}. Remove {party.name}\'s embedding_size, or take "concat".'
            )

    def _check_wire(self, phases: list[str]) -> None:
        """Raises ValueError if a table of ``wire`` names no phase, or two say something of the
        same.
        """
        seen: list[tuple[str | None, str | None, str | None]] = []
        seen += [(phase.name, None, None) for phase in self.phases if phase.codec != "identity"]
        for number, table in enumerate(self.wire, 1):
            if table.phase is not None and table.phase not in phases:
                near = difflib.get_close_matches(table.phase, phases, n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"the recipe has {', '.join(phases)}"
                )
                raise ValueError(f"wire: table {number}: there is no phase {table.phase!r}; {hint}")
            if table.named in seen:
                text = (
                    "another table, or the phase's codec, is for the same phase, exchange and "
                    "direction"
                )
                raise ValueError(f"wire: table {number}: {text}. Remove one.")
            seen.append(table.named)

    def _check_own_rows(self) -> None:
        """Raises ValueError if something else in the recipe needs rows that all parties hold."""
        rows = self.rows
        shared = rows.split in ("stratified", "grouped")
        if rows.aligned < 1.0 or rows.labelled is not None or shared:
            split = rows.split if shared else "stratified"
            text = f'aligned, labelled and split = "{split}" are of rows that all parties hold'
            raise ValueError(f'rows: align = "none": {text}. Remove them.')
        if self.active.features or not self.passives:
            text = "the active party has labels, and no rows of its own"
            raise ValueError(
                f'rows: align = "none": {text}. Give it features = false, and add passive parties.'
            )

    @property
    def method(self) -> str:
        """The kinds of the phases that train, in order: ``fedhssl → head``."""
        return method_of(phase.kind for phase in self.phases)

    @property
    def active(self) -> PartySettings:
        return next(party for party in self.parties if party.role == "active")

    # A recipe never changes, and with a thousand parties each of these takes a while.
    @cached_property
    def passives(self) -> tuple[PartySettings, ...]:
        return tuple(party for party in self.parties if party.role == "passive")

    @property
    def own_rows(self) -> bool:
        """Whether the parties hold different rows, and not columns of the same ones."""
        return self.rows.align == "none" and bool(self.passives)

    @property
    def sharing(self) -> tuple[str, ...]:
        """The parties among whom ``simulate.data`` is divided, in the order of its parts."""
        own = self.simulate.parties if self.simulate is not None else {}
        return tuple(
            party.name for party in self.parties if party.features and party.name not in own
        )

    @property
    def modelled(self) -> tuple[PartySettings, ...]:
        """The parties of the model: ``parties``, and those without which a prediction is made."""
        return self._modelled or self.parties

    def without(self, names: Collection[str]) -> Recipe:
        """Returns the recipe of a prediction in which some passive parties take no part; its model
        stays the one of all. Raises InputError.
        """
        passives = [party.name for party in self.passives]
        for name in names:
            if name == self.active.name:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"--without {name}: the active party has the model, and no prediction can do "
                    "without it. Give passive parties.",
                )
            if name not in passives:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"--without {name}: is not a passive party of recipe {self.name}. Choose from: "
                    f"{', '.join(passives)}.",
                )
        there = tuple(party for party in self.parties if party.name not in names)
        if not any(party.features for party in there):
            raise InputError(
                Code.CONFIG_INVALID,
                f"--without {', '.join(names)}: no party with columns is left. Give fewer parties.",
            )
        changed = self.model_copy(update={"parties": there})
        changed._modelled = self.modelled
        return changed

    def embedding_size(self, name: str) -> int:
        """Returns the width of a party's embedding."""
        place = self._modelled_by_name.get(name)
        own = place.embedding_size if place is not None else None
        return self.model.embedding_size if own is None else own

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
        """Returns the recipe without ``simulate``, with sorted keys and defaults: equal for equal
        recipes.

        Equal from release to release, too: it leaves out keys that not all releases know, unless
        they are set.
        """
        return self.canonical

    @cached_property
    def canonical(self) -> str:
        """See ``canonical_json``."""
        full = self.model_dump(mode="json", exclude={"simulate"})
        own = self.model_dump(mode="json", exclude={"simulate"}, exclude_defaults=True)
        return json.dumps(without_newer(full, own), sort_keys=True, separators=(",", ":"))

    def spelling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> Spelling:
        """Returns the recipe for a comparison with that of another release. See
        ``Spelling.difference``.

        ``defaults``: tables like the recipe's, with defaults of methods and filters, if the caller
        knows these.
        """
        own = self.own_spelling
        return Spelling(leaves(dict(defaults)) | dict(own.filled), own.written) if defaults else own

    @cached_property
    def own_spelling(self) -> Spelling:
        """``spelling`` without defaults of methods and filters."""
        full = self.model_dump(mode="json", exclude={"simulate"})
        written = self.model_dump(mode="json", exclude={"simulate"}, exclude_unset=True)
        return Spelling(leaves(full), frozenset(leaves(written)))

    def digest(self) -> str:
        """Returns the SHA-256 of the canonical form, hexadecimal."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def __copy__(self) -> Recipe:
        """Copies the recipe without what it has computed: the copy may get other values."""
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
    """Reads the copy of a recipe that a run keeps, also one of before, with the key ``method``.
    Raises InputError.
    """
    known = (
        {key: item for key, item in value.items() if key != "method"}
        if isinstance(value, dict)
        else value
    )
    return parse(Recipe, known, where)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names the recipe's file in errors of the block: code that has only the recipe begins them
    with ``recipe: ``.
    """
    try:
        yield
    except VflError as error:
        text = str(error)
        if text.startswith("recipe: "):
            error.privately(f"{path}: {text.removeprefix('recipe: ')}")
        raise
