"""Settings of where a serving party's features come from: ``serve.store`` of the party file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from vfl_common.config.base import Section, has_form
from vfl_common.config.sources import is_database, resolve_source
from vfl_common.passwords import hide_passwords

# A question of a served model has at most 1,024 ids.
Connections = Annotated[int, Field(gt=0, le=64)]


class DatabaseStore(Section):
    """A database, which is asked for the rows of each question."""

    kind: Literal["database"]
    """A database that is asked for the rows of each question."""
    source: str | None = None
    """The URL of the database. Default: ``data.source``."""
    query: str
    """The SELECT that gives the rows of the ids ``:ids``, with the columns of the id and of
    training. PostgreSQL: ``WHERE id = ANY(:ids)``; every other database: ``WHERE id IN :ids``.
    """
    connections: Connections = 4
    """How many connections are open at most; as many questions are answered at the same time."""

    @field_validator("source")
    @classmethod
    def _is_database(cls, value: str | None) -> str | None:
        if value is not None and not is_database(value):
            raise ValueError(
                f"{hide_passwords(value)!r} is not a database. "
                "Write its URL, such as postgresql://USER@HOST/NAME."
            )
        return value


class ServiceStore(Section):
    """A feature service, which is asked over HTTP for the rows of each question."""

    kind: Literal["service"]
    """An HTTP service with SecretFlow-Serving's interface ``BatchFetchFeature``."""
    url: Annotated[str, has_form(r"https?://[^\s/@?#]+(/[^\s?#]*)?", "http(s)://HOST:PORT/PATH")]
    """Where it is asked: ``https://HOST:PORT/BatchFeatureService/BatchFetchFeature``."""
    service_id: str | None = None
    """What it gets as ``model_service_id``. Default: the recipe's name."""
    context: str = ""
    """What it gets as ``query_context``."""
    ca: str | None = None
    """The PEM file of the CA that its certificate must be of. Default: the CAs of the machine."""
    certificate: str | None = None
    """The PEM file of this party's certificate, for a service that asks for one."""
    key: str | None = None
    """The PEM file of that certificate's key, with mode 0600."""
    connections: Connections = 4
    """How many connections are open at most; as many questions are answered at the same time."""


StoreSettings = Annotated[DatabaseStore | ServiceStore, Field(discriminator="kind")]


def absolute_store(store: DatabaseStore | ServiceStore, base: Path) -> DatabaseStore | ServiceStore:
    """Returns the same settings, with relative paths taken from ``base``."""
    update: dict[str, str] = {}
    if isinstance(store, DatabaseStore) and store.source is not None:
        update = {"source": resolve_source(store.source, base)}
    if isinstance(store, ServiceStore):
        files = {key: getattr(store, key) for key in ("ca", "certificate", "key")}
        update = {key: str(base / path) for key, path in files.items() if path is not None}
    return store.model_copy(update=update)
