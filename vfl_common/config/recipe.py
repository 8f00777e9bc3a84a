"""The recipe: the settings on which all parties agree. It is compared when a party joins."""

from __future__ import annotations

import bisect
import contextlib
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vfl_common.config.base import Section, parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.models import ModelSettings, TaskSettings
from vfl_common.config.recipe_tables import (
    Name,
    PartySettings,
    PhaseSettings,
    PredictSettings,
    RowsSettings,
    RunSettings,
    SimulateSettings,
    StartSettings,
    WireSettings,
)
from vfl_common.config.stands_alone import has_no_encoder
from vfl_common.errors import VflError

# A party's name also serves as a host name and a folder.


# The runner's own, in step keys and the ledger.
RESERVED_PHASES = frozenset({"open", "align", "control", "predict"})
# Beside the parties' folders of a simulated run.
RESERVED_FOLDERS = frozenset({"federation", "summary.json"})
# {table: the keys that the canonical form has at their defaults, too}. A key that is added later is
# in none of them: it stands in the canonical form only with another value than its default, so that
# digests stay what they were. If its default ever changes, it is added here: a run that began with
# the former default is then not resumed with the other.
_FIRST = {
    table: frozenset(keys.split())
    for table, keys in {
        "": "name preset seed server task parties rows model phases start run",
        "task": "kind classes metrics",
        "parties": "name role features encoder",
        "rows": "split validation test aligned labelled",
        "model": "embedding_size combine encoder top precision",
        "encoder": "kind hidden activation batch_norm dropout category_size channels shared "
        "small_images factory"
        " options settings",
        "top": "hidden dropout",
        "phases": "kind name codec transforms settings",
        "transforms": "kind exchange sent_by settings",
        "wire": "codec phase exchange direction settings",
        "start": "run phases tower",
        "run": "rejoin_deadline_s join_deadline_s step_timeout_s heartbeat_s lost_after_s "
        "server_absent_s"
        " checkpoint_every kept_checkpoints",
    }.items()
}
# Kinds, or (kind, objective), that read `preset`.
_OF_PRESET = (
    "fedcvt",
    "fedhssl",
    "mocosfl",
    "contrastive",
    ("fedonce", "contrastive"),
)


class Recipe(Section):
    """An ordered list of phases, with all settings on which the parties must agree.

    The active party may be the only one: a baseline for one party, or for all columns in one place
    (Solo, Combine).
    """

    name: Name
    """The recipe's name, which begins the id of each run."""
    preset: Literal["paper", "released"] = "paper"
    """Which one to follow if a method's paper and its released code differ."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """The seed of the split and the batches; also of initial weights, dropout and what else a party
    draws alone, if its file says ``init = "recipe"``, and in ``vfl simulate``.
    """
    server: Name = "server"
    """The name in the server's certificate."""
    task: TaskSettings
    """The kind of labels."""
    parties: tuple[PartySettings, ...]
    """The parties. Exactly one is active; it may be alone."""
    rows: RowsSettings = RowsSettings()
    """How the parties find and divide their rows."""
    model: ModelSettings
    """The model. Phases that train no encoder do not need it."""
    phases: Annotated[tuple[PhaseSettings, ...], Field(min_length=1)]
    """What is done, in this order."""
    wire: tuple[WireSettings, ...] = ()
    """Codecs of what crosses, by phase, exchange and direction. A table that names the phase goes
    before one that does not, then one that names the exchange, then one that names the direction.
    """
    start: StartSettings | None = None
    """The finished run from which the parties take their encoders."""
    run: RunSettings = RunSettings()
    """Deadlines and intervals."""
    predict: PredictSettings = PredictSettings()
    """What a prediction with a run of this recipe refuses."""
    simulate: SimulateSettings | None = None
    """The data of each party if all run on one machine. Not part of the digest."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_method(cls, value: Any) -> Any:
        if isinstance(value, dict) and "method" in value:
            raise ValueError("remove the key 'method': the phases say what the recipe does")
        return value

    @model_validator(mode="before")
    @classmethod
    def _supply_model(cls, value: Any) -> Any:
        """Supplies the table ``model`` if the only phase is of a kind that trains no encoder."""
        if isinstance(value, dict) and has_no_encoder(value) and "model" not in value:
            return value | {"model": {"embedding_size": 1}}
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
            raise ValueError(f"{text}; take other names")
        if sum(party.role == "active" for party in self.parties) != 1:
            raise ValueError('parties: exactly one party has role = "active"')
        for party in self.parties:
            if party.role == "passive" and not party.features:
                raise ValueError(f"parties: {party.name} is passive and must have features")
        if not any(party.features for party in self.parties):
            raise ValueError(
                f"parties: {self.active.name} is alone and must have features, or add a "
                "passive party"
            )
        if self.rows.validation + self.rows.test >= 1.0:
            raise ValueError("rows: validation + test leave no training rows")
        if self.rows.align == "none":
            self._check_own_rows()
        if self.start is not None and self.start.held_by == "active" and self.rows.align != "none":
            raise ValueError(
                'start: held_by = "active" is for parties that hold rows of their own; remove it'
            )
        if self.rows.align != "psi" and (
            self.rows.alignment is not None or self.rows.at_least != 1
        ):
            raise ValueError(
                'rows: alignment and at_least are for align = "psi"; add that, or remove them'
            )
        for name in names:
            if name in RESERVED_FOLDERS:
                raise ValueError(
                    f"parties: {name!r} is reserved in a run's folder; take another name"
                )
        phase_names = [phase.name for phase in self.phases]
        if len(set(phase_names)) < len(phase_names):
            raise ValueError("phases: two phases have the same name; rename one")
        for name in phase_names:
            if name in RESERVED_PHASES:
                raise ValueError(f"phases: the name {name!r} is reserved; take another")
        self._check_wire(phase_names)
        return self

    def _check_wire(self, phases: list[str]) -> None:
        """Raises ValueError if a table of ``wire`` names no phase, or two say something of the
        same.
        """
        seen: list[tuple[str | None, str | None, str | None]] = []
        seen += [(phase.name, None, None) for phase in self.phases if phase.codec != "identity"]
        for number, each in enumerate(self.wire, 1):
            if each.phase is not None and each.phase not in phases:
                near = difflib.get_close_matches(each.phase, phases, n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"the recipe has {', '.join(phases)}"
                )
                raise ValueError(f"wire: table {number}: there is no phase {each.phase!r}; {hint}")
            if each.named in seen:
                text = (
                    "another table, or the phase's codec, is for the same phase, exchange and "
                    "direction"
                )
                raise ValueError(f"wire: table {number}: {text}; remove one")
            seen.append(each.named)

    def _check_own_rows(self) -> None:
        """Raises ValueError if something else in the recipe needs rows that all parties hold."""
        rows = self.rows
        if rows.aligned < 1.0 or rows.labelled is not None or rows.split == "stratified":
            text = 'aligned, labelled and split = "stratified" are of rows that all parties hold'
            raise ValueError(f'rows: align = "none": {text}; remove them')
        if self.active.features or not self.passives:
            text = "the active party has labels, and no rows of its own"
            raise ValueError(
                f'rows: align = "none": {text}; give it features = false, and add passive parties'
            )

    @property
    def method(self) -> str:
        """The kinds of the phases that train, in order: ``fedhssl → head``."""
        kinds = dict.fromkeys(phase.kind for phase in self.phases)
        return " → ".join([kind for kind in kinds if kind != "evaluate"] or kinds)

    @property
    def follows_preset(self) -> bool:
        """Whether ``preset`` changes what a phase does, of this run or of the one that it starts
        from.
        """
        phases = (*(self.start.phases if self.start is not None else ()), *self.phases)
        return any(
            p.kind in _OF_PRESET or (p.kind, p.settings.get("objective")) in _OF_PRESET
            for p in phases
        )

    @property
    def active(self) -> PartySettings:
        return next(party for party in self.parties if party.role == "active")

    @property
    def passives(self) -> tuple[PartySettings, ...]:
        return tuple(party for party in self.parties if party.role == "passive")

    @property
    def sharing(self) -> tuple[str, ...]:
        """The parties among whom ``simulate.data`` is divided, in the order of its parts."""
        own = self.simulate.parties if self.simulate is not None else {}
        return tuple(
            party.name for party in self.parties if party.features and party.name not in own
        )

    def party(self, name: str) -> PartySettings | None:
        return next((party for party in self.parties if party.name == name), None)

    def canonical_json(self) -> str:
        """Returns the recipe without ``simulate``, with sorted keys and defaults: equal for equal
        recipes.

        Equal from release to release, too: it leaves out keys that not all releases know, unless
        they are set.
        """
        full = self.model_dump(mode="json", exclude={"simulate"})
        least = self.model_dump(mode="json", exclude={"simulate"}, exclude_defaults=True)
        return json.dumps(_without_newer(full, least), sort_keys=True, separators=(",", ":"))

    def spelling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> Spelling:
        """Returns the recipe for a comparison with that of another release. See
        ``Spelling.difference``.

        ``defaults``: tables like the recipe's, with defaults of methods and filters, if the caller
        knows these.
        """
        full = self.model_dump(mode="json", exclude={"simulate"})
        written = self.model_dump(mode="json", exclude={"simulate"}, exclude_unset=True)
        return Spelling(_leaves(dict(defaults)) | _leaves(full), frozenset(_leaves(written)))

    def digest(self) -> str:
        """Returns the SHA-256 of the canonical form, hexadecimal."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def load_recipe(path: Path, *, seed: int | None = None) -> Recipe:
    """Reads a recipe; ``seed`` replaces the file's. Raises InputError."""
    tables = read_tables(path, "recipe")
    if seed is not None:
        tables["seed"] = seed
    return parse(Recipe, tables, str(path))


def recorded_recipe(value: Any, where: str) -> Recipe:
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


def first_difference(ours: str, theirs: str) -> tuple[str, Any, Any] | None:
    """Finds the first key, in sorted order, by which two canonical JSON texts differ: (dotted key,
    our value, theirs).

    A value that is missing on one side is ``None``. Returns None if the texts are equal.
    """
    left, right = _flatten(json.loads(ours)), _flatten(json.loads(theirs))
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            return key, left.get(key), right.get(key)
    return None


@dataclass(frozen=True)
class Spelling:
    """A recipe as one side has it. ``filled``: {dotted key: value}, with defaults. ``written``:
    keys of its file.
    """

    filled: Mapping[str, Any]
    written: frozenset[str]

    def difference(self, theirs: Spelling) -> tuple[str, Any, Any] | None:
        """Finds a key by which the recipes of two releases differ: (dotted key, our value, theirs).
        None: they agree.

        A key that both know must have one value, written or not. A key that only one of them knows
        must not be written there: its default is what the other does. What is missing on one side
        is ``None`` in the result.
        """
        ours, others = self.filled, theirs.filled
        for key in sorted(ours.keys() | others.keys()):
            if key in ours and key in others:
                if ours[key] != others[key]:
                    return key, ours[key], others[key]
            elif key in (self.written if key in ours else theirs.written):
                return key, ours.get(key), others.get(key)
        # A default that is a table in one release alone.
        for key in _tables(ours, others):
            return key, ours[key], "a table"
        for key in _tables(others, ours):
            return key, "a table", others[key]
        return None


def _without_newer(full: Any, least: Any, table: str = "") -> Any:
    """Returns ``full`` without the keys that ``least``, which has no defaults, and ``_FIRST`` both
    lack.
    """
    if isinstance(full, list):
        items = least if isinstance(least, list) else [{}] * len(full)
        return [_without_newer(each, few, table) for each, few in zip(full, items, strict=True)]
    if not isinstance(full, dict):
        return full
    few, first = least if isinstance(least, dict) else {}, _FIRST.get(table, frozenset())
    kept = (key for key in full if key in few or key in first)
    return {key: _without_newer(full[key], few.get(key), key) for key in kept}


def _tables(keys: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Returns those of ``keys``, sorted, that are tables in ``others``."""
    known = sorted(others)
    after = {key: bisect.bisect_left(known, f"{key}.") for key in sorted(keys)}
    return [
        key
        for key, place in after.items()
        if place < len(known) and known[place].startswith(f"{key}.")
    ]


def _leaves(value: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens tables as ``_flatten`` does; a list without tables stays one value."""
    return _flatten(value, whole=True)


def _flatten(value: Any, prefix: str = "", *, whole: bool = False) -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and not (
        whole and not any(isinstance(each, dict) for each in value)
    ):
        items = ((str(index), item) for index, item in enumerate(value))  # type: ignore[assignment]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        # People write no "settings".
        path = prefix if key == "settings" else f"{prefix}.{key}" if prefix else str(key)
        flat |= _flatten(item, path, whole=whole)
    return flat
