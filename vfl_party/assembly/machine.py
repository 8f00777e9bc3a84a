"""Checks the free disk space and the ports of a party's machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from vfl_common.config.party import PartyFile
from vfl_common.errors import InputError
from vfl_common.files import require_writable
from vfl_common.rpc.channel import check_address


def room(file: PartyFile) -> str:
    """Describes the free disk space for the folders of runs and of the record.

    Raises InputError if a folder is not writable.
    """
    folders = dict.fromkeys((Path(file.out), Path(file.record.folder or file.out)))
    existing = [require_writable(folder) for folder in folders]
    free = [
        f"{shutil.disk_usage(folder).free / 1e9:,.1f} GB free for {folder}" for folder in existing
    ]
    return ", ".join(dict.fromkeys(free))


def serve_ports(file: PartyFile) -> Iterator[tuple[str, bool]]:
    """Yields (sentence, whether the port is free) for each port of ``[serve]``.

    A port that is in use may belong to the party's own serving program.
    """
    if "serve" not in file.model_fields_set:
        return
    for key in ("listen", "http", "grpc"):
        address = getattr(file.serve, key)
        if address is None:
            continue
        try:
            check_address(address)
        except InputError as error:
            yield f"serve.{key}: {error}", False
        else:
            yield f"serve.{key}: {address} is free", True
