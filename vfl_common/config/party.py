"""The party file: an organisation's private settings, and the addresses of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from vfl_common.config.base import Section, has_form, parse
from vfl_common.config.data import DataSettings
from vfl_common.config.feature_stores import StoreSettings, absolute_store
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.models import CustomSettings, CustomTop, EncoderSettings
from vfl_common.config.policy import Pin, PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port


def _address(text: str) -> str:
    """HOST:PORT"""
    host_and_port(text)
    return text


AllowedCode = Annotated[str, has_form(r"[\w.]+(:\w+)?", "module or module:callable")]
# An address, host:port.
Address = Annotated[str, AfterValidator(_address)]
Init = Literal["secret", "recipe"]


class TlsSettings(Section):
    """PEM files: the federation's CA, this party's certificate and key; and the list of revoked
    certificates.
    """

    ca: str
    """The PEM file of the federation's CA."""
    certificate: str
    """The PEM file of this party's certificate; intermediate certificates follow it in the file."""
    key: str
    """The PEM file of this party's key, with mode 0600."""
    passphrase_file: str | None = None
    """The file with the passphrase of an encrypted key, with mode 0600. Default: the variable
    ``VFL_TLS_PASSPHRASE``.
    """
    revoked: str | None = None
    """The list of revoked certificates, plain or signed. Default: ``revoked.txt`` and
    ``revoked.crl`` beside the CA, if they exist.
    """


class PredictionLimits(Section):
    """What this party asks of a joint prediction."""

    at_least: PositiveInt = 1
    """How many rows must be common so that this party answers in a joint prediction."""
    deadline_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """How long a prediction waits, in all, for the server and the other parties. The active party
    then writes what it has without them. Default: as long as the server waits, and then nothing is
    written.
    """
    alone: str | None = None
    """Active party: the folder of its run of ``--baseline alone``, whose model gives the scores
    that are written without the others. Default: none, and the rows have no score.
    """


class TreeLimits(Section):
    """What a party asks of recipes with secureboost: a recipe that gives less is refused before the
    party joins.
    """

    least_rows: PositiveInt = 1
    """Passive party: the least rows on each side of a split. A recipe that allows fewer is refused.
    """
    most_bits: PositiveInt | None = None
    """Passive party: the most bits that the sides of splits may tell of one row in a run. A recipe
    that asks for more is refused. Default: no limit.
    """
    least_key_bits: Literal[1024, 2048, 3072, 4096] = 2048
    """The shortest key that may encrypt gradients, in bits; 1024 is for trials."""


class ServeSettings(Section):
    """How this party serves a trained model: ``vfl-party serve``."""

    listen: Address | None = None
    """Active party: where it waits for passive parties while it serves. A party that trains at the
    same time needs another port here. Default: the party file's ``listen``.
    """
    active: Address | None = None
    """Passive party: the address at which the active party serves. Default: the party file's
    ``active``.
    """
    http: Address = "127.0.0.1:8080"
    """Active party: where it answers HTTP; port 0 takes a free port."""
    grpc: Address | None = None
    """Active party: where it answers the Open Inference Protocol over gRPC, with the tokens and the
    certificate of HTTP; port 0 takes a free port. Default: nowhere.
    """
    tokens: str | None = None
    """Active party: the file of the callers' tokens, which ``vfl-party token`` writes. Default: no
    token is asked for, and ``http`` must be an address of this machine alone.
    """
    certificate: str | None = None
    """Active party: the PEM file of the certificate for HTTPS, with intermediate ones. Default:
    plain HTTP.
    """
    key: str | None = None
    """Active party: the PEM file of that certificate's key, with mode 0600."""
    access_log: bool = True
    """Active party: write a line for each request into ``serve-access-NAME.jsonl`` in ``out``:
    when, by whose token, which model, how many rows, with which status, and how long it took. It
    never has ids.
    """
    party_timeout_ms: Annotated[int, Field(gt=0, le=600_000)] = 500
    """Active party: how long a request waits for the passive parties. It is answered without those
    that are later.
    """
    max_batch: Annotated[int, Field(gt=0, le=1024)] = 256
    """Active party: the most rows that are scored at once; requests that wait are put together."""
    max_wait_ms: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    """Active party: how long a request waits for others to be scored with."""
    most_rows: Annotated[int, Field(gt=0, le=100_000)] = 10_000
    """Active party: the most rows of a request."""
    refresh_s: Annotated[float, Field(ge=0.0, le=86_400.0)] | None = None
    """How often this party looks whether its table has changed, and reads it again if it has. 0:
    never. Default: 5 for files and folders. A database is read whole each time, and by default
    never again.
    """
    store: StoreSettings | None = None
    """What is asked for the features of ids. Default: the table of ``[data]``, in memory."""
    answers_a_day: PositiveInt | None = None
    """Passive party: how often a day it answers for one id, for all models together. Default: no
    limit.
    """
    asked_a_day: PositiveInt | None = None
    """Passive party: how many ids a day (UTC) it may be asked for, known or not, for all models
    together. Further ones are not answered. Default: twice the rows of this party's table, at least
    10,000; with ``store``, of the table of training.
    """
    ids: Literal["aligned", "all"] | None = None
    """Passive party: the ids for which it answers. ``aligned``: those that private set intersection
    has found for the run and for joint predictions with it, which both parties know already; they
    are read when the run is loaded. ``all``: all of its table. Default: ``aligned`` for a run with
    ``rows.align = "psi"``, else ``all``.
    """
    cache_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 0.0
    """Passive party: for how long the active party may keep its embeddings, and use them again
    without asking. It forgets them when this party's table changes. 0: not at all.
    """
    cache_mib: Annotated[int, Field(ge=0, le=65_536)] = 64
    """Active party: how much memory the kept embeddings of one run may take; 0 for none."""
    keep: Annotated[int, Field(ge=1, le=10)] = 1
    """With ``--run production``: how many earlier runs of each model stay ready, so that a rollback
    takes no time.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed_keys(cls, value: Any) -> Any:
        for key in ("shadow", "weights"):
            if isinstance(value, dict) and key in value:
                raise ValueError(
                    f"the key {key!r} was removed. Remove it, and put a reverse proxy (for example "
                    "Envoy) before two serving parties: docs/how-to/production/serve-models.md."
                )
        return value

    def model_post_init(self, _context: Any) -> None:
        if self.answers_a_day is not None and self.cache_s:
            raise ValueError(
                "an embedding that the active party keeps is not counted as an answer. Set "
                "cache_s = 0, or remove answers_a_day."
            )


class RecordSettings(Section):
    """How this party writes down what leaves it."""

    digest: Literal["sample", "whole"] = "sample"
    """What the digest of a large tensor is of: 1 KiB of it, or all its bytes. The digest of all
    bytes takes a tenth of a step or more.
    """
    folder: str | None = None
    """Where the folder of the record, ``.record-NAME``, is. Default: ``out``."""


class PartyFile(Section):
    """The party file. Relative paths start at the file's own folder."""

    name: Name
    """This party's name, as in the recipe and in its certificate."""
    recipe: str
    """The path of the recipe, the same at all parties."""
    server: Address
    """The address of the aggregation server."""
    active: Address | None = (
        # Passive: the active party's address, if the one that the server relays is not reachable.
        None
    )
    """Passive party: the active party's address. Default: the address that the server passes on."""
    listen: Address = "127.0.0.1:0"
    """Active party: where it waits for passive parties; port 0 takes a free port."""
    advertise: Address | None = None
    """Active party: the address that the server passes on to the others. Needed if ``listen`` means
    all addresses. Default: ``listen`` with its real port.
    """
    device: Annotated[str, has_form(r"cpu|cuda(:\d+)?", "'cpu', 'cuda' or 'cuda:N'")] = "cpu"
    """Where this party computes."""
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """Threads of torch; with psi, processes that mask ids; with trees, processes that encrypt and
    add up, unless HEU does.
    """
    out: str = "runs"
    """The folder of this party's runs."""
    tls: TlsSettings
    """The files of mutual TLS."""
    pins: dict[str, Pin] = Field(default_factory=dict)
    """The only key that the server or a party may have. A member without a pin may have any key of
    the CA.
    """
    data: DataSettings | None = None
    """This party's table."""
    policy: str | PolicySettings = "allow_all"
    """The policy that decides what may leave this party: ``allow_all``, ``encrypted``, a plug-in's,
    or a table.
    """
    alignments_a_day: PositiveInt = 24
    """How often a day a table may be aligned by psi. Somebody who may ask often can guess ids."""
    peer_rows_at_most: PositiveInt | None = None
    """The most rows of another party: with psi, for which this party masks ids; without alignment,
    that the other party may announce. Default: with psi, ten times the rows of this party's table,
    from 100,000 to 10,000,000; without alignment, and for the rows that the active party has
    predicted, 10,000,000.
    """
    predict: PredictionLimits = PredictionLimits()
    """What this party asks of a joint prediction."""
    serve: ServeSettings = ServeSettings()
    """How this party serves a trained model."""
    record: RecordSettings = RecordSettings()
    """How this party writes down what leaves it."""
    trees: TreeLimits = TreeLimits()
    """What this party asks of recipes with ``secureboost``."""
    init: Init = "secret"
    """What this party's initial weights, dropout, orders and views follow from: a secret of its
    own, or the recipe's seed, so that all parties can compute them.
    """
    allow_code: tuple[AllowedCode, ...] = ()
    """Modules, or callables, that the recipe may have this party import and call."""
    encoder: EncoderSettings | None = None
    """This party's encoder, in place of the recipe's. It must give the recipe's ``embedding_size``;
    the others do not see it.
    """


def _with_level(party: PartyFile, path: Path) -> PartyFile:
    """Adds what the policy's level sets in other tables, where the file says nothing. Raises
    InputError if that does not fit what it says.
    """
    if not isinstance(party.policy, PolicySettings):
        return party
    tables: dict[str, Section] = {}
    for name, defaults in party.policy.elsewhere.items():
        table: Section = getattr(party, name)
        settings = table.model_dump(exclude_unset=True)
        where = f'{path}: policy.level = "{party.policy.level}": {name}'
        tables[name] = parse(type(table), {**defaults, **settings}, where)
    return party.model_copy(update=tables)


def load_party(path: Path) -> PartyFile:
    """Reads a party file and makes its paths absolute. Raises InputError."""
    party = _with_level(parse(PartyFile, read_tables(path, "party file"), str(path)), path)
    base = path.resolve().parent

    def absolute(text: str) -> str:
        return str(base / text)

    data = party.data.absolute(base) if party.data is not None else None
    tls = TlsSettings(
        **{name: absolute(value) for name, value in party.tls.model_dump(exclude_none=True).items()}
    )
    files = {
        key: absolute(path)
        for key in ("tokens", "certificate", "key")
        if (path := getattr(party.serve, key)) is not None
    }
    store = absolute_store(party.serve.store, base) if party.serve.store is not None else None
    return party.model_copy(
        update={
            "serve": party.serve.model_copy(update={**files, "store": store}),
            "recipe": absolute(party.recipe),
            "out": absolute(party.out),
            "record": party.record.model_copy(
                update={"folder": absolute(party.record.folder) if party.record.folder else None}
            ),
            "tls": tls,
            "data": data,
            "predict": party.predict.model_copy(
                update={"alone": absolute(party.predict.alone) if party.predict.alone else None}
            ),
        }
    )


def code_named(recipe: Recipe, name: str, *, own_encoder: bool = False) -> list[str]:
    """Returns each ``module:callable`` that a recipe has a party import: for its encoder, and for
    the active party's top model.

    ``own_encoder``: the party file names the encoder, so the recipe's is not imported.
    """
    factories, place = list[str](), recipe.party(name)
    if place is not None and place.features and not own_encoder:
        encoder = place.encoder or recipe.model.encoder
        factories += [encoder.factory] if isinstance(encoder, CustomSettings) else []
    if name == recipe.active.name and isinstance(recipe.model.top, CustomTop):
        factories.append(recipe.model.top.factory)
    return factories


def check_code(path: Path, file: PartyFile, recipe: Recipe) -> None:
    """Raises InputError if the recipe would have this party run code that its own file does not
    allow.
    """
    for named in code_named(recipe, file.name, own_encoder=file.encoder is not None):
        module = named.partition(":")[0]
        if {named, module} & set(file.allow_code):
            continue
        is_top = isinstance(recipe.model.top, CustomTop) and named == recipe.model.top.factory
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: the recipe has this party run {named}, which the party file does not allow. "
            f'Read that code, and set allow_code = ["{module}"], or '
            f"{'agree on another model.top' if is_top else 'set an encoder in this file'}.",
        )
