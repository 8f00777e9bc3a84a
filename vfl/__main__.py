"""Starts ``vfl``. A signal during its imports ends the program without a traceback."""

from __future__ import annotations

from vfl_common.process.signals import install_silent_end


def main() -> None:
    """Runs the program."""
    install_silent_end()
    from vfl.cli import main as program

    program()


if __name__ == "__main__":
    main()
