"""Certificates for tests: an authority with certificates for servers and clients, and certificates of others."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_SUBJECT = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Authority:
    """Certificate authority of one test, in a folder."""

    folder: Path

    @classmethod
    def found(cls, folder: Path) -> Authority:
        _openssl(folder, "req", "-x509", *_new_key("ca"), "-subj", "/CN=authority", "-days", "2", "-out", "ca.crt")
        return cls(folder)

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def sign(self, name: str) -> tuple[Path, Path]:
        """Create a certificate and a key for a host name of this machine."""
        folder = self.folder
        (folder / "names.cnf").write_text(_SUBJECT)
        _openssl(folder, "req", *_new_key(name), "-subj", f"/CN={name}", "-out", f"{name}.csr")
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names.cnf")
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *authority, "-days", "2", "-out", f"{name}.crt")
        return folder / f"{name}.crt", folder / f"{name}.key"

    def server_options(self) -> tuple[str, ...]:
        """Return the options of a server that has a certificate of this authority, and requires one of every client."""
        certificate, key = self.sign("server")
        own = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
        return (*own, "--tls-ca-cert-file", str(self.certificate), "--tls-auth-clients", "yes")

    def query(self) -> str:
        """Return the query of a URL with the authority and the client's certificate."""
        certificate, key = self.sign("client")
        return f"ssl_ca_certs={self.certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"


def _new_key(name: str) -> tuple[str, ...]:
    return ("-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
