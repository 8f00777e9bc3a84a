"""The tables of a recipe: its parties, rows, phases, codecs, deadlines."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from vfl_common.config.base import KindName, Section, gather_settings, match_pattern
from vfl_common.config.data import DataSettings, IdRule
from vfl_common.config.models import EncoderSettings
from vfl_common.config.models import PositiveInt as Width
from vfl_common.config.policy import PolicySettings
from vfl_common.files import PLAIN_NAME

Name = Annotated[
    str,
    match_pattern(
        r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?",
        "1 to 64 letters, digits, '.', '_' or '-', with a letter or digit at both ends",
    ),
]
RunName = Annotated[
    str,
    match_pattern(
        PLAIN_NAME.pattern, "the name of a folder of runs: letters, digits, '.', '_' and '-'"
    ),
]
Seconds = Annotated[float, Field(gt=0.0, le=1e6)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def _count_or_share(value: int | float) -> int | float:
    """a number of rows, or a share above 0 and below 1"""
    fits = value >= 1 if isinstance(value, int) else 0.0 < value < 1.0
    if not fits:
        raise ValueError(
            "must be a number of rows, such as 1000, or a share of each party's rows between 0 "
            f"and 1, such as 0.8 (got {value})."
        )
    return value


# A float such as 0.8 is a share of the rows, an int such as 1000 a number of rows.
CountOrShare = Annotated[int | float, AfterValidator(_count_or_share)]


# A row is known to all parties by the number of its key, one digit, and the key.
MAX_KEYS = 9


class PartySettings(Section):
    """The settings of one party in the recipe."""

    name: Name
    """The party's name. Its certificate has the same name."""
    role: Literal["active", "passive"]
    """``active`` for exactly one party, which has the labels."""
    features: bool = True
    """Whether the party has features. Only an active party may have none."""
    encoder: EncoderSettings | None = None
    """This party's encoder, in place of ``model.encoder``."""
    embedding_size: Width | None = None
    """The width of this party's embedding, in place of ``model.embedding_size``; only for
    ``combine = "concat"``.
    """


class PsiSettings(Section):
    """The engine of a private set intersection."""

    engine: Literal["auto", "rr22", "x25519"] = "auto"
    """``x25519``: Diffie-Hellman, for any number of parties. ``rr22``: oblivious transfer by
    SecretFlow's engine, for two parties, several times as fast; it needs the wheel ``spu`` at both,
    and the active party learns the common rows first. ``auto``: rr22 for two parties of 20,000 rows
    or more if both have the wheel and ``at_least`` is 1, else x25519.
    """


class FuzzyField(Section):
    """A field of a fuzzy linkage."""

    hashes: Annotated[int, Field(ge=1, le=32)] = 5
    """The number of bits that a pair of letters sets. More bits give the field more weight."""
    positional: bool = False
    """Whether pairs of letters are compared with their positions, as for dates and postcodes."""


class FuzzySettings(Section):
    """A fuzzy linkage."""

    fields: dict[str, FuzzyField] = Field(default_factory=dict)
    """The fields that are compared, such as names, dates and addresses: ``{surname = {hashes = 10},
    birth_date = {hashes = 10, positional = true}}``.
    """
    threshold: Annotated[float, Field(ge=0.2, le=0.95)] | None = None
    """The minimum similarity of a link, from 0 for unrelated rows to 1 for equal rows. Default: the
    server estimates the one with the highest F1.
    """
    min_precision: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    """The run ends before training if the estimated precision of the links is lower. The estimate
    does not notice relatives of whom each table has one.
    """
    weights: bool = False
    """Whether the active party weights each training row by the estimated probability that its link
    is right.
    """


class RowsSettings(Section):
    """How the parties find the rows that all of them hold, and how they divide these rows, in the
    same way at every party.

    If the active party divides the rows (``stratified``, ``grouped``, ``column``), it sends the
    split of each row to the other parties. ``aligned`` and ``labelled`` are for experiments with
    few aligned or labelled rows. All further training rows are treated as not aligned, or as not
    labelled.
    """

    align: Literal["digest", "psi", "fuzzy", "none"] = "digest"
    """How the parties find their common rows. ``digest``: all hold the same ids, which they verify.
    ``psi``: they find the ids in common by private set intersection. ``fuzzy``: the server links
    rows by keyed encodings of names, dates and addresses that may have errors. ``none``: each
    passive party holds other rows of the same columns.
    """
    at_least: CountOrShare = 1
    """With psi or fuzzy: the minimum number of common rows, or their minimum share of each party's
    rows. With fewer, the run ends before any party learns which rows are common; with ``keys`` or
    ``fuzzy``, before training. With ``partial``, the minimum applies to each party's rows that are
    used.
    """
    psi: PsiSettings = PsiSettings()
    """With psi: the engine."""
    fuzzy: FuzzySettings = FuzzySettings()
    """With fuzzy: the fields, and the quality of links."""
    alignment: RunName | None = None
    """With psi or fuzzy: the id of an earlier run of the same parties and tables, whose common rows
    are used instead of a new alignment.
    """
    partial: bool = False
    """With psi: whether to use all rows that the active party and at least one passive party hold.
    Each row is trained and scored with the parties that hold it. Default: only rows that all
    parties hold.
    """
    split: Literal["random", "stratified", "grouped", "column"] = "random"
    """How rows are divided. ``random``: every party derives the split from the seed.
    ``stratified``: the active party draws the split, with the same share of each class in every
    split. ``grouped``: the active party draws it so that rows with the same ``data.group`` are in
    one split; the shares are shares of groups. ``column``: a column of the active party's data
    contains it.
    """
    validation: Fraction = 0.1
    """The share of all rows for validation."""
    test: Fraction = 0.2
    """The share of all rows for testing; not used with ``folds``."""
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    """For cross-validation: the number of folds into which the rows are divided, in the same way in
    all runs with one seed. The sizes of folds differ by at most one row.
    """
    fold: Annotated[int, Field(ge=1)] | None = None
    """The fold for testing, from 1 to ``folds``. Validation rows are drawn from the other folds."""
    aligned: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """For experiments: the share of the training rows that is treated as held by all parties. The
    other rows are treated as each party's own.
    """
    labelled: PositiveInt | None = None
    """For experiments: the number of aligned training rows whose labels are used. Default: all."""
    id_rules: tuple[IdRule, ...] = ()
    """The rules that normalise every party's ids, in order, before ids are compared."""
    keys: tuple[tuple[str, ...], ...] = ()
    """With psi: several keys of one or more columns, the most reliable one first. Rows are matched
    by the first key, the rows that are left by the second key, and so on. Default: ``data.id``.
    """
    key_rules: dict[str, tuple[IdRule, ...]] = Field(default_factory=dict)
    """With ``keys`` or ``fuzzy``: the rules that normalise a column, in place of ``id_rules``."""

    def model_post_init(self, _context: Any) -> None:
        if (self.folds is None) != (self.fold is None):
            raise ValueError(
                "folds and fold must be set together. Add the missing key, or remove both."
            )
        self._check_keys()
        if self.labelled is not None and self.split == "grouped":
            raise ValueError('labelled cannot be used with split = "grouped". Remove one.')
        if self.folds is None or self.fold is None:
            return
        if self.fold > self.folds:
            raise ValueError(
                f"fold must be at most folds = {self.folds} (got {self.fold}). Correct it."
            )
        if self.split == "column":
            raise ValueError('folds cannot be used with split = "column". Remove one.')
        if self.test != type(self).model_fields["test"].default:
            raise ValueError(
                "test cannot be used with folds, because one fold is for testing. Remove test."
            )

    def _check_keys(self) -> None:
        """Raises ValueError if ``keys`` are unusable."""
        columns = {name for key in self.matching_columns for name in key}
        if len(self.keys) > MAX_KEYS:
            raise ValueError(f"keys: must be at most {MAX_KEYS} (got {len(self.keys)}). Use fewer.")
        for key in self.keys:
            if not key or len(set(key)) < len(key) or self.keys.count(key) > 1:
                raise ValueError(
                    "keys: each key needs one or more columns, and no column or key twice (got "
                    f"{list(key)}). Correct it."
                )
        if len(set(self.key_names)) < len(self.key_names):
            raise ValueError(
                f"keys: two keys have the name {'+'.join(self.keys[-1])}. Rename a column."
            )
        for name in self.key_rules:
            if name not in columns:
                raise ValueError(f"key_rules: {name} is not in keys or fuzzy.fields. Remove it.")
        if bool(self.fuzzy.fields) != (self.align == "fuzzy"):
            raise ValueError('fuzzy.fields and align = "fuzzy" need each other. Set both or none.')
        if self.keys and (self.align != "psi" or self.partial):
            raise ValueError('keys need align = "psi" without partial. Set it, or remove keys.')

    @property
    def matching_columns(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each key, or of each field of a fuzzy linkage."""
        return self.keys or tuple((name,) for name in self.fuzzy.fields)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the keys or fields, for reports; empty without keys."""
        return tuple("+".join(key) for key in self.matching_columns)

    @property
    def share_for_tests(self) -> float:
        """The share of all rows for testing, before rounding to whole rows."""
        return self.test if self.folds is None else 1 / self.folds


class TransformSettings(Section):
    """A transform of tensors that a phase sends, in addition to its method's transforms."""

    kind: KindName
    """The transform's name."""
    exchange: str
    """The name of the exchange, as ``vfl-party check`` prints it. ``prediction`` means the
    embeddings of joint predictions and of a served model, in any phase.
    """
    sent_by: Literal["passive", "active"] = "passive"
    """The role that applies the transform: passive parties to what they send, or the active party
    to its answers.
    """
    settings: dict[str, Any] = Field(default_factory=dict)
    """The transform's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        return gather_settings(value, ("kind", "exchange", "sent_by"))


class PhaseSettings(Section):
    """One phase. The method validates ``settings``. Transforms are applied before the codec."""

    kind: KindName
    """The method: a folder of ``vfl_party/methods``, or a plug-in that all parties have."""
    name: Annotated[
        str,
        match_pattern(
            r"[a-z][a-z0-9_-]*", "lower-case letters, digits, '_' and '-', a letter first"
        ),
    ]
    """The phase's name; needed if two phases have the same kind. Default: its kind."""
    codec: KindName = "identity"
    """The codec that encodes the phase's float32 tensors between parties."""
    transforms: tuple[TransformSettings, ...] = ()
    """The transforms of tensors before they are sent, in addition to the method's own noise."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        """Moves the method's own settings into the table ``settings``, and adds the default
        name.
        """
        if isinstance(value, dict) and "kind" in value:
            value = {"name": value["kind"], **value}
        return gather_settings(value, ("kind", "name", "codec", "transforms"))


class WireSettings(Section):
    """The codec of messages, for one phase, exchange and direction, or for all of them.

    If several tables match, the one that names the phase applies; if several remain, the one that
    names the exchange; then the one that names the direction.
    """

    codec: KindName
    """The codec's name."""
    phase: str | None = None
    """The phase. Default: every phase."""
    exchange: str | None = None
    """The exchange. Default: every exchange between parties. Exchanges that the server averages
    must be named.
    """
    direction: Literal["up", "down"] | None = None
    """``up``: messages to the computing side (embeddings, or weights to the server); ``down``: its
    answers. Default: both.
    """
    settings: dict[str, Any] = Field(default_factory=dict)
    """The codec's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        own = ("codec", "phase", "exchange", "direction")
        if not isinstance(value, dict) or "settings" in value:
            return value
        rest = {key: item for key, item in value.items() if key not in own}
        for key in rest:
            near = difflib.get_close_matches(str(key), own, n=1, cutoff=0.75)
            if near:
                raise ValueError(f"unknown key {key!r}; did you mean {near[0]!r}?")
        return {key: item for key, item in value.items() if key in own} | {"settings": rest}

    @property
    def named(self) -> tuple[str | None, str | None, str | None]:
        """The phase, the exchange and the direction that the table names."""
        return self.phase, self.exchange, self.direction


class StartSettings(Section):
    """The finished run whose encoders are the initial encoders of this run."""

    run: RunName
    """The id of a finished run. Every party starts with its encoder of that run, from its own
    folder of runs.
    """
    held_by: Literal["every party", "active"] = "every party"
    """The parties that have that run. ``active``: only the active party, which sends its trained
    encoder to the other parties (mocosfl).
    """
    phases: tuple[PhaseSettings, ...] = ()
    """The phases of that run's recipe. Needed if they decide the encoder's structure."""
    tower: Literal["cross", "local"] | None = None
    """Which of FedHSSL's two encoders to use. Default: the one that FedHSSL passes to the next
    phase.
    """


class RunSettings(Section):
    """Deadlines and intervals of a run."""

    rejoin_deadline_s: Seconds = 900.0
    """Seconds for which the other parties wait for a lost party. ``vfl simulate`` and ``vfl study``
    use 60.
    """
    join_deadline_s: Seconds = 300.0
    """Seconds for which a new server waits until all parties have joined."""
    step_timeout_s: Seconds = 600.0
    """The maximum number of seconds that a connected party may take for one step. If the server
    averages weights, the time starts when the first party's weights arrive.
    """
    heartbeat_s: Seconds = 2.0
    """Seconds between two heartbeats."""
    lost_after_s: Seconds = 15.0
    """Seconds of silence after which a party counts as lost; at least twice ``heartbeat_s``."""
    server_absent_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Seconds for which training continues without the server. It has no effect if the server
    averages weights.
    """
    resume_within_s: Annotated[float, Field(ge=0.0, le=1e8)] = 86_400.0
    """If rows or columns have changed since a run was interrupted, the same commands are refused
    until this number of seconds has passed since the run's last training. After that they begin a
    new run.
    """
    checkpoint_every: PositiveInt = 1
    """The number of rounds between two checkpoints. A phase always ends with a checkpoint."""
    kept_checkpoints: Annotated[int, Field(ge=2)] = 2
    """The number of checkpoints that are kept in addition to the newest."""

    def model_post_init(self, _context: Any) -> None:
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                "lost_after_s must be at least twice heartbeat_s, or connected parties count as "
                "lost. Raise it."
            )
        if self.server_absent_s and self.step_timeout_s <= self.lost_after_s:
            raise ValueError(
                "with server_absent_s, step_timeout_s must be greater than lost_after_s, so that a "
                "lost party is reported first. Raise it."
            )


class PredictSettings(Section):
    """Limits for predictions with a run of this recipe."""

    refuse_outside: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """The maximum share of a column's rows that lie far outside the training values. With more, the
    column's party refuses the prediction. Default: no limit, only a warning.
    """


class ReportSettings(Section):
    """The results that passive parties receive."""

    tell_passives: tuple[KindName, ...] = ()
    """Metrics, such as ``["auc"]``, that the active party sends to every passive party at the end
    of a phase of kind ``evaluate``. Default: none.
    """


class SimulateSettings(Section):
    """The data of each party when all run on one machine. It is only for ``vfl simulate``, and not
    part of the digest.
    """

    data: DataSettings | None = None
    """One data set that is divided by ``scheme``. Only the active party reads the label."""
    scheme: Literal["columns", "quadrants", "halves", "rows"] = "columns"
    """How ``data`` is divided, in the order of the parties."""
    parties: dict[str, DataSettings] = Field(default_factory=dict)
    """Each party's own data."""
    devices: dict[str, str] = Field(default_factory=dict)
    """Each party's device. Default: ``cpu``."""
    policies: dict[str, KindName | PolicySettings] = Field(default_factory=dict)
    """Each party's policy, as in its party file: a name, or a table. Default: ``allow_all``."""
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """The number of threads of each party."""
