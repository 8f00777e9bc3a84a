"""``[policy]`` of the party file: what this party may send, and ``[policy.account]``: what it may
release about the same people over all runs. Its peers may read the refusals.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vfl_common.config.base import Section, match_pattern

Limit = Annotated[int, Field(ge=0, le=2**62)]


class AccountLimits(Section):
    """The limits of what one peer may receive from one data set, over all runs. Tables that have
    people in common count as one data set, whatever their files are called. A run that would exceed
    a limit is refused before it starts. A message that would exceed a limit is not sent.
    """

    epsilon: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """The maximum ε of differential privacy for one person. It adds up training with ``dp``, the
    transform ``clipped_gaussian`` (both composed by Rényi divergences) and ``task.label_epsilon``.
    Default: no limit.
    """
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """The δ for which ε is computed. Keep it far below 1 / (number of people)."""
    numbers_of_a_person: Limit | None = None
    """The maximum number of values about one person that are sent. Default: no limit."""
    bytes_of_a_person: Limit | None = None
    """The maximum number of bytes about one person that are sent. Default: no limit."""
    bytes: Limit | None = None
    """The maximum number of bytes that are sent in all. Default: no limit."""
    split_bits: Limit | None = None
    """The maximum number of bits about one person that the splits of trees reveal: one bit for each
    split whose side the peer learns. Default: no limit.
    """
    alignments: Limit | None = None
    """The maximum number of alignments by psi, or of fuzzy linkages. Default: no limit."""
    predictions: Limit | None = None
    """The maximum number of rows in joint predictions. Default: no limit."""
    predictions_of_a_person: Limit | None = None
    """The maximum number of joint predictions about one person. Default: no limit."""
    asked: Limit | None = None
    """The maximum number of ids that the active party may request from this party's served models,
    answered or not. Default: no limit.
    """

    together: bool = False
    """Whether all peers together must stay within the limits, as if one peer received everything.
    Set it if peers may collude. A message to several peers counts once for each peer.
    """

    @property
    def amounts(self) -> dict[str, float]:
        """{key: limit} for each limit that is set."""
        limits = self.model_dump(exclude={"delta", "together"}, exclude_none=True)
        return {name: limits[name] for name in limits}


Level = Literal["open", "careful", "strict"]
KindOfBundle = Literal["embedding", "gradient", "weights", "rows", "verdict"]
Pin = Annotated[
    str,
    match_pattern(
        r"sha256:[0-9a-f]{64}", "a pin as `vfl certs show` prints it, 'sha256:' and 64 digits"
    ),
]
# The whole digest is required: an attacker can make two recipes whose digests share the first 16
# digits within minutes.
Digest = Annotated[
    str,
    match_pattern(
        r"[0-9a-f]{64}",
        "all 64 digits of a digest as `vfl-party check` prints it: two recipes can share the first "
        "16",
    ),
]

# {level: {key of the policy: value}}. A key that is absent here has its own default.
LEVELS: dict[str, dict[str, Any]] = {
    "open": {},
    "careful": {
        "plugins": [],
        "most_epochs": 1_000,
        "most_numbers": 1_000_000,
        "most_bytes": 1_000_000_000_000,
    },
    "strict": {
        "plugins": [],
        "recipes": [],
        "pinned": True,
        "encrypted": ["gradient"],
        "least_rows": 8,
        "most_epochs": 100,
        "most_numbers": 10_000,
        "most_bytes": 10_000_000_000,
    },
}
# {level: {other table of the party file: {key: value}}}, unless the file sets the key itself.
ELSEWHERE: dict[str, dict[str, dict[str, Any]]] = {
    "open": {},
    "careful": {},
    "strict": {
        "trees": {"least_rows": 8, "most_bits": 1_000},
        "predict": {"at_least": 8},
        "serve": {"answers_a_day": 100},
    },
}


class Demand(Section):
    """A transform that must be applied to the bundles that this party sends, and its minimum
    strength.
    """

    kind: KindOfBundle
    """The kind of bundle to which the transform must be applied."""
    transform: str
    """The transform's name."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """{setting of the transform: its minimum}, such as ``sigma``."""
    at_most: dict[str, float] = Field(default_factory=dict)
    """{setting of the transform: its maximum}, such as ``epsilon``, ``clip`` or ``max_norm``."""


class PolicySettings(Section):
    """What may leave this party."""

    level: Level = "careful"
    """The level, which sets the defaults of the other keys: see the table of levels."""
    plugin: str | None = None
    """The name of a policy that must also allow a message: ``encrypted``, or a plug-in's policy.
    Default: none.
    """
    phases: tuple[str, ...] | None = None
    """The kinds of phases that may run, such as ``splitnn``. Default: all."""
    kinds: tuple[KindOfBundle, ...] | None = None
    """The kinds of bundles that this party may send. Default: all."""
    encrypted: tuple[KindOfBundle, ...] = ()
    """The kinds of bundles that this party may send only as ciphertexts."""
    peers: tuple[Pin, ...] | None = None
    """The only keys that the server and the other parties may have. Each of them then needs a pin
    in ``pins``. Default: any.
    """
    pinned: bool = False
    """Whether the server and each other party need a pin in ``pins``."""
    recipes: tuple[Digest, ...] | None = None
    """The digests of the recipes that may be run, all 64 digits. Default: any."""
    plugins: tuple[str, ...] | None = None
    """The plug-ins that a recipe may have this party use: ``vfl.codecs:mine = sha256:…`` with the
    digest of all files of the plug-in's package, as a refusal prints it. Without a digest, any
    version is allowed. The digest does not cover other packages that the plug-in imports. Default:
    any.
    """
    demands: tuple[Demand, ...] = ()
    """The transforms that must be applied."""
    least_rows: PositiveInt = 1
    """The minimum number of rows in a batch whose rows are sent one by one; for a served model, the
    minimum number of people in a request that is answered.
    """
    most_epochs: PositiveInt | None = None
    """The maximum number of epochs of a phase, or of trees. Default: no limit."""
    most_numbers: PositiveInt | None = None
    """The maximum number of values about one person that one peer may receive in a run. Default: no
    limit.
    """
    most_bytes: PositiveInt | None = None
    """The maximum number of bytes that this party may send in a run, including alignment. Default:
    no limit.
    """
    most_bits: Annotated[int, Field(gt=0, le=64)] | None = None
    """The maximum number of bits per value of embeddings and gradients on the wire. Default: no
    limit.
    """
    approval: Literal["none", "each"] = "none"
    """Whether each recipe needs a grant before it is run."""
    account: AccountLimits = AccountLimits()
    """The limits over all runs."""

    @model_validator(mode="before")
    @classmethod
    def _with_level(cls, value: Any) -> Any:
        """Adds the settings of the level for keys that the file does not set."""
        if not isinstance(value, dict):
            return value
        return {**LEVELS.get(str(value.get("level", "careful")), {}), **value}

    @property
    def elsewhere(self) -> dict[str, dict[str, Any]]:
        """{other table of the party file: {key: value that the level sets}}."""
        return ELSEWHERE[self.level]
