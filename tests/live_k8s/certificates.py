"""Makes the certificate of the API server, which an intermediate authority signs, as the installers of clusters do."""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW = "-x509 -config /dev/null -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
AUTHORITY = "-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign"
SERVER = "-addext basicConstraints=CA:FALSE -addext subjectAltName=IP:127.0.0.1,DNS:localhost"


def make_chain(folder: Path) -> None:
    """Write `ca.crt`, the authority that clients get, and `server.crt` and `server.key`: a certificate with that of the
    intermediate authority. Replaces those of before."""
    for name, signer, options in (
        ("ca", "", AUTHORITY),
        ("intermediate", "ca", AUTHORITY),
        ("server", "intermediate", SERVER),
    ):
        sign = f"-CA {signer}.crt -CAkey {signer}.key" if signer else ""
        command = f"openssl req {NEW} {options} -subj /CN=live-{name} {sign} -keyout {name}.key -out {name}.crt"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    server = folder / "server.crt"
    server.write_text(server.read_text() + (folder / "intermediate.crt").read_text())


def make_signing_key(folder: Path) -> None:
    """Write `accounts.key`, which signs tokens of ServiceAccounts."""
    subprocess.run(["openssl", "genrsa", "-out", folder / "accounts.key", "2048"], check=True, capture_output=True)
