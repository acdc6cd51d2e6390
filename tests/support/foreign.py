"""Stand-ins for programs that are not everywhere: as much of ``aws`` and ``b3sum`` as docs/remote.md uses of them.

``python -m tests.support.foreign aws s3 sync …``. They share no line with the store: boto3 and blake3 alone.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def b3sum(arguments: list[str]) -> int:
    """``b3sum --check --quiet`` of lines on stdin: a digest, two spaces, a file."""
    from blake3 import blake3

    assert arguments == ["--check", "--quiet"], arguments
    failed = 0
    for line in sys.stdin:
        digest, _, name = line.rstrip("\n").partition("  ")
        if blake3(Path(name).read_bytes()).hexdigest() != digest:
            print(f"{name}: FAILED")
            failed += 1
    return failed > 0


def aws(arguments: list[str]) -> int:
    """``aws s3 mb``, ``aws s3 sync`` and any operation of ``aws s3api``."""
    import boto3
    from botocore.config import Config

    with closing(boto3.client("s3", config=Config(s3={"addressing_style": "path"}))) as client:
        match arguments:
            case ["s3", "mb", url]:
                client.create_bucket(Bucket=urlsplit(url).netloc)
            case ["s3", "sync", "--only-show-errors", source, target, *excludes]:
                assert set(excludes[::2]) <= {"--exclude"}
                _sync(client, source, target, excludes[1::2])
            case ["s3api", operation, *options]:
                parameters = {
                    _camel(name): _value(text) for name, text in zip(options[::2], options[1::2], strict=True)
                }
                answer = getattr(client, operation.replace("-", "_"))(**parameters)
                del answer["ResponseMetadata"]
                if answer:
                    print(json.dumps(answer, default=str, indent=4))
            case _:
                raise SystemExit(f"aws: not known here: {arguments}")
    return 0


def _sync(client: Any, source: str, target: str, excludes: list[str]) -> None:
    """Copy what is not there or has another size, in the order in which it is found."""
    if source.startswith("s3://"):
        bucket, prefix = _place(source)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                path = Path(target, item["Key"].removeprefix(prefix))
                if not path.exists() or path.stat().st_size != item["Size"]:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    client.download_file(bucket, item["Key"], str(path))
        return
    bucket, prefix = _place(target)
    for path in sorted(Path(source).rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in excludes):
            client.upload_file(str(path), bucket, prefix + name)


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, f"{parts.path.strip('/')}/"


def _camel(option: str) -> str:
    return "".join(part.capitalize() for part in option.removeprefix("--").split("-"))


def _value(text: str) -> Any:
    """A file's JSON, pairs as ``Status=Enabled``, or the text itself."""
    if text.startswith("file://"):
        return json.loads(Path(text.removeprefix("file://")).read_bytes())
    pairs = re.fullmatch(r"(\w+)=([\w-]+)", text)
    return {pairs[1]: pairs[2]} if pairs else text


if __name__ == "__main__":
    raise SystemExit({"aws": aws, "b3sum": b3sum}[sys.argv[1]](sys.argv[2:]))
