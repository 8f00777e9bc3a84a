"""Signed statements of what a party sent in a run, for the receiver of the model.

A statement is an in-toto Statement in a DSSE envelope.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import Envelope
from vfl_party.record.heads import read_signed_heads
from vfl_party.record.history import RecordHistory, sum_disclosures

PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
# The name of the predicate type. It is a tag URI and not the address of a page.
PREDICATE = "tag:vfl,2026:disclosures/v1"


def statement(folder: Path, run: Path, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the statement about a party's part in a run.

    Args:
        folder: The folder of the record.
        run: The party's folder of the run. Its newest checkpoint is the subject of the statement.
        name: The party's name.
        facts: More values about the run, such as its recipe and plug-ins.

    Raises InputError if the record does not have this run, or if the run has no checkpoint.
    """
    run_id = run.parent.name
    # A served model sends values after training, which are not part of the statement.
    disclosures = RecordHistory(folder).disclosures(run=run_id)
    sums = sum_disclosures(value for value in disclosures if value.way.job != "serve")
    if not sums:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{folder}: the record has no run {run_id}. Choose one that `vfl-party disclosures "
            "show` lists.",
        )
    checkpoints = sorted((run / "checkpoints").glob("[0-9]*.safetensors"))
    if not checkpoints:
        raise InputError(
            Code.FILE_INVALID,
            f"{run}: has no checkpoint. Give the folder of runs in which {name} was trained.",
        )
    heads = read_signed_heads(folder)
    lines = [
        {
            "to": to,
            **{key: value for key, value in way.fields.items() if key != "run"},
            **total.fields,
        }
        for (_, to, way), total in sums.items()
    ]
    return {
        "_type": STATEMENT,
        "subject": [
            {
                "name": f"{run_id}/{name}/{checkpoints[-1].name}",
                "digest": {"sha256": sha256(checkpoints[-1].read_bytes()).hexdigest()},
            }
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "party": name,
            "run": run_id,
            **facts,
            "left": lines,
            "head": str(heads[-1].note) if heads else "",
            "certificates": heads[-1].certificates if heads else {},
        },
    }


def seal(document: dict[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Returns the envelope of a statement, signed with the party's key."""
    return Envelope.seal(PAYLOAD, document, credentials).value


def open_statement(path: Path, credentials: Credentials) -> tuple[dict[str, Any], str]:
    """Reads a statement from a file. Returns the statement and the name of the party that signed
    it.

    Raises InputError if the file is not a statement, or not signed with a certificate of the CA.
    """
    try:
        envelope = Envelope.read(json.loads(path.read_text(encoding="utf-8")), PAYLOAD)
        document = envelope.statement
        party, _run = str(document["predicate"]["party"]), str(document["predicate"]["run"])
        if document["predicateType"] != PREDICATE:
            raise ValueError("the file is another kind of statement")
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a statement of what a party sent. Give a file that `vfl-party "
            "disclosures export` wrote.",
        ) from None
    envelope.verify_stored(path, party, credentials)
    return document, party
