"""Starts ``vfl-party``; a signal ends it silently while its commands are still being imported."""

from __future__ import annotations

from vfl_common.process.signals import end_at_once


def main() -> None:
    """Runs ``vfl-party``."""
    end_at_once()
    from vfl_party.cli import main as program

    program()


if __name__ == "__main__":
    main()
