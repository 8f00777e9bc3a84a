"""The table of errors: code, exit code, the sentence that others read, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.errors import CATALOGUE, Code

HEADINGS = ("code", "exit", "what others read", "what to do")

# What the people at the party can do. The sentence that they read names the place, and often the remedy.
REMEDY = {
    Code.INTERNAL: "report it with the log's traceback; the same command resumes the run",
    Code.CONFIG_INVALID: "correct the key that the sentence names",
    Code.FILE_INVALID: "correct, restore or free the file that the sentence names",
    Code.DATA_INVALID: "correct the table; `vfl-party check` shows its rows and columns",
    Code.ROWS_DIFFER: 'give all parties the same ids, or set `rows.align = "psi"`, or `"fuzzy"` without exact ids',
    Code.CERTIFICATE_INVALID: "get a new certificate from the CA administrator; `vfl certs show` explains one",
    Code.IDENTITY_MISMATCH: "compare name and pin with the other organisation",
    Code.NOT_IN_RECIPE: "add the party to every copy of the recipe, or correct its name",
    Code.NAME_TAKEN: "end the other process of this name",
    Code.ROLE_MISMATCH: "correct `role` in the recipe, or the party file",
    Code.RECIPE_DIFFERS: "give all processes the same recipe; the sentence names the first key that differs",
    Code.PROTOCOL_DIFFERS: "upgrade the party that the sentence names",
    Code.ADDRESS_IN_USE: "take another address, or end the process that has it",
    Code.UNREACHABLE: "start the peer, correct the address, or open the port",
    Code.TENSOR_MISMATCH: "use the same recipe and release at all parties; correct a plug-in's shapes",
    Code.TENSOR_TOO_LARGE: "use the same recipe and release at all parties; correct a plug-in's shapes",
    Code.NON_FINITE: "lower the learning rate, set `clip_norm`, or scale the columns",
    Code.STEP_OUT_OF_ORDER: "use the same recipe and release at all parties; correct a method's loops",
    Code.STALE_GENERATION: "wait: it is tried again in the new generation",
    Code.MODEL_INVALID: "correct the encoder or the top model that the sentence names",
    Code.DEVICE_MISSING: "correct `device` in the party file",
    Code.PARTY_LOST: "start all processes again; they resume the run",
    Code.STEP_TIMEOUT: "raise `run.step_timeout_s`, or take smaller batches",
    Code.ABORTED: "look at the party that the sentence names",
    Code.INTERRUPTED: "wait: the run resumes by itself, and no person sees this code",
    Code.CHECKPOINT_INVALID: "restore the folder of the run, or begin a new run with `--fresh` at the server",
    Code.MALFORMED_MESSAGE: "use the same release at all parties; if it comes again, ask who runs the sender",
    Code.MODELS_DIFFER: "give encoders whose tops are averaged the same structure",
    Code.REFUSED: "ask the party: its policy or a limit of its party file refuses what the recipe asks for",
    Code.PLUGINS_DIFFER: "install the same version of the plug-in at all parties",
    Code.ADDRESS_INVALID: "write host:port, with a host that this machine can resolve",
}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields a line for each code, by exit code and then in the order of the catalogue."""
    for code, meaning in sorted(CATALOGUE.items(), key=lambda each: each[1].exit_code):
        yield f"`{code.name}`", str(meaning.exit_code), meaning.public, REMEDY[code]
