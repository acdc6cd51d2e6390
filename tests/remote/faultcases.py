"""The faults of the fault matrix, and what becomes of each operation under each of them.

``python -m tests.remote.faultcases`` writes them into docs/remote-faults.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.remote.faultworld import LEFT_OUT, OPERATIONS, Operation
from tests.support.faultactions import (
    Action,
    Blackhole,
    Dribble,
    GoDown,
    LostAnswer,
    Overlong,
    ResetRequest,
    ResetResponse,
    Stall,
    Truncate,
    Twice,
)
from tests.support.faultanswers import (
    HeadSaysAbsent,
    HeadSaysPresent,
    HeadSaysSize,
    ListingWithout,
    OwnEtags,
    PageSize,
    ReverseListing,
    Stale,
    Status,
    StorageClass,
)
from tests.support.faultbytes import (
    ContentEncoding,
    FlipRequest,
    FlipResponse,
    ForgetChecksums,
    OtherBody,
    StoreFraming,
)
from tests.support.http1 import Request, Response

ANY = frozenset({"get", "list", "head", "put", "delete"})
GET = frozenset({"get"})
LIST = frozenset({"list"})
HEAD = frozenset({"head"})
PUT = frozenset({"put"})
READ = GET | LIST


@dataclass
class RepeatEntries(Action):
    """The keys of each page of a listing come twice."""

    def response(self, request: Request, response: Response) -> Response:
        if "list-type" not in request.query or response.status != 200:
            return response
        entries = re.findall(rb"<Contents>.*?</Contents>", response.body, re.DOTALL)
        return response.with_body(response.body.replace(b"".join(entries), b"".join(entries * 2)))


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Args:
        action: what the proxy does.
        strikes: the kinds of requests that it does it to.
        hangs: the client notices only when its time for an attempt is over.
        passing: exit codes where it is not 0 under a fault that passes, by operation ("" for all others).
        lasting: exit codes under one that lasts, by operation.
        spoils: operations that leave behind a key under a name that says nothing of its content, with wrong bytes:
            the same command does not get over that, whoever comes later.
        times: how many requests a fault that passes strikes.
    """

    action: Callable[[], Action]
    strikes: frozenset[str] = ANY
    hangs: bool = False
    passing: Mapping[str, int] = field(default_factory=dict)
    lasting: Mapping[str, int] = field(default_factory=lambda: {"": 7})
    spoils: frozenset[str] = frozenset()
    times: int = 2

    def code(self, operation: str, *, lasts: bool) -> int:
        """The exit code that the operation ends with."""
        codes = self.lasting if lasts else self.passing
        return codes.get(operation, codes.get("", 0))


_WRONG = {"": 3, "init": 9, "open": 9, "receipts": LEFT_OUT}
_ARCHIVED = {"": 5, "save": 6}
_ABSENT = {"verify": 4, "push": 4, "save": 4}
_HIDDEN = {"receipts": LEFT_OUT}
_SPOILED = {**_WRONG, "save": 0}
_FINE: dict[str, int] = {}
_RECORDS = frozenset({"init", "move ref", "receipts"})

FAULTS: dict[str, Fault] = {
    "reset before the request's body": Fault(ResetRequest),
    "reset in the request's body": Fault(lambda: ResetRequest(40), PUT),
    "reset before the answer, the work done": Fault(LostAnswer),
    "no answer, the work done": Fault(lambda: LostAnswer(hang=True), hangs=True),
    "reset in the answer's body": Fault(lambda: ResetResponse(20), READ),
    "request vanishes": Fault(Blackhole, hangs=True),
    "answer stalls": Fault(lambda: Stall(20), READ, hangs=True),
    "body drips": Fault(lambda: Dribble(4, 0.2), READ, hangs=True),
    "head drips": Fault(lambda: Dribble(4, 0.2, head=True), hangs=True),
    "endpoint is away": Fault(lambda: GoDown(0.5)),
    "body ends early": Fault(lambda: Truncate(20), READ),
    "body ends early, no length": Fault(lambda: Truncate(20, declared=False), GET, lasting=_WRONG),
    "body too long": Fault(Overlong, GET, lasting=_WRONG),
    "body too long, no length": Fault(lambda: Overlong(declared="none"), GET, lasting=_WRONG),
    "length too long": Fault(lambda: Overlong(declared="only"), READ),
    "500": Fault(lambda: Status(500, "InternalError")),
    "503 SlowDown": Fault(lambda: Status(503, "SlowDown")),
    "503 without a body": Fault(lambda: Status(503)),
    "429": Fault(lambda: Status(429, "TooManyRequests")),
    "200 with an error, listing": Fault(lambda: Status(200, "InternalError"), LIST),
    "200 with an error, reading": Fault(lambda: Status(200, "InternalError"), GET, lasting=_WRONG),
    "200 with an error, writing": Fault(lambda: Status(200, "InternalError"), PUT),
    "403 AccessDenied": Fault(lambda: Status(403, "AccessDenied"), passing={"": 7}),
    "400 ExpiredToken": Fault(lambda: Status(400, "ExpiredToken"), times=1),
    "403 RequestTimeTooSkewed": Fault(lambda: Status(403, "RequestTimeTooSkewed"), passing={"": 7}),
    "301 PermanentRedirect": Fault(lambda: Status(301, "PermanentRedirect"), passing={"": 7}),
    "404 NoSuchBucket": Fault(lambda: Status(404, "NoSuchBucket"), READ | PUT, passing={"": 4}, lasting={"": 4}),
    "507 InsufficientStorage": Fault(lambda: Status(507, "InsufficientStorage"), PUT, passing={"": 8}, lasting={"": 8}),
    "archived object": Fault(StorageClass, GET, passing=_ARCHIVED, lasting=_ARCHIVED),
    "bit flips on the way down": Fault(lambda: FlipResponse(30), GET, lasting=_WRONG),
    "bit flips on the way up": Fault(
        lambda: FlipRequest(30, unnoticed=True), PUT, passing=_SPOILED, lasting=_WRONG, spoils=_RECORDS
    ),
    "other bytes": Fault(lambda: OtherBody(b"somebody else's bytes"), GET, lasting=_WRONG),
    "framing stored": Fault(StoreFraming, PUT, passing=_SPOILED, lasting=_WRONG, spoils=_RECORDS),
    "compressed on the way": Fault(ContentEncoding, GET, lasting=_WRONG),
    "compressed, not said": Fault(lambda: ContentEncoding(header=False), GET, lasting=_WRONG),
    "said to be compressed": Fault(lambda: ContentEncoding(body=False), READ, lasting=_FINE),
    "listing compressed": Fault(ContentEncoding, LIST),
    "stale reads": Fault(Stale, lasting={"init": 4}),
    "HEAD: nothing is there": Fault(HeadSaysAbsent, HEAD, passing=_ABSENT, lasting=_ABSENT),
    "HEAD: all is there": Fault(HeadSaysPresent, HEAD, lasting=_FINE),
    "HEAD: other size": Fault(HeadSaysSize, HEAD, lasting=_FINE),
    "listing lacks keys": Fault(
        lambda: ListingWithout("(objects|documents|refs|receipts)/"), LIST, passing=_HIDDEN, lasting=_HIDDEN
    ),
    "listing in reverse": Fault(ReverseListing, LIST, lasting=_FINE),
    "listing repeats keys": Fault(RepeatEntries, LIST, lasting=_FINE),
    "small pages": Fault(lambda: PageSize(2), LIST, lasting=_FINE),
    "random ETags": Fault(OwnEtags, lasting=_FINE),
    "checksums forgotten": Fault(ForgetChecksums, lasting=_FINE),
    "PUT done twice": Fault(Twice, PUT, lasting=_FINE),
}


def table() -> str:
    """All of it in Markdown: a row for each fault, a column for each operation."""
    head = ["fault", *OPERATIONS]
    rows = [
        [name, *(_shown(fault, operation, does) for operation, does in OPERATIONS.items())]
        for name, fault in FAULTS.items()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def _shown(fault: Fault, operation: str, does: Operation) -> str:
    """Exit codes of one cell: under the fault that passes, and under the one that lasts."""
    if not fault.strikes & does.uses:
        return "–"
    codes = [fault.code(operation, lasts=lasts) for lasts in (False, True)]
    told = " · ".join("left out" if code == LEFT_OUT else str(code) for code in codes)
    return f"{told} †" if operation in fault.spoils else told


def written(page: str) -> str:
    """``page`` with the present table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


PAGE = Path(__file__).parents[2] / "docs" / "remote-faults.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
