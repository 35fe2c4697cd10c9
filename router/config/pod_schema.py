"""The frozen models of the credentials in `pods[]` of `config/router.yaml`."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from router.config.load import FilePath, Strict
from router.types import PodTls


class PodAuth(Strict):
    """The router's own credentials at a pod. Clients' are not forwarded, see `edge.forward_headers`."""

    bearer_file: FilePath | None = None
    """A file with the pod's API key, sent as `authorization: Bearer KEY` with each request of the router to the pod.
    It is read again when it changes."""
    bearer_env: str | None = None
    """An environment variable with the key, instead of a file."""

    @model_validator(mode="after")
    def _one_source(self) -> PodAuth:
        if bool(self.bearer_file) == bool(self.bearer_env):
            raise ValueError("needs either `bearer_file` or `bearer_env`")
        return self


class PodTlsFiles(Strict):
    """TLS to a pod whose URL begins with https. The files are read again when they change."""

    ca_file: FilePath | None = None
    """The certificate of the authority that signed the pod's, in PEM. Default: the system's authorities."""
    cert_file: FilePath | None = None
    """The router's own certificate, for pods that ask for one."""
    key_file: FilePath | None = None
    """The key of `cert_file`, without a password. Default: it is in `cert_file`."""

    @model_validator(mode="after")
    def _a_key_needs_its_certificate(self) -> PodTlsFiles:
        if self.key_file and not self.cert_file:
            raise ValueError("`key_file` needs `cert_file`")
        return self


def credential_fields(auth: PodAuth | None, tls: PodTlsFiles | None) -> dict[str, Any]:
    """The fields of a `Pod` with these credentials."""
    fields = auth.model_dump(exclude_none=True) if auth else {}
    return {**fields, "tls": PodTls(**tls.model_dump(exclude_none=True))} if tls else fields
