"""What a party needs of its machine: room on the disk, and ports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from vfl_common.config.party import PartyFile
from vfl_common.errors import InputError
from vfl_common.files import require_writable
from vfl_common.rpc.channel import check_address


def room(file: PartyFile) -> str:
    """Says how much room the folders of runs and of the record have. Raises InputError if one of
    them cannot be written.
    """
    folders = dict.fromkeys((Path(file.out), Path(file.record.folder or file.out)))
    existing = [require_writable(folder) for folder in folders]
    free = [
        f"{shutil.disk_usage(folder).free / 1e9:,.1f} GB free for {folder}" for folder in existing
    ]
    return ", ".join(dict.fromkeys(free))


def serve_ports(file: PartyFile) -> Iterator[tuple[str, bool]]:
    """Yields a sentence for each port of ``[serve]``, and whether it is free. One that is used may
    belong to the program that serves now.
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
