"""``vfl-party`` with the methods of ``tests/harness/methods`` beside its own."""

from __future__ import annotations

from pathlib import Path

import vfl_party.methods
from vfl_party.cli import main

vfl_party.methods.__path__.append(str(Path(__file__).parent / "methods"))

if __name__ == "__main__":
    main()
