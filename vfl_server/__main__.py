"""Starts ``vfl-server``; a signal ends it silently while its commands are still being imported."""

from __future__ import annotations

from vfl_common.process.signals import end_at_once


def main() -> None:
    """Runs the program."""
    end_at_once()
    from vfl_server.cli import main as program

    program()


if __name__ == "__main__":
    main()
