"""A worker without torch whose state remembers every update: each is a hash of the state before and its number.

Staged as ``trainer/__main__.py`` on a host, with the project's folder written into it, it saves and restores real
shards by a real store. So an update that is left out, made twice, or made on another state ends in another root. What
else a host runs is the real trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROJECT = ""
STATE = 2 * 2**18  # bytes: an object of its own


class Chain:
    """One worker from joining to leaving."""

    def __init__(self, options: argparse.Namespace) -> None:
        from trainer.preparation.prepare import read_plan

        self.rank, self.host, self.pipe = int(os.environ["RANK"]), options.host, options.pipe
        self.identity, self.period = options.identity, options.heartbeat
        self.plan = read_plan(options.host / "plan")
        self.lock = threading.Lock()
        self.state = b""
        self.behind: threading.Thread | None = None
        kept = options.host / "events" / f"generation-{options.generation}-shard-{self.rank}.jsonl"
        kept.parent.mkdir(exist_ok=True)
        self.kept = kept.open("ab", buffering=0)

    def say(self, event: str, **fields: Any) -> None:
        body = {"event": event, "at": time.monotonic(), "time": "2000-01-01T00:00:00.000Z", **fields}
        with self.lock:
            line = json.dumps(body).encode() + b"\n"
            self.kept.write(line)
            os.write(self.pipe, line)

    def beat(self) -> None:
        while True:
            time.sleep(self.period / 4)
            self.say("heartbeat", number=1)

    def run(self) -> None:
        self.say("alive", pid=os.getpid())
        threading.Thread(target=self.beat, daemon=True).start()
        if self.rank == 0:
            self.say("listening", port=1)
        else:
            assert json.loads(sys.stdin.readline())["order"] == "join"
        own = self.plan.owners[self.rank]
        self.say(
            "joined",
            binding={"worker": "chain"},
            fenced=True,
            parameters=own.parameters,
            staged_sources=True,
            tensors=[name for name, _ in own.tensors],
        )
        for line in sys.stdin:
            order = json.loads(line)
            getattr(self, order["order"])(order["with"])

    def start(self, given: dict[str, Any]) -> None:
        self.state = self.hashed(b"start")
        self.say("started")

    def restore(self, given: dict[str, Any]) -> None:
        import ckptstore
        from ckptstore import Digest
        from ckptstore.findings import Place

        store = ckptstore.open(self.host / given["store"])
        view = store.closure(Digest.parse(given["root"]), [self.rank], files=False).shards[self.rank]
        (entry,) = view.tensors()
        self.state = b"".join(store.objects.read(chunk, STATE, Place()) for chunk in entry.chunks)
        self.say("restored")

    def arm(self, given: dict[str, Any]) -> None:
        self.say("armed")

    def train(self, given: dict[str, Any]) -> None:
        for update in range(given["first"], given["last"] + 1):
            time.sleep(0.03)
            self.state = self.hashed(update.to_bytes(4, "little"))
            exact = {name: (0.5).hex() for name in ("norm", "coef", "denominator", "rate")}
            exact["loss"] = float(update).hex()
            fields = {"update": update, "exact": exact, "loss": 1.0, "norm": 1.0, "state": {}, "ms": 1.0}
            self.say("update", sent_bytes=1, received_bytes=1, **fields)
        self.say("trained")

    def save(self, given: dict[str, Any]) -> None:
        self.write(given, self.state)

    def savebehind(self, given: dict[str, Any]) -> None:
        if self.behind is not None:
            self.behind.join()
        self.behind = threading.Thread(target=self.write, args=(given, self.state))
        self.behind.start()
        self.say("snapshot", bytes=len(self.state), ms=1.0)

    def close(self, given: dict[str, Any]) -> None:
        if self.behind is not None:
            self.behind.join()
        self.say("closed", peak_rss=1)
        os._exit(0)

    def write(self, given: dict[str, Any], state: bytes) -> None:
        import ckptstore
        from ckptstore import Attempt, Digest, ShardReceipt
        from ckptstore.format import values
        from ckptstore.format.page import WEIGHT
        from ckptstore.format.progress import Progress
        from ckptstore.write import Contents, TensorBytes, write_contents

        attempt = Attempt.parse(given["attempt"])
        store = ckptstore.open(self.host / given["store"])
        tensor = TensorBytes(f"chain.{self.rank}", WEIGHT, "u8", (STATE,), lambda: [memoryview(state)])
        count = len(self.plan.owners)
        with store.lease(), store.objects.looking():
            written = write_contents(Contents([tensor]), self.rank, count, store.objects)
        receipt = ShardReceipt(
            attempt=attempt.nonce,
            index=self.rank,
            count=count,
            step=given["step"],
            parent=attempt.parent,
            run=Digest.parse(self.identity),
            binding=values.to_json({"worker": "chain"}, "binding"),
            progress=Progress(),
            files=Digest.parse(given["files"]),
            shard=written.digest,
        )
        self.say("saved", step=given["step"], ms=1.0, receipt=receipt.encode().decode())

    def hashed(self, more: bytes) -> bytes:
        from blake3 import blake3

        return blake3(self.state + more + bytes([self.rank])).digest(length=STATE)


if __name__ == "__main__":
    sys.path[:0] = [PROJECT]
    sys.modules.pop("trainer", None)
    if sys.argv[1] != "worker":
        from trainer import commands

        sys.exit(commands.main())
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--host", type=Path)
    parser.add_argument("--identity")
    parser.add_argument("--generation", type=int)
    parser.add_argument("--pipe", type=int)
    parser.add_argument("--heartbeat", type=float)
    known = parser.parse_known_args()[0]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    Chain(known).run()
