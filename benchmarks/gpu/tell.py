"""What the steps share: their options, and how they tell what they found."""

from __future__ import annotations

import json
from typing import Any

import click


def tell(what: str, **facts: Any) -> None:
    """Print a finding as one line of JSON."""
    print(json.dumps({"what": what, **facts}), flush=True)


device_option = click.option("--device", default="cuda", show_default=True)
tiny_option = click.option("--tiny", is_flag=True, help="The smallest sizes.")
