"""The S3 server that a run leaves behind: its data, keys and addresses in one folder, so that it can be started again.

Keys are in one file there that only its owner can read, in the form that boto3 and every AWS tool know, and nowhere
else: what is printed, stored or packed names that file and a profile in it.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ckptstore.errors import BackendError, MalformedError, NotFoundError
from trainer.lifecycle.ports import LOOPBACK
from trainer.lifecycle.s3client import REGION, Credentials
from trainer.lifecycle.s3server import Kept, S3Server

CREDENTIALS, ADDRESS = "credentials", "server.json"
"""Names of the two files in a server's folder: its keys, and the ports that it listens on."""

OPERATOR, HOST = "lifecycle-operator", "lifecycle-host"
"""Profiles in the file of keys: who may do everything, and who may read and list."""

BUCKET, PREFIX = "operator", "lifecycle"

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def keep(server: S3Server) -> None:
    """Write the keys and addresses of a running server into its folder."""
    kept = server.kept
    text = "# Keys to the S3 server in this folder, and to nothing else.\n"
    for profile, identity in ((OPERATOR, kept.admin), (HOST, kept.reader)):
        text += f"[{profile}]\naws_access_key_id = {identity.access_key}\n"
        text += f"aws_secret_access_key = {identity.secret_key}\n"
    path = server.folder / CREDENTIALS
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    (server.folder / ADDRESS).write_text(json.dumps({"ports": kept.ports}) + "\n")


def kept_server(folder: Path) -> S3Server:
    """The server whose data, keys and addresses are in ``folder``, not started yet.

    Raises:
        NotFoundError: there are none, or the server's program is not installed.
        MalformedError: the files in it are not those of :func:`keep`.
    """
    what = f"S3 server in {folder}"
    keys = configparser.RawConfigParser()
    try:
        keys.read_string((folder / CREDENTIALS).read_text(), CREDENTIALS)
        ports = json.loads((folder / ADDRESS).read_text())["ports"]
        admin, reader = (
            Credentials(keys[profile]["aws_access_key_id"], keys[profile]["aws_secret_access_key"])
            for profile in (OPERATOR, HOST)
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        why = f"there is no {Path(error.filename).name}"
        raise NotFoundError(what, why, "name the folder s3 of a run that was made with --operator s3") from None
    except (configparser.Error, ValueError, LookupError, TypeError) as error:
        # No text of the error: it may quote a line with a key.
        raise MalformedError(what, f"{CREDENTIALS} or {ADDRESS} is damaged ({type(error).__name__})") from None
    if not (isinstance(ports, list) and len(ports) == 6 and all(type(port) is int for port in ports)):
        raise MalformedError(what, f"{ADDRESS} does not name six ports")
    return S3Server(folder, kept=Kept(admin, reader, tuple(ports)))


def store_url(server: S3Server, profile: str | None = OPERATOR, endpoint: str | None = None) -> str:
    """URL of the operator's store in a server that runs; it names a profile and holds no key.

    ``endpoint`` is where the server is reached if not at its own address.
    """
    options = {"endpoint_url": endpoint or server.endpoint, "region": REGION, "profile": profile}
    query = "&".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"s3://{BUCKET}/{PREFIX}?{query}"


def environment(folder: Path) -> dict[str, str]:
    """Variables under which :func:`store_url` leads a client to its keys, and past what else the machine has."""
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(folder.absolute() / CREDENTIALS),
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        **without_proxy(os.environ, LOOPBACK),
    }


def without_proxy(present: Mapping[str, str], address: str) -> dict[str, str]:
    """Variables that keep requests to ``address`` off a proxy, if ``present`` names one."""
    if not any(present.get(name) for name in _PROXIES):
        return {}
    names = {name: present.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    return {
        name: value if value == "*" or address in value.split(",") else f"{value},{address}".lstrip(",")
        for name, value in names.items()
    }


def serve(folder: Path, stream: TextIO) -> None:
    """Start the server of a folder again, say how it is reached, and stay until Ctrl-C or SIGTERM.

    Raises:
        BackendError: it ended by itself.
        NotFoundError, MalformedError: as :func:`kept_server`.
    """
    server = kept_server(folder)
    try:
        with server:
            for line in ("# the S3 server runs until Ctrl-C; in another terminal:", *exports(server)):
                print(line, file=stream, flush=True)
            while server.running:
                time.sleep(0.2)
            raise BackendError(f"S3 server in {folder}", "ended by itself", f"see {server.folder / 'weed.log'}")
    except KeyboardInterrupt:
        print("# stopped; its data stay", file=stream, flush=True)


def exports(server: S3Server) -> list[str]:
    """Lines for a shell, after which ``ckpt`` and every AWS tool find a server that runs, and its keys."""
    lines = [f"unset {' '.join(found)}"] if (found := [name for name in _KEYS if name in os.environ]) else []
    variables = {
        **environment(server.folder),
        "AWS_PROFILE": OPERATOR,
        "AWS_ENDPOINT_URL_S3": server.endpoint,
        "AWS_REGION": REGION,
        "CKPT_STORE": store_url(server),
    }
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
