"""Listings of a bucket below an address's prefix: keys page by page, and hints about many keys in few requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ckptstore.backends.protocol import Stat, check_key
from ckptstore.backends.s3.address import S3Address
from ckptstore.backends.s3.failures import TryAgainError
from ckptstore.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

QUARANTINE = "quarantine"

_KEYS_PER_LISTING = 20  # a listing is worth one request for so many keys that need not be asked for alone


class Call(Protocol):
    """Does one operation with a client, with patience and with errors of ours."""

    def __call__(self, what: str, work: Callable[[S3Client], Any], /) -> Any:
        """What ``work`` returns."""
        ...


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a listing, and whether more follow."""

    stats: list[Stat]
    is_last: bool


class Listings:
    """What a bucket lists below an address's prefix."""

    def __init__(self, address: S3Address, call: Call) -> None:
        self._address = address
        self._call = call

    def pages(self, prefix: str) -> Iterator[Page]:
        """All keys below ``prefix`` in the server's order, without what was put aside.

        Raises:
            CorruptError: something there has no legal key as its name.
        """
        token: dict[str, Any] = {}
        while True:
            answer = self._page(prefix, token)
            is_last = not answer.get("IsTruncated")
            yield Page([stat for item in answer.get("Contents", ()) if (stat := self._stat(item))], is_last)
            if is_last:
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def present(self, keys: Collection[str]) -> set[str]:
        """Those of ``keys`` that may be there.

        The folders that hold them are listed, as long as that takes fewer requests than one for 20 keys. Of those
        that a listing did not come to, nothing is known.
        """
        found: set[str] = set()
        folders = _by_folder(keys)
        pages = len(keys) // _KEYS_PER_LISTING + len(folders)
        for folder, wanted in folders.items():
            for page in self.pages(f"{folder}/"):
                pages -= 1
                found |= wanted & {stat.key for stat in page.stats}
                if pages <= 0 and not page.is_last:
                    found |= wanted  # not listed to its end: they may be there
                    break
        return found

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """Sizes of those of ``keys`` that listings come to, as long as a listing comes to 20 of them; of the others
        nothing is known. A hint."""
        found: dict[str, int] = {}
        for folder, wanted in _by_folder(keys).items():
            read = covered = 0
            for page in self.pages(f"{folder}/"):
                seen = {stat.key: stat.size for stat in page.stats if stat.key in wanted}
                found |= seen
                read, covered = read + 1, covered + len(seen)
                if covered < read * _KEYS_PER_LISTING:
                    break  # they lie too thin among others: asking for each is not dearer
        return found

    def versions(self, keys: Collection[str]) -> dict[str, str]:
        """The present version id of each of ``keys`` whose bucket keeps versions; a hint."""
        found: dict[str, str] = {}
        for folder, wanted in _by_folder(keys).items():
            marker: dict[str, str] = {}
            while True:
                answer = self._version_page(f"{folder}/", marker)
                for item in answer.get("Versions", ()):
                    key = item["Key"].removeprefix(self._address.prefix)
                    if item["IsLatest"] and key in wanted and item.get("VersionId", "null") != "null":
                        found[key] = item["VersionId"]
                if not answer.get("IsTruncated"):
                    break
                marker = {"KeyMarker": answer["NextKeyMarker"], "VersionIdMarker": answer["NextVersionIdMarker"]}
        return found

    def _stat(self, item: Any) -> Stat | None:
        """What is listed; None for what was put aside, and for a console's mark of a folder."""
        key = item["Key"].removeprefix(self._address.prefix)
        if key.partition("/")[0] == QUARANTINE or (key.endswith("/") and not item["Size"]):
            return None
        try:
            return Stat(check_key(key), item["Size"])
        except UsageError as error:
            hint = "move it out of the store's prefix"
            raise CorruptError(f"{self._address.url}: {key!r:.200}", "not the name of a key", hint) from error

    def _page(self, prefix: str, token: dict[str, Any]) -> Any:
        def work(client: S3Client) -> Any:
            answer: Any = client.list_objects_v2(**self._where(prefix), **token)
            if "IsTruncated" not in answer or (answer["IsTruncated"] and not answer.get("NextContinuationToken")):
                raise TryAgainError("no listing")  # an error in an answer that says 200
            return answer

        return self._call(f"listing {prefix or 'all keys'}", work)

    def _version_page(self, prefix: str, marker: Any) -> Any:
        def work(client: S3Client) -> Any:
            answer: Any = client.list_object_versions(**self._where(prefix), **marker)
            if "IsTruncated" not in answer:
                raise TryAgainError("no listing")
            return answer

        return self._call(f"listing versions of {prefix}", work)

    def _where(self, prefix: str) -> dict[str, Any]:
        return {"Bucket": self._address.bucket, "Prefix": self._address.prefix + prefix, **self._address.owner}


def _by_folder(keys: Collection[str]) -> dict[str, set[str]]:
    """``keys`` by their first component, sorted by that."""
    found: dict[str, set[str]] = {}
    for key in sorted(keys):
        found.setdefault(key.partition("/")[0], set()).add(key)
    return found
