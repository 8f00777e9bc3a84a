"""`vfl-server health` and `vfl-party health`, as a container's health check calls them."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names
from tests.harness.federation import Federation, Program, refused


def answer(program: Program) -> str:
    """What a probe that ends well says."""
    assert program.wait(60) == 0, program.stderr
    said = "".join(event.get("text", "") for event in program.seen())
    assert said.count("\n") == 1
    assert_names(said, "127.0.0.1")
    return said


def test_probes_of_server_and_parties_and_the_report(tmp_path: Path) -> None:
    # A port that is free now; the probe reads it in the party file.
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{found.getsockname()[1]}"
    with Federation(
        tmp_path / "f", recipe(2), digits(2), extra={"p0": {"listen": listen}}
    ) as federation:
        closed = ("--listen", listen)
        probe = federation.start("probe", "vfl-server", "health", "recipe.toml", *closed)
        refused(probe, listen, "'server'")

        server = federation.start_server()
        federation.start_party("p0", "--report").wait_for("ready")
        # And waits for p1: both serve.
        server.wait_for("joined", party="p0")
        said = answer(
            federation.start(
                "probe", "vfl-server", "health", "recipe.toml", "--listen", federation.address
            )
        )
        assert federation.address in said
        assert listen in answer(federation.start("probe", "vfl-party", "health", "p0.toml"))

        federation.write_party("p1")
        refused(federation.start("probe", "vfl-party", "health", "p1.toml"), "p1.toml")
        refused(
            federation.start("probe", "vfl-party", "run", "p1.toml", "--report"),
            "p1.toml: --report",
        )

        federation.programs.pop("probe").close()
        federation.start_party("p1")
        federation.finish()
        assert {path.name for path in federation.run_folder.glob("*.png")} == {
            "bytes.png",
            "learning-curves.png",
            "times.png",
        }
