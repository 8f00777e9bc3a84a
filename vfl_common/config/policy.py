"""``[policy]`` of the party file: what may leave this party, in words that others may read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vfl_common.config.account import AccountLimits
from vfl_common.config.base import Section, has_form

Level = Literal["open", "careful", "strict"]
KindOfBundle = Literal["embedding", "gradient", "weights", "rows", "verdict"]
Pin = Annotated[
    str,
    has_form(
        r"sha256:[0-9a-f]{64}", "a pin as `vfl certs show` prints it, 'sha256:' and 64 digits"
    ),
]
# The author of two recipes finds a pair with the same first 16 digits in minutes.
Digest = Annotated[
    str,
    has_form(
        r"[0-9a-f]{64}",
        "all 64 digits of a digest as `vfl-party check` prints it: two recipes can share the first "
        "16",
    ),
]

# What each level sets; the keys that it lacks have their own defaults.
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
# What each level sets in other tables of the party file, where the file says nothing.
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
    """A transform that must be applied to what leaves, and its least strength."""

    kind: KindOfBundle
    """What it is demanded for."""
    transform: str
    """The transform's name."""
    at_least: dict[str, float] = Field(default_factory=dict)
    """{setting of the transform: its least value}, such as ``sigma``."""
    at_most: dict[str, float] = Field(default_factory=dict)
    """{setting of the transform: its greatest value}, such as ``epsilon``, ``clip`` or
    ``max_norm``.
    """


class PolicySettings(Section):
    """What may leave this party."""

    level: Level = "careful"
    """The defaults of the other keys, as the table of levels says."""
    plugin: str | None = None
    """A policy by name that must agree, too: ``encrypted``, or a plug-in's. Default: none."""
    phases: tuple[str, ...] | None = None
    """The kinds of phases that may run, such as ``splitnn``. Default: all."""
    kinds: tuple[KindOfBundle, ...] | None = None
    """What this party may send. Default: all."""
    encrypted: tuple[KindOfBundle, ...] = ()
    """What this party may send as ciphertexts alone."""
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
    digest of all files of the plug-in's package, as a refusal prints it; without a digest, whatever
    is in them. What the plug-in imports from other packages is not in the digest. Default: any.
    """
    demands: tuple[Demand, ...] = ()
    """The transforms that are demanded."""
    least_rows: PositiveInt = 1
    """The least rows in a batch of which something leaves row by row; of a served model, the least
    people of a question that is answered.
    """
    most_epochs: PositiveInt | None = None
    """The most epochs of a phase; of trees, the most of them. Default: no limit."""
    most_numbers: PositiveInt | None = None
    """The most numbers about one person that one peer may get in a run. Default: no limit."""
    most_bytes: PositiveInt | None = None
    """The most bytes that this party may send in a run, with those that find the rows in common.
    Default: no limit.
    """
    most_bits: Annotated[int, Field(gt=0, le=64)] | None = None
    """The most bits of a number in embeddings and gradients, as they cross the wire. Default: no
    limit.
    """
    approval: Literal["none", "each"] = "none"
    """Whether each recipe needs a grant before it is run."""
    account: AccountLimits = AccountLimits()
    """What may be spent over all runs."""

    @model_validator(mode="before")
    @classmethod
    def _with_level(cls, value: Any) -> Any:
        """Adds what the level sets and the file does not."""
        if not isinstance(value, dict):
            return value
        return {**LEVELS.get(str(value.get("level", "careful")), {}), **value}

    @property
    def elsewhere(self) -> dict[str, dict[str, Any]]:
        """{table of the party file: {key: what the level sets there}}."""
        return ELSEWHERE[self.level]
