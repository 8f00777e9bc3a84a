"""``vfl certs``: the federation's authority and the certificates of its parties."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.certs import CA_DAYS, LIST_DAYS, MAX_DAYS, PARTY_DAYS

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
_DAYS = click.IntRange(1, MAX_DAYS)
_DEFAULT = Path("certs")

_ca = click.option(
    "--ca",
    type=_FOLDER,
    default=_DEFAULT,
    show_default=True,
    help="Read the folder with ca.pem and ca.key.",
)
_days = click.option(
    "--days",
    type=_DAYS,
    default=PARTY_DAYS,
    show_default=True,
    help="Set the validity in days, at most that of the CA.",
)
_force = click.option("--force", is_flag=True, help="Replace existing files.")


@click.group()
def certs() -> None:
    """Make and show the certificates of a federation.

    \b
    One administrator makes all keys in one place:
      vfl certs ca --federation credit-risk
      vfl certs issue server bank shop
    \b
    Each organisation keeps its own key:
      vfl certs request bank          (at the bank; send certs/bank.csr)
      vfl certs sign certs/bank.csr   (at the authority; send back bank.pem and ca.pem)
    """


@certs.command()
@click.option(
    "--out", type=_FOLDER, default=_DEFAULT, show_default=True, help="Write to this folder."
)
@click.option(
    "--federation",
    default="vfl",
    show_default=True,
    help="Set the authority's name, for people to read.",
)
@click.option(
    "--days", type=_DAYS, default=CA_DAYS, show_default=True, help="Set the validity in days."
)
@click.option(
    "--force", is_flag=True, help="Replace the authority and invalidate all of its certificates."
)
def ca(out: Path, federation: str, days: int, force: bool) -> None:
    """Make the authority of a federation.

    Give ca.pem to every party, and ca.key to nobody.

    \b
    Example:
      vfl certs ca --out certs --federation credit-risk
    """
    from vfl.certs import authority

    path = authority.create_authority(out, federation, days, force=force)
    click.echo(f"{path}: for every party")
    click.echo(f"{out / 'ca.key'}: keep it secret; it can sign a certificate for any party")


@certs.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_ca
@click.option(
    "--out", type=_FOLDER, help="Write the files to this folder [default: the authority's]."
)
@_days
@_force
def issue(names: tuple[str, ...], ca: Path, out: Path | None, days: int, force: bool) -> None:
    """Make a key and a certificate for each NAME.

    NAME is the name of the server or a party in the recipe. ca.pem is also copied to the folder
    --out, unless it has one.

    \b
    Examples:
      vfl certs issue server bank shop --ca certs --days 90
      vfl certs issue shop --out ../shop/certs
    """
    from vfl.certs import authority

    for name in names:
        authority.check_name(name)
    for name in names:
        tls = authority.issue(ca, name, days, out=out, force=force)
        click.echo(
            f"{name}: {tls.certificate} and {tls.key}; it also needs {authority.give_ca(ca, out)}"
        )


@certs.command()
@click.argument("name")
@click.option(
    "--out",
    type=_FOLDER,
    default=_DEFAULT,
    show_default=True,
    help="Write NAME.key and NAME.csr to this folder.",
)
@_force
def request(name: str, out: Path, force: bool) -> None:
    """Make a key and a request for the authority.

    Keep the key secret, and send the request to the authority.

    \b
    Example:
      vfl certs request bank
    """
    from vfl.certs import authority
    from vfl.certs.authority import fingerprint
    from vfl_common.identity import pem

    path = authority.create_request(out, name, force=force)
    click.echo(f"{out / name}.key: keep it secret; it stays here")
    click.echo(f"{path}: send it to the authority, for `vfl certs sign`")
    click.echo(
        f"the request's fingerprint: SHA-256 {fingerprint(pem.parse_request(pem.read(path), path))}"
    )


@certs.command()
@click.argument("csr", type=_FILE)
@click.option("--name", help="Name the sender [default: the file's name without .csr].")
@_ca
@click.option(
    "--out", type=_FOLDER, help="Write the certificate to this folder [default: the request's]."
)
@_days
@_force
def sign(csr: Path, name: str | None, ca: Path, out: Path | None, days: int, force: bool) -> None:
    """Sign the request CSR of a party.

    Before you send the certificate back, check that the party sees the same fingerprint.

    \b
    Example:
      vfl certs sign certs/bank.csr --ca certs
    """
    from vfl.certs import authority
    from vfl.certs.authority import fingerprint
    from vfl_common.identity import pem

    path = authority.sign_request(csr, ca, name or csr.stem, days, out=out, force=force)
    click.echo(
        f"the request's fingerprint: SHA-256 {fingerprint(pem.parse_request(pem.read(csr), csr))}"
    )
    click.echo(f"{path}: send it back, together with {ca / 'ca.pem'}")


@certs.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@_ca
@click.option(
    "--days",
    type=_DAYS,
    default=LIST_DAYS,
    show_default=True,
    help="Set the validity of the signed list in days.",
)
def revoke(names: tuple[str, ...], ca: Path, days: int) -> None:
    """Add the certificate of each NAME to revoked.txt.

    NAME is a party, or a file NAME.pem. If the folder has ca.key, the signed list revoked.crl is
    also written. Without a NAME, the list is only signed again, which is necessary before its
    validity (--days) ends.

    The server and every party need the new list next to their ca.pem. They read it at each
    connection. Revoke a certificate before you replace it. Afterwards, you need the old file or the
    serial number to revoke it.

    \b
    Example:
      vfl certs revoke bank --ca certs
    """
    from vfl.certs import authority
    from vfl_common.identity.revoked import FILE

    for name in names:
        path, changed = authority.revoke(ca, name)
        click.echo(f"{name}: {'added to' if changed else 'was already in'} {path}")
    signed = authority.sign_list(ca, days)
    if signed is None and not names:
        raise click.UsageError(f"{ca}: has no ca.key to sign a list. Name a certificate to revoke.")
    for path in ([ca / FILE] if names else []) + ([signed] if signed is not None else []):
        until = f", valid for {days} days" if path == signed else ""
        click.echo(f"{path}: copy it next to ca.pem at the server and every party{until}")


@certs.command()
@click.argument("file", type=_FILE)
def show(file: Path) -> None:
    """Show the name, issuer and validity of a certificate.

    FILE is a certificate or a request.

    \b
    Example:
      vfl certs show certs/bank.pem
    """
    from vfl.certs.authority import describe

    for label, text in describe(file):
        click.echo(f"{label + ':':<13}{text}")
