"""The party file: an organisation's private settings, and the addresses of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from vfl_common.config.base import Section, parse, spelt
from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Name
from vfl_common.config.which import read_tables
from vfl_common.text import host_and_port


def _address(text: str) -> str:
    host_and_port(text)
    return text


Address = Annotated[str, AfterValidator(_address)]  # host:port


class TlsSettings(Section):
    """PEM files: the federation's CA, this party's certificate and key; and the list of revoked certificates."""

    ca: str
    certificate: str
    key: str
    revoked: str | None = None  # default: `revoked.txt` beside the CA, if it exists


class PartyFile(Section):
    """The party file. Relative paths start at the file's own folder."""

    name: Name
    recipe: str
    server: Address
    active: Address | None = (
        None  # passive: the active party's address, if the one that the server relays is not reachable
    )
    listen: Address = "127.0.0.1:0"  # active: where it waits for passive parties; port 0 takes a free one
    advertise: Address | None = None  # active: the address that the server relays; default: `listen` with its real port
    device: Annotated[str, spelt(r"cpu|cuda(:\d+)?", "'cpu', 'cuda' or 'cuda:N'")] = "cpu"
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    out: str = "runs"  # a folder for this party's runs
    tls: TlsSettings
    data: DataSettings | None = None
    policy: str = "allow_all"  # decides what may leave this party
    alignments_a_day: PositiveInt = 24  # of one table, by psi: who may ask often can guess ids
    encoder: EncoderSettings | None = None  # replaces the recipe's encoder; must give the recipe's embedding size


def load_party(path: Path) -> PartyFile:
    """Reads a party file and makes its paths absolute. Raises InputError."""
    party = parse(PartyFile, read_tables(path, "party file"), str(path))
    base = path.resolve().parent

    def absolute(text: str) -> str:
        return str(base / text)

    data = party.data.absolute(base) if party.data is not None else None
    tls = TlsSettings(**{name: absolute(value) for name, value in party.tls.model_dump(exclude_none=True).items()})
    return party.model_copy(
        update={"recipe": absolute(party.recipe), "out": absolute(party.out), "tls": tls, "data": data}
    )
