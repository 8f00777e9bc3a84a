"""The party file: an organisation's private settings, and the addresses of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from vfl_common.config.base import Section, parse, spelt
from vfl_common.config.data import DataSettings
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.models import CustomSettings, EncoderSettings
from vfl_common.config.recipe import Name, Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port


def _address(text: str) -> str:
    host_and_port(text)
    return text


AllowedCode = Annotated[str, spelt(r"[\w.]+(:\w+)?", "module or module:callable")]
# host:port.
Address = Annotated[str, AfterValidator(_address)]
Pin = Annotated[
    str,
    spelt(r"sha256:[0-9a-f]{64}", "a pin as `vfl certs show` prints it, 'sha256:' and 64 digits"),
]


Init = Literal["secret", "recipe"]


class TlsSettings(Section):
    """PEM files: the federation's CA, this party's certificate and key; and the list of revoked
    certificates.

    An intermediate certificate lies in ``certificate``, behind the party's own.
    """

    ca: str
    certificate: str
    key: str
    # Of an encrypted key; default: the variable VFL_TLS_PASSPHRASE.
    passphrase_file: str | None = None
    # Plain or signed; default: `revoked.txt` and `revoked.crl` beside the CA, if they exist.
    revoked: str | None = None


class PredictionLimits(Section):
    """What this party asks of a joint prediction. ``at_least``: how many rows must be common, so
    that it answers.
    """

    at_least: PositiveInt = 1


class TreeLimits(Section):
    """What a party asks of recipes with secureboost: a recipe that gives less is refused before the
    party joins.

    ``least_rows``: on each side of a split, and ``most_bits``: that a row's sides tell in a run;
    both at a passive party. ``least_key_bits``: of the key that encrypts gradients.
    """

    least_rows: PositiveInt = 1
    most_bits: PositiveInt | None = None
    least_key_bits: Literal[1024, 2048, 3072, 4096] = 2048


class PartyFile(Section):
    """The party file. Relative paths start at the file's own folder."""

    name: Name
    recipe: str
    server: Address
    active: Address | None = (
        # Passive: the active party's address, if the one that the server relays is not reachable.
        None
    )
    # Active: where it waits for passive parties; port 0 takes a free one.
    listen: Address = "127.0.0.1:0"
    # Active: the address that the server relays; default: `listen` with its real port.
    advertise: Address | None = None
    device: Annotated[str, spelt(r"cpu|cuda(:\d+)?", "'cpu', 'cuda' or 'cuda:N'")] = "cpu"
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    # A folder for this party's runs.
    out: str = "runs"
    tls: TlsSettings
    # {the server or a party: its key}; others may have any.
    pins: dict[str, Pin] = Field(default_factory=dict)
    data: DataSettings | None = None
    # Decides what may leave this party.
    policy: str = "allow_all"
    # Of one table, by psi: who may ask often can guess ids.
    alignments_a_day: PositiveInt = 24
    # By psi: who has many rows can guess ids, and all mask them.
    peer_rows_at_most: PositiveInt = 10_000_000
    predict: PredictionLimits = PredictionLimits()
    trees: TreeLimits = TreeLimits()
    # What own weights, dropout, orders and views follow from; of "recipe" all know it.
    init: Init = "secret"
    # What the recipe may have this party import and call.
    allow_code: tuple[AllowedCode, ...] = ()
    # Replaces the recipe's encoder; must give the recipe's embedding size.
    encoder: EncoderSettings | None = None


def load_party(path: Path) -> PartyFile:
    """Reads a party file and makes its paths absolute. Raises InputError."""
    party = parse(PartyFile, read_tables(path, "party file"), str(path))
    base = path.resolve().parent

    def absolute(text: str) -> str:
        return str(base / text)

    data = party.data.absolute(base) if party.data is not None else None
    tls = TlsSettings(
        **{name: absolute(value) for name, value in party.tls.model_dump(exclude_none=True).items()}
    )
    return party.model_copy(
        update={
            "recipe": absolute(party.recipe),
            "out": absolute(party.out),
            "tls": tls,
            "data": data,
        }
    )


def code_named(recipe: Recipe, name: str) -> str | None:
    """Returns the ``module:callable`` that a recipe has a party import as its encoder; None if it
    names none.
    """
    place = recipe.party(name)
    if place is None or not place.features:
        return None
    encoder = place.encoder or recipe.model.encoder
    return encoder.factory if isinstance(encoder, CustomSettings) else None


def check_code(path: Path, file: PartyFile, recipe: Recipe) -> None:
    """Raises InputError if the recipe would have this party run code that its own file does not
    allow.
    """
    named = code_named(recipe, file.name) if file.encoder is None else None
    if named is None:
        return
    module = named.partition(":")[0]
    if not {named, module} & set(file.allow_code):
        text = f"{path}: the recipe has this party run {named}, which the party file does not allow"
        ways = f'read that code, and set allow_code = ["{module}"], or give an encoder of your own'
        raise InputError(Code.CONFIG_INVALID, f"{text}; {ways}")
