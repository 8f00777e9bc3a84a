"""A signed statement of what left a party in a run, for whoever gets the model: a Statement of
in-toto in an envelope of DSSE.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.envelope import Envelope
from vfl_party.record.heads import signed
from vfl_party.record.history import RecordHistory, summed

PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
# Of our own; it is a name, and no page.
PREDICATE = "tag:vfl,2026:disclosures/v1"


def statement(folder: Path, run: Path, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the statement about a party's part in a run.

    Args:
        folder: of the record.
        run: the party's folder of the run, whose newest checkpoint is the subject.
        name: the party's.
        facts: more of the run: recipe, versions.

    Raises InputError if the record knows no such run, or the run has no checkpoint.
    """
    run_id = run.parent.name
    # What was told while the model served is another matter, and goes on.
    left = RecordHistory(folder).disclosures(run=run_id)
    sums = summed(each for each in left if each.way.job != "serve")
    if not sums:
        text = f"{folder}: the record knows no run {run_id}; vfl-party disclosures show lists them"
        raise InputError(Code.CONFIG_INVALID, text)
    checkpoints = sorted((run / "checkpoints").glob("[0-9]*.safetensors"))
    if not checkpoints:
        text = f"{run}: has no checkpoint; give the folder of runs in which {name} was trained"
        raise InputError(Code.FILE_INVALID, text)
    heads = signed(folder)
    lines = [
        {"to": to, **{key: each for key, each in way.fields.items() if key != "run"}, **one.fields}
        for (_, to, way), one in sums.items()
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


def sealed(said: dict[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Returns the envelope of a statement, signed with the party's key."""
    return Envelope.sealed(PAYLOAD, said, credentials).value


def opened(path: Path, credentials: Credentials) -> tuple[dict[str, Any], str]:
    """Returns a statement from a file, and who has signed it: the name in the certificate.

    Raises InputError if the file is none, or the signature is not of a certificate of the CA.
    """
    try:
        envelope = Envelope.read(json.loads(path.read_text(encoding="utf-8")), PAYLOAD)
        said = envelope.said
        party, _run = str(said["predicate"]["party"]), str(said["predicate"]["run"])
        if said["predicateType"] != PREDICATE:
            raise ValueError(said["predicateType"])
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror})"
        raise InputError(Code.FILE_INVALID, text) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"{path}: is no statement of what left a party"
        raise InputError(Code.FILE_INVALID, text) from None
    envelope.require_kept(path, party, credentials)
    return said, party
