"""Starts ``vfl-party``; a signal ends it silently while its commands are still being imported."""

from __future__ import annotations

from vfl_common.process.signals import install_silent_end


def main() -> None:
    """Runs ``vfl-party``."""
    install_silent_end()
    from vfl_party.cli import main as program

    program()


if __name__ == "__main__":
    main()
