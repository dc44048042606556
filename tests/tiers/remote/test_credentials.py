# SPDX-License-Identifier: Apache-2.0
"""What a client shows comes from files, is read anew, and is in no message of an error."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import pytest
import trustme

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.credentials import Credentials


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A token, a certificate with its key, and who signed it."""
    authority = trustme.CA()
    issued = authority.issue_cert("client.example")
    paths = {name: tmp_path / name for name in ("token_file", "ca_file", "cert_file", "key_file")}
    paths["token_file"].write_text("a token of some length\n")
    authority.cert_pem.write_to_path(paths["ca_file"])
    issued.cert_chain_pems[0].write_to_path(paths["cert_file"])
    issued.private_key_pem.write_to_path(paths["key_file"])
    for path in paths.values():
        path.chmod(0o600)
    return paths


def test_nothing_is_shown_unless_named() -> None:
    nothing = Credentials()
    nothing.check_files()
    assert nothing.metadata() == ()
    assert nothing.context().verify_mode is ssl.CERT_REQUIRED
    assert isinstance(nothing.grpc(), grpc.ChannelCredentials)


def test_everything_from_files(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(**files)
    credentials.check_files()
    assert credentials.metadata() == (("authorization", "Bearer a token of some length"),)
    context = credentials.context()
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == 1
    assert isinstance(credentials.grpc(), grpc.ChannelCredentials)
    assert not caplog.records


def test_a_renewed_token_is_used_at_once(files: dict[str, Path]) -> None:
    credentials = Credentials(**files)
    files["token_file"].write_text("another token")
    assert credentials.metadata() == (("authorization", "Bearer another token"),)


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"two\nlines", b"\xff\xfe", b"tab\there", b"n\0l"]
)
def test_a_file_without_a_token(files: dict[str, Path], content: bytes) -> None:
    files["token_file"].write_bytes(content)
    with pytest.raises(
        TierConfigError, match="holds no token: one line of ASCII is expected"
    ) as no:
        Credentials(**files).metadata()
    assert "two" not in str(no.value)


@pytest.mark.parametrize("name", ["token_file", "ca_file", "cert_file", "key_file"])
def test_a_file_that_is_not_there(files: dict[str, Path], name: str) -> None:
    files[name].unlink()
    with pytest.raises(TierConfigError, match=f"{name} cannot be read: No such file"):
        Credentials(**files).check_files()


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_a_file_that_is_no_pem(files: dict[str, Path], name: str) -> None:
    files[name].write_text("not a certificate")
    with pytest.raises(
        TierConfigError, match=r"the files for TLS cannot be used .*PEM is expected"
    ):
        Credentials(**files).context()


def test_a_key_of_another_certificate(files: dict[str, Path]) -> None:
    trustme.CA().issue_cert("other").private_key_pem.write_to_path(files["key_file"])
    with pytest.raises(TierConfigError, match="the files for TLS cannot be used"):
        Credentials(**files).context()


@pytest.mark.parametrize("name", ["token_file", "key_file"])
def test_secrets_that_others_can_read(
    files: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    files[name].chmod(0o640)
    Credentials(**files).check_files()
    (record,) = caplog.records
    assert "can be read by other users; `chmod 600` it" in record.getMessage()


def test_half_a_certificate(files: dict[str, Path]) -> None:
    for name in ("cert_file", "key_file"):
        with pytest.raises(TierConfigError, match="two files, the certificate and its key"):
            Credentials(**{name: files[name]})


def test_what_is_printed_holds_no_secret(files: dict[str, Path]) -> None:
    assert "a token of some length" not in repr(Credentials(**files))
