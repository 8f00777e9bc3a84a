"""Settings of a serving party's feature store: ``serve.store`` of the party file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from vfl_common.config.base import Section, match_pattern
from vfl_common.config.sources import is_database, resolve_source
from vfl_common.passwords import hide_passwords

# The maximum number of open connections to a feature store.
Connections = Annotated[int, Field(gt=0, le=64)]


class DatabaseStore(Section):
    """A database that is queried for the rows of each request."""

    kind: Literal["database"]
    """A database that is queried for the rows of each request."""
    source: str | None = None
    """The URL of the database. Default: ``data.source``."""
    query: str
    """The SELECT that returns the rows with the ids ``:ids``: the id columns and the training
    columns. PostgreSQL: ``WHERE id = ANY(:ids)``; every other database: ``WHERE id IN :ids``.
    """
    connections: Connections = 4
    """The maximum number of open connections, and so of requests at the same time."""

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
    """A feature service that is called over HTTP for the rows of each request."""

    kind: Literal["service"]
    """An HTTP service with SecretFlow-Serving's interface ``BatchFetchFeature``."""
    url: Annotated[
        str, match_pattern(r"https?://[^\s/@?#]+(/[^\s?#]*)?", "http(s)://HOST:PORT/PATH")
    ]
    """The URL of the service: ``https://HOST:PORT/BatchFeatureService/BatchFetchFeature``."""
    service_id: str | None = None
    """The ``model_service_id`` of each request. Default: the recipe's name."""
    context: str = ""
    """The ``query_context`` of each request."""
    ca: str | None = None
    """The PEM file of the CA that must have issued the service's certificate. Default: the
    machine's CAs.
    """
    certificate: str | None = None
    """The PEM file of this party's certificate, for a service that requires a client certificate.
    """
    key: str | None = None
    """The PEM file of that certificate's key, with mode 0600."""
    connections: Connections = 4
    """The maximum number of open connections, and so of requests at the same time."""


StoreSettings = Annotated[DatabaseStore | ServiceStore, Field(discriminator="kind")]


def absolute_store(store: DatabaseStore | ServiceStore, base: Path) -> DatabaseStore | ServiceStore:
    """Returns a copy of the settings in which relative paths start at ``base``."""
    update: dict[str, str] = {}
    if isinstance(store, DatabaseStore) and store.source is not None:
        update = {"source": resolve_source(store.source, base)}
    if isinstance(store, ServiceStore):
        files = {key: getattr(store, key) for key in ("ca", "certificate", "key")}
        update = {key: str(base / path) for key, path in files.items() if path is not None}
    return store.model_copy(update=update)
