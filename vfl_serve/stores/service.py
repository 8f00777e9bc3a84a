"""A client for feature services with the interface ``BatchFetchFeature`` of SecretFlow-Serving.

Source: ``secretflow_serving/spis/batch_feature_service.proto`` and ``protos/feature.proto`` of
https://github.com/secretflow/serving, in the JSON of proto3. A service answers for all ids of a
request, in order. If any id is unknown, it returns ``NOT_FOUND`` (5) for the whole request and does
not name the id. The client then halves the ids until the unknown id is alone.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import ServiceStore
from vfl_common.errors import Code, InputError
from vfl_common.text import clean
from vfl_party.data import checks
from vfl_party.data.inputs.preprocess import Preprocessor
from vfl_party.data.reading import DATE
from vfl_serve.stores.seam import (
    UNKNOWN_ROW,
    BrokenError,
    ConnectionPool,
    IdBatch,
    ValueMismatchError,
)

# Status codes of a service: success, unknown id.
_OK, _NOT_FOUND = 0, 5
_CONNECT_S, _CHECK_S = 5.0, 10.0
# Socket timeout; the pool interrupts earlier.
_LONGEST_S = 60.0
# HTTP statuses that mean a wrong address or a missing permission.
_NO_SERVICE = (401, 403, 404, 405)
# Limits of an answer: bytes per cell, and bytes in addition.
_CELL_BYTES, _MORE_BYTES = 1 << 10, 1 << 20
_BLOCK = 1 << 16
# Fields of a value: lists of numbers, and all lists.
_NUMBERS = ("ds", "fs", "i64s", "i32s", "bs")
_LISTS = ("ss", *_NUMBERS)
# Limit of quoted service texts, in characters.
_MAX_CHARACTERS = 200


class ServiceRows:
    """Rows of a feature service; see ``seam.Source``.

    ``service_id``, ``party``: identify this party in requests.
    """

    def __init__(
        self,
        settings: DataSettings,
        store: ServiceStore,
        preprocessor: Preprocessor,
        *,
        service_id: str,
        party: str,
    ) -> None:
        self.settings, self._store = settings, store
        self._about = {"header": {"data": {}}, "model_service_id": service_id, "party_id": party}
        kinds = preprocessor.kinds or {}
        # The service sends a date as a text, such as 2026-01-31.
        self._numeric = {name: kinds.get(name) != DATE for name in preprocessor.numeric_names}
        self._words = preprocessor.categorical_names
        self._tls = _make_tls_context(store)
        self._pool: ConnectionPool[http.client.HTTPConnection] = ConnectionPool(
            self._open, lambda line: line.close(), store.connections, _interrupt
        )

    def check(self) -> None:
        """Requests no ids, to test that the service answers. Raises InputError."""
        try:
            until_s = time.monotonic() + _CHECK_S
            status, _ = self._pool.run(lambda line: self._post(line, []), until_s)
        except TimeoutError:
            raise checks.unreadable(
                self._store.url,
                f"does not answer within {_CHECK_S:g} s. Correct serve.store.url, or start the "
                "service.",
            ) from None
        if status in _NO_SERVICE:
            raise self._refusal(status)

    def rows(self, ids: Sequence[str], until_s: float) -> IdBatch:
        """See ``seam.Source``."""
        answer = self._pool.run(lambda line: self._read_answer(line, ids), until_s)
        status = answer.get("status")
        code = status.get("code", _OK) if isinstance(status, dict) else None
        if code == _NOT_FOUND:
            raise ValueMismatchError(
                Code.DATA_INVALID, f"{self._store.url}: does not know an id", UNKNOWN_ROW
            )
        if code != _OK or not isinstance(status, dict):
            message = clean(str((status or {}).get("msg", "")), _MAX_CHARACTERS)
            raise checks.unreadable(
                self._store.url,
                f"the service answers with status {clean(str(code), 20)} ({message}). Ask its "
                "operator.",
            )
        return IdBatch(self._make_table(answer.get("features"), ids), False)

    def close(self) -> None:
        """Closes the connections."""
        self._pool.close()

    def _open(self) -> http.client.HTTPConnection:
        url = urlsplit(self._store.url)
        assert url.hostname is not None  # noqa: S101 - the settings say so
        if self._tls is None:
            line = http.client.HTTPConnection(url.hostname, url.port, timeout=_CONNECT_S)
        else:
            line = http.client.HTTPSConnection(
                url.hostname, url.port, timeout=_CONNECT_S, context=self._tls
            )
        try:
            line.connect()
        except (OSError, UnicodeError) as error:
            line.close()
            # ``verify_message`` omits the line of OpenSSL's source, which differs between versions.
            why = getattr(error, "verify_message", "") or str(error)
            raise checks.unreadable(
                self._store.url,
                f"cannot be reached ({clean(why, _MAX_CHARACTERS)}). Correct serve.store.url or "
                "serve.store.ca, or start the service.",
            ) from None
        line.sock.settimeout(_LONGEST_S)
        return line

    def _refusal(self, status: int) -> InputError:
        return checks.unreadable(
            self._store.url,
            f"the service answers with HTTP status {status}. Correct serve.store, or ask its "
            "operator.",
        )

    def _post(
        self, line: http.client.HTTPConnection, ids: Sequence[str]
    ) -> tuple[int, bytes | None]:
        """Sends a request; returns the HTTP status and the body, or None if it is too long.

        Raises BrokenError.
        """
        url = urlsplit(self._store.url)
        param = {"query_datas": list(ids), "query_context": self._store.context}
        body = {**self._about, "feature_fields": self._make_fields(), "param": param}
        headers = {"content-type": "application/json", "accept": "application/json"}
        try:
            line.request("POST", url.path or "/", json.dumps(body).encode(), headers)
            answer = line.getresponse()
            return answer.status, _read_body(answer, self._max_bytes(len(ids)))
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            # A service that refuses a certificate causes one of several errors at random, so the
            # message does not contain the error.
            raise BrokenError(
                Code.FILE_INVALID,
                f"{self._store.url}: the connection broke. Ask the operator of the service whether "
                "it needs serve.store.certificate."
                if self._tls is not None and not self._store.certificate
                else f"{self._store.url}: the connection broke. Ask the operator of the service.",
            ) from error

    def _read_answer(self, line: http.client.HTTPConnection, ids: Sequence[str]) -> dict[str, Any]:
        """Sends a request; returns the JSON answer. Raises InputError for an invalid answer."""
        status, data = self._post(line, ids)
        if status != http.client.OK:
            raise self._refusal(status)
        if data is None:
            raise checks.unusable(
                self._store.url,
                "the service answers with more bytes than its features can have. Ask its operator.",
            )
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise checks.unusable(
                self._store.url, "the answer is not a JSON object. Correct serve.store.url."
            )
        return answer

    def _make_fields(self) -> list[dict[str, str]]:
        kinds = {
            name: "FIELD_DOUBLE" if number else "FIELD_STRING"
            for name, number in self._numeric.items()
        }
        kinds |= dict.fromkeys(self._words, "FIELD_STRING")
        return [{"name": name, "type": kind} for name, kind in kinds.items()]

    def _max_bytes(self, ids: int) -> int:
        return _MORE_BYTES + _CELL_BYTES * ids * (len(self._numeric) + len(self._words))

    def _make_table(self, features: Any, ids: Sequence[str]) -> pa.Table:
        """Returns a table of the ids and the features. Raises InputError."""
        values = {}
        for feature in features if isinstance(features, list) else ():
            field = feature.get("field") if isinstance(feature, dict) else None
            if isinstance(field, dict) and isinstance(feature.get("value", {}), dict):
                values[field.get("name")] = feature.get("value", {})
        columns: dict[str, pa.Array] = {}
        (name,) = self.settings.id
        columns[name] = pa.array(ids, pa.string())
        for name in (*self._numeric, *self._words):
            if name not in values:
                raise checks.unusable(
                    self._store.url,
                    f"the service does not return feature {name!r} of the training table. Add it "
                    "to the service.",
                )
            columns[name] = self._make_column(name, values[name], len(ids))
        return pa.table(columns)

    def _make_column(self, name: str, value: Mapping[str, Any], n: int) -> pa.Array:
        filled = [key for key in _LISTS if value.get(key)]
        cells = value[filled[0]] if len(filled) == 1 else None
        if not isinstance(cells, list) or len(cells) != n:
            raise checks.unusable(
                self._store.url,
                f"feature {name!r} does not have one list with one value per id. Ask the operator "
                "of the service.",
            )
        number = self._numeric.get(name)
        try:
            if filled[0] == "ss":
                # Lists of proto3 have no null, so an empty text is an empty cell.
                words = pa.array([cell or None for cell in cells], pa.string())
                return words.cast(pa.timestamp("us")) if number is False else words
            if filled[0] in ("i64s", "i32s"):
                return pa.array([_to_int(cell) for cell in cells], pa.int64())
            if filled[0] == "bs":
                return pa.array(cells, pa.bool_())
            return pa.array([float(cell) for cell in cells], pa.float64(), from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise ValueMismatchError(
                Code.DATA_INVALID,
                f"{self._store.url}: feature {name!r} has values that are not of its type "
                f"({filled[0]})",
            ) from None


def _to_int(value: Any) -> int:
    """Returns an integer from JSON, where integers of 64 bits are texts."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _read_body(answer: http.client.HTTPResponse, max_bytes: int) -> bytes | None:
    """Reads an answer; None if it has more than ``max_bytes`` bytes."""
    data = bytearray()
    while block := answer.read(_BLOCK):
        data += block
        if len(data) > max_bytes:
            return None
    return bytes(data)


def _make_tls_context(store: ServiceStore) -> ssl.SSLContext | None:
    """Returns the TLS settings for the service; None for plain HTTP. Raises InputError."""
    files = (store.ca, store.certificate, store.key)
    if store.url.startswith("http:"):
        if any(file is not None for file in files):
            raise InputError(
                Code.CONFIG_INVALID,
                "serve.store: ca, certificate and key need an https:// url. Correct the url, or "
                "remove them.",
            )
        return None
    if (store.certificate is None) != (store.key is None):
        raise InputError(
            Code.CONFIG_INVALID,
            "serve.store: certificate and key belong together. Set both or neither.",
        )
    try:
        context = ssl.create_default_context(cafile=store.ca)
        if store.certificate is not None:
            context.load_cert_chain(store.certificate, store.key)
    except OSError as error:
        names = ", ".join(file for file in files if file is not None)
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"{names}: cannot be read as PEM files ({clean(str(error), _MAX_CHARACTERS)}). Correct "
            "serve.store.",
        ) from None
    return context


def _interrupt(line: http.client.HTTPConnection) -> None:
    if line.sock is not None:
        line.sock.shutdown(socket.SHUT_RDWR)
