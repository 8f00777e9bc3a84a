"""The party file: an organisation's private settings and its peers' addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from vfl_common.config.base import Section, match_pattern, parse, read_tables
from vfl_common.config.data import DataSettings
from vfl_common.config.models import CustomSettings, CustomTop, EncoderSettings
from vfl_common.config.policy import Pin, PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import Name
from vfl_common.config.sources import StoreSettings, absolute_store
from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port


def _address(text: str) -> str:
    """HOST:PORT"""
    host_and_port(text)
    return text


AllowedCode = Annotated[str, match_pattern(r"[\w.]+(:\w+)?", "module or module:callable")]
# The address of a process, host:port.
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
    ``revoked.crl`` in the folder of the CA, if they exist.
    """


class PredictionLimits(Section):
    """This party's limits for joint predictions."""

    at_least: PositiveInt = 1
    """The minimum number of common rows with which this party takes part in a joint prediction."""
    deadline_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """The number of seconds that a prediction waits, in all, for the server and the other parties.
    After that the active party writes the predictions that it can make without them. Default: as
    long as the server waits; after that nothing is written.
    """
    alone: str | None = None
    """Active party: the folder of its run of ``--baseline alone``, whose model gives the scores if
    the other parties do not answer. Default: none; the rows then have no score.
    """


class TreeLimits(Section):
    """This party's limits for recipes with secureboost. A recipe that exceeds a limit is refused
    before the party joins.
    """

    least_rows: PositiveInt = 1
    """Passive party: the minimum number of rows on each side of a split. A recipe that allows fewer
    is refused.
    """
    most_bits: PositiveInt | None = None
    """Passive party: the maximum number of bits about one row that splits may reveal in a run. A
    recipe that could reveal more is refused. Default: no limit.
    """
    least_key_bits: Literal[1024, 2048, 3072, 4096] = 2048
    """The shortest key that may encrypt gradients, in bits; use 1024 only for tests."""


class ServeSettings(Section):
    """How this party serves a trained model: ``vfl-party serve``."""

    listen: Address | None = None
    """Active party: the address on which it waits for passive parties while it serves. A party that
    trains at the same time needs another port here. Default: the party file's ``listen``.
    """
    active: Address | None = None
    """Passive party: the address at which the active party serves. Default: the party file's
    ``active``.
    """
    http: Address = "127.0.0.1:8080"
    """Active party: the address for HTTP requests; port 0 takes a free port."""
    grpc: Address | None = None
    """Active party: the address for the Open Inference Protocol over gRPC, with the same tokens and
    certificate as HTTP; port 0 takes a free port. Default: gRPC is off.
    """
    tokens: str | None = None
    """Active party: the file of the callers' tokens, which ``vfl-party token`` writes. Default: no
    token is required, and ``http`` must be a loopback address.
    """
    certificate: str | None = None
    """Active party: the PEM file of the certificate for HTTPS, with intermediate certificates.
    Default: plain HTTP.
    """
    key: str | None = None
    """Active party: the PEM file of that certificate's key, with mode 0600."""
    access_log: bool = True
    """Active party: whether to write a line for each request into ``serve-access-NAME.jsonl`` in
    ``out``: the time, the token's name, the model, the number of rows, the status and the duration.
    The file never has ids.
    """
    party_timeout_ms: Annotated[int, Field(gt=0, le=600_000)] = 500
    """Active party: the number of milliseconds that a request waits for the passive parties. It is
    answered without the parties that are late.
    """
    max_batch: Annotated[int, Field(gt=0, le=1024)] = 256
    """Active party: the maximum number of rows that are scored at once; waiting requests are joined
    into one batch.
    """
    max_wait_ms: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    """Active party: the maximum number of milliseconds that a request waits for other requests to
    form a batch.
    """
    most_rows: Annotated[int, Field(gt=0, le=100_000)] = 10_000
    """Active party: the maximum number of rows in a request."""
    refresh_s: Annotated[float, Field(ge=0.0, le=86_400.0)] | None = None
    """The number of seconds between two checks whether this party's table has changed; a changed
    table is read again. 0: never. Default: 5 for files and folders; never for databases, which are
    read completely each time.
    """
    store: StoreSettings | None = None
    """The feature store from which the features of ids are read. Default: the table of ``[data]``,
    in memory.
    """
    answers_a_day: PositiveInt | None = None
    """Passive party: the maximum number of answers for one id per day, for all models together.
    Default: no limit.
    """
    asked_a_day: PositiveInt | None = None
    """Passive party: the maximum number of ids per day (UTC) that may be requested, known or not,
    for all models together. Requests beyond it are not answered. Default: twice the number of rows
    of this party's table (with ``store``: of the training table), at least 10,000.
    """
    ids: Literal["aligned", "all"] | None = None
    """Passive party: the ids for which it answers. ``aligned``: the ids that private set
    intersection found for the run and its joint predictions, which both parties know already; they
    are read when the run is loaded. ``all``: all ids of its table. Default: ``aligned`` for a run
    with ``rows.align = "psi"``, else ``all``.
    """
    cache_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 0.0
    """Passive party: the number of seconds for which the active party may cache its embeddings.
    They are discarded when this party's table changes. 0: no caching.
    """
    cache_mib: Annotated[int, Field(ge=0, le=65_536)] = 64
    """Active party: the maximum memory for the cached embeddings of one run, in MiB; 0 for no
    cache.
    """
    keep: Annotated[int, Field(ge=1, le=10)] = 1
    """With ``--run production``: the number of earlier runs of each model that stay loaded, so that
    a rollback takes no time.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed_keys(cls, value: Any) -> Any:
        for key in ("shadow", "weights"):
            if isinstance(value, dict) and key in value:
                raise ValueError(
                    f"the key {key!r} was removed. Remove it, and put a reverse proxy (for example "
                    "Envoy) before two serving parties: docs/how-to/production/promote.md."
                )
        return value

    def model_post_init(self, _context: Any) -> None:
        if self.answers_a_day is not None and self.cache_s:
            raise ValueError(
                "the use of an embedding that the active party caches is not counted as an answer. "
                "Set cache_s = 0, or remove answers_a_day."
            )


class RecordSettings(Section):
    """How this party records the messages that it sends."""

    digest: Literal["sample", "whole"] = "sample"
    """Whether the digest of a large tensor covers 1 KiB of it (``sample``) or all its bytes
    (``whole``), which takes a tenth of a step's time or more.
    """
    folder: str | None = None
    """The folder that contains the record's folder, ``.record-NAME``. Default: ``out``."""


class PartyFile(Section):
    """The settings in a party file. Relative paths start at the file's own folder."""

    name: Name
    """This party's name, as in the recipe and in its certificate."""
    recipe: str
    """The path of the recipe, the same at all parties."""
    server: Address
    """The address of the aggregation server."""
    active: Address | None = (
        # A passive party sets it if it cannot reach the address that the server passes on.
        None
    )
    """Passive party: the active party's address. Default: the address that the server passes on."""
    listen: Address = "127.0.0.1:0"
    """Active party: the address on which it waits for passive parties; port 0 takes a free port."""
    advertise: Address | None = None
    """Active party: the address that the server passes on to the other parties. Needed if
    ``listen`` means all addresses. Default: ``listen`` with its real port.
    """
    device: Annotated[str, match_pattern(r"cpu|cuda(:\d+)?", "'cpu', 'cuda' or 'cuda:N'")] = "cpu"
    """The torch device on which this party computes."""
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """The number of torch threads; with psi, of processes that mask ids; with trees, of processes
    that encrypt and add, unless HEU is used.
    """
    out: str = "runs"
    """The folder of this party's runs."""
    tls: TlsSettings
    """The files of mutual TLS."""
    pins: dict[str, Pin] = Field(default_factory=dict)
    """{name: pin of the only key that this server or party may use}. A member without a pin may use
    any key that the CA has certified.
    """
    data: DataSettings | None = None
    """This party's table."""
    policy: str | PolicySettings = "allow_all"
    """The policy that decides what may leave this party: ``allow_all``, ``encrypted``, a plug-in's,
    or a table.
    """
    alignments_a_day: PositiveInt = 24
    """The maximum number of alignments by psi, or of fuzzy linkages, per day with one table. A peer
    that may align often can guess ids.
    """
    peer_rows_at_most: PositiveInt | None = None
    """The maximum number of rows of another party: with psi, the ids that this party masks for it;
    without alignment, the rows that it may announce. Default: with psi, ten times the rows of this
    party's table, from 100,000 to 10,000,000; without alignment, and for the rows that the active
    party has predicted, 10,000,000.
    """
    predict: PredictionLimits = PredictionLimits()
    """This party's limits for joint predictions."""
    serve: ServeSettings = ServeSettings()
    """How this party serves a trained model."""
    record: RecordSettings = RecordSettings()
    """How this party records the messages that it sends."""
    trees: TreeLimits = TreeLimits()
    """This party's limits for recipes with ``secureboost``."""
    init: Init = "secret"
    """The source of this party's random numbers (initial weights, dropout, order of rows, augmented
    views): ``secret``, its own secret; or ``recipe``, the recipe's seed, with which all parties can
    compute them.
    """
    allow_code: tuple[AllowedCode, ...] = ()
    """The modules or callables that the recipe may make this party import and call."""
    encoder: EncoderSettings | None = None
    """This party's encoder, in place of the recipe's. Its output must have the recipe's
    ``embedding_size``. The other parties do not see this setting.
    """


def _apply_policy_level(party: PartyFile, path: Path) -> PartyFile:
    """Adds the settings of the policy's level to the other tables, except for keys that the file
    sets. Raises InputError if the result is not valid.
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
    party = _apply_policy_level(parse(PartyFile, read_tables(path, "party file"), str(path)), path)
    base = path.resolve().parent

    def make_absolute(text: str) -> str:
        return str(base / text)

    data = party.data.absolute(base) if party.data is not None else None
    tls = TlsSettings(
        **{
            name: make_absolute(value)
            for name, value in party.tls.model_dump(exclude_none=True).items()
        }
    )
    files = {
        key: make_absolute(path)
        for key in ("tokens", "certificate", "key")
        if (path := getattr(party.serve, key)) is not None
    }
    store = absolute_store(party.serve.store, base) if party.serve.store is not None else None
    return party.model_copy(
        update={
            "serve": party.serve.model_copy(update={**files, "store": store}),
            "recipe": make_absolute(party.recipe),
            "out": make_absolute(party.out),
            "record": party.record.model_copy(
                update={
                    "folder": make_absolute(party.record.folder) if party.record.folder else None
                }
            ),
            "tls": tls,
            "data": data,
            "predict": party.predict.model_copy(
                update={
                    "alone": make_absolute(party.predict.alone) if party.predict.alone else None
                }
            ),
        }
    )


def list_factories(recipe: Recipe, name: str, *, own_encoder: bool = False) -> list[str]:
    """Returns each ``module:callable`` that a recipe makes a party import: for its encoder, and for
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
    """Raises InputError if the recipe makes this party run code that the party file does not
    allow.
    """
    for factory in list_factories(recipe, file.name, own_encoder=file.encoder is not None):
        module = factory.partition(":")[0]
        if {factory, module} & set(file.allow_code):
            continue
        is_top = isinstance(recipe.model.top, CustomTop) and factory == recipe.model.top.factory
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: the recipe makes this party run {factory}, which the party file does not "
            "allow. "
            f'Read that code, and set allow_code = ["{module}"], or '
            f"{'agree on another model.top' if is_top else 'set an encoder in this file'}.",
        )
