"""`vfl-server health` and `vfl-party health`, as a container's health check calls them."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.harness.cases import digits, recipe
from tests.harness.federation import Federation, Program


def answer(program: Program, code: int = 0) -> str:
    """What a probe that ends with ``code`` says, on whichever stream."""
    assert program.wait(60) == code, program.stderr
    return "".join(event.get("text", "") for event in program.seen()) + program.stderr


def test_probes_of_server_and_parties_and_the_report(tmp_path: Path) -> None:
    # A port that is free now; the probe reads it in the party file.
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{found.getsockname()[1]}"
    with Federation(
        tmp_path / "f", recipe(2), digits(2), extra={"p0": {"listen": listen}}
    ) as federation:
        closed = ("--listen", listen)
        said = answer(
            federation.start("probe", "vfl-server", "health", "recipe.toml", *closed), code=2
        )
        assert said == f"error: nothing listens at {listen}; is 'server' started?\n"

        server = federation.start_server()
        federation.start_party("p0", "--report").wait_for("ready")
        # And waits for p1: both serve.
        server.wait_for("joined", party="p0")
        said = answer(
            federation.start(
                "probe", "vfl-server", "health", "recipe.toml", "--listen", federation.address
            )
        )
        assert said == f"server at {federation.address} serves\n"
        assert (
            answer(federation.start("probe", "vfl-party", "health", "p0.toml"))
            == f"p0 at {listen} serves\n"
        )

        federation.write_party("p1")
        said = answer(federation.start("probe", "vfl-party", "health", "p1.toml"), code=2)
        assert said.startswith("error: p1.toml: p1 has no known port")
        said = answer(federation.start("probe", "vfl-party", "run", "p1.toml", "--report"), code=2)
        assert (
            said == "error: p1.toml: --report is for the active party; p1 is passive and gets no "
            "summary\n"
        )

        federation.programs.pop("probe").close()
        federation.start_party("p1")
        federation.finish()
        assert {path.name for path in federation.run_folder.glob("*.png")} == {
            "bytes.png",
            "learning-curves.png",
            "times.png",
        }
