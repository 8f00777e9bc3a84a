"""The tables of a recipe: its parties, rows, phases, codecs, deadlines."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from vfl_common.config.base import KindName, Section, gather_settings, has_form
from vfl_common.config.data import DataSettings, IdRule
from vfl_common.config.models import EncoderSettings
from vfl_common.config.models import PositiveInt as Width
from vfl_common.config.policy import PolicySettings
from vfl_common.files import PLAIN_NAME

Name = Annotated[
    str,
    has_form(
        r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?",
        "1 to 64 letters, digits, '.', '_' or '-', with a letter or digit at both ends",
    ),
]
RunName = Annotated[
    str,
    has_form(PLAIN_NAME.pattern, "the name of a folder of runs: letters, digits, '.', '_' and '-'"),
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


# 0.8 is a share, 1000 a count.
CountOrShare = Annotated[int | float, AfterValidator(_count_or_share)]


class PartySettings(Section):
    """A place in the roster."""

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


class RowsSettings(Section):
    """How the parties find the rows that all of them hold, and how these are divided, alike at
    every party.

    If the active party divides the rows (``stratified``, ``grouped``, ``column``), it tells the
    others the split of each row. ``aligned`` and ``labelled`` are for experiments with few aligned,
    and fewer labelled, rows. The other training rows are treated as rows that a party cannot match
    with the others' rows, or as rows whose labels nobody knows.
    """

    align: Literal["digest", "psi", "none"] = "digest"
    """How the parties find their common rows. ``digest``: all hold the same ids, and verify it.
    ``psi``: they find the ids in common by private set intersection. ``none``: each passive party
    holds other rows of the same columns.
    """
    at_least: CountOrShare = 1
    """With psi: how many rows must be common, as a number, or as a share of each party's rows. If
    there are fewer, the run ends before any party learns which rows are common. With ``partial``,
    each party has so many rows that count.
    """
    alignment: RunName | None = None
    """With psi: the id of an earlier run of the same parties and tables. This run takes its common
    rows, and aligns nothing.
    """
    partial: bool = False
    """With psi: whether rows count that the active party and at least one passive party hold. Each
    row is trained and scored with the parties that hold it. Default: only rows that all hold.
    """
    split: Literal["random", "stratified", "grouped", "column"] = "random"
    """How rows are divided. ``random``: every party draws it from the seed. ``stratified``: the
    active party draws it, with each class's share in every split. ``grouped``: it draws it so that
    rows with one value of ``data.group`` are in one split; shares are of groups. ``column``: a
    column of the active party's data says it.
    """
    validation: Fraction = 0.1
    """The share of all rows for validation."""
    test: Fraction = 0.2
    """The share of all rows for testing. With ``folds``, one fold takes its place."""
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    """For cross-validation: into how many parts the rows are divided, alike in all runs of a seed.
    The parts are of one size, give or take a row.
    """
    fold: Annotated[int, Field(ge=1)] | None = None
    """Which part is for testing, from 1 to ``folds``. Validation rows are drawn from the others."""
    aligned: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """For experiments: the share of the training rows that counts as held by all parties. The
    others are each party's own.
    """
    labelled: PositiveInt | None = None
    """For experiments: how many of the aligned training rows have a label. Default: all."""
    id_rules: tuple[IdRule, ...] = ()
    """How every party spells its ids alike, in order, before they are compared."""

    def model_post_init(self, _context: Any) -> None:
        if (self.folds is None) != (self.fold is None):
            raise ValueError("give folds together with fold, or neither")
        if self.labelled is not None and self.split == "grouped":
            raise ValueError(
                'labelled counts rows, and split = "grouped" divides groups. Remove one.'
            )
        if self.folds is None or self.fold is None:
            return
        if self.fold > self.folds:
            raise ValueError(
                f"fold = {self.fold}, but folds = {self.folds}. Take 1 to {self.folds}."
            )
        if self.split == "column":
            raise ValueError('folds divide the rows, and so does split = "column". Remove one.')
        if self.test != type(self).model_fields["test"].default:
            raise ValueError("with folds, one fold is for testing. Remove test.")

    @property
    def share_for_tests(self) -> float:
        """The share of all rows for testing, without the rounding to whole rows."""
        return self.test if self.folds is None else 1 / self.folds


class TransformSettings(Section):
    """A transform of tensors that a phase sends, beside its method's transforms."""

    kind: KindName
    """The transform's name."""
    exchange: str
    """The name of the exchange, as ``vfl-party check`` prints it. ``prediction``: the embeddings of
    joint predictions and of a served model; in any phase.
    """
    sent_by: Literal["passive", "active"] = "passive"
    """Who applies it: passive parties to what they send, or the active party to its answers."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The transform's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        return gather_settings(value, ("kind", "exchange", "sent_by"))


class PhaseSettings(Section):
    """One phase. The method checks ``settings``. Transforms are applied before the codec."""

    kind: KindName
    """The method: a folder of ``vfl_party/methods``, or a plug-in that all parties have."""
    name: Annotated[
        str,
        has_form(r"[a-z][a-z0-9_-]*", "lower-case letters, digits, '_' and '-', a letter first"),
    ]
    """The phase's name, if two phases have the same kind. Default: its kind."""
    codec: KindName = "identity"
    """How the phase's float32 tensors are written between parties."""
    transforms: tuple[TransformSettings, ...] = ()
    """What is done to tensors before they leave, beside the method's own noise."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The method's own settings."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        """Turns ``{kind, name?, rest…}``, as people write it, into ``{kind, name, settings:
        {rest…}}``.
        """
        if isinstance(value, dict) and "kind" in value:
            value = {"name": value["kind"], **value}
        return gather_settings(value, ("kind", "name", "codec", "transforms"))


class WireSettings(Section):
    """The codec of what crosses, for one phase, exchange and direction, or for all.

    Of the tables that hold for a direction of an exchange, one that names the phase goes before one
    that does not, then one that names the exchange, then one that names the direction.
    """

    codec: KindName
    """The codec's name."""
    phase: str | None = None
    """The phase. Default: every phase."""
    exchange: str | None = None
    """The exchange. Default: every exchange between parties. What the server averages must be
    named.
    """
    direction: Literal["up", "down"] | None = None
    """``up``: what the asking side sends (embeddings, weights to the server); ``down``: the
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
    """The finished run whose encoders every party starts with."""

    run: RunName
    """The id of a finished run. Every party starts with its encoder of that run, from its own
    folder of runs.
    """
    held_by: Literal["every party", "active"] = "every party"
    """Who has that run. ``active``: only the active party, and it gives the others what it has
    trained (mocosfl).
    """
    phases: tuple[PhaseSettings, ...] = ()
    """The phases of that run's recipe. Needed if they decide the encoder's structure."""
    tower: Literal["cross", "local"] | None = None
    """Take only this one of FedHSSL's two encoders. Default: what FedHSSL hands to the phase after
    it.
    """


class RunSettings(Section):
    """Deadlines and intervals of a run."""

    rejoin_deadline_s: Seconds = 900.0
    """Seconds for which the others wait for a lost party. ``vfl simulate`` and ``vfl study`` take
    60.
    """
    join_deadline_s: Seconds = 300.0
    """Seconds for which a new server waits until all parties have joined."""
    step_timeout_s: Seconds = 600.0
    """Seconds that a living party may take for one step. If the server averages weights, the time
    starts when the first party arrives.
    """
    heartbeat_s: Seconds = 2.0
    """Seconds between two heartbeats."""
    lost_after_s: Seconds = 15.0
    """Seconds of silence after which a party counts as lost; at least twice ``heartbeat_s``."""
    server_absent_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Seconds for which training goes on without the server. No effect if the server averages
    weights.
    """
    resume_within_s: Annotated[float, Field(ge=0.0, le=1e8)] = 86_400.0
    """If rows or columns have changed since a run was interrupted, the run is refused for so many
    seconds after its last training. After that the same commands begin a new run.
    """
    checkpoint_every: PositiveInt = 1
    """Rounds between two checkpoints, beside those at the ends of phases."""
    kept_checkpoints: Annotated[int, Field(ge=2)] = 2
    """How many checkpoints are kept beside the newest."""

    def model_post_init(self, _context: Any) -> None:
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                "lost_after_s must be at least twice heartbeat_s, or living parties count as lost"
            )
        if self.server_absent_s and self.step_timeout_s <= self.lost_after_s:
            text = "with server_absent_s, step_timeout_s must be above lost_after_s"
            raise ValueError(f"{text}, after which a party that has died is reported")


class PredictSettings(Section):
    """What a prediction with a run of this recipe refuses."""

    refuse_outside: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """The share of a column's rows that may lie far outside the numbers of training. With more, the
    party that has the column does not predict. Default: any share, with a warning.
    """


class ReportSettings(Section):
    """What the passive parties learn of the result."""

    tell_passives: tuple[KindName, ...] = ()
    """Metrics that the active party tells every passive party at the end of a phase of kind
    ``evaluate``, for its own report, such as ``["auc"]``. Default: it tells them nothing.
    """


class SimulateSettings(Section):
    """The data of each party, if all run on one machine. For ``vfl simulate`` only; not part of the
    digest.
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
    """Threads of each party."""
