"""A worker without torch: staged as ``trainer/__main__.py`` on a host, it is launched, told and lost as a real one.

``behaviour.json`` in its host's folder says what it does out of the ordinary.
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


class StandIn:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.pipe, self.period = int(os.environ["RANK"]), options.pipe, options.heartbeat
        self.lock = threading.Lock()
        self.behaviour: dict[str, Any] = json.loads((options.host / "behaviour.json").read_text())
        kept = options.host / "events" / f"generation-{options.generation}-shard-{self.rank}.jsonl"
        kept.parent.mkdir(exist_ok=True)
        self.kept = kept.open("ab", buffering=0)

    def say(self, event: str, **fields: Any) -> None:
        body = {"event": event, "at": time.monotonic(), "time": "2000-01-01T00:00:00.000Z", **fields}
        with self.lock:
            line = json.dumps(body).encode() + b"\n"
            self.kept.write(line)
            if event not in self.behaviour.get("keeps to itself", ()):
                os.write(self.pipe, line)

    def beat(self) -> None:
        while True:
            self.say("heartbeat", number=1)
            time.sleep(self.period / 10)

    def run(self) -> None:
        self.say("alive", pid=os.getpid())
        threading.Thread(target=self.beat, daemon=True).start()
        if self.behaviour.get("dies before joining"):
            sys.exit("cannot find something\nand gives up")
        if self.behaviour.get("child"):
            self.leave_a_child()
        if self.rank == 0:
            self.say("listening", port=1)
        else:
            assert json.loads(sys.stdin.readline())["order"] == "join"
        found = {"binding": {}, "fenced": True, "parameters": 0, "staged_sources": True, "tensors": []}
        self.say("joined", shard=self.rank, environment=dict(os.environ), **found)
        for line in sys.stdin:
            order = json.loads(line)
            getattr(self, order["order"])(order["with"])

    def leave_a_child(self) -> None:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(self.pipe)
            time.sleep(600)
        self.say("child", pid=child)

    def start(self, given: dict[str, Any]) -> None:
        if self.behaviour.get("garbage"):
            os.write(self.pipe, self.behaviour["garbage"].encode() + b"\n")
        if self.behaviour.get("never starts"):
            return
        self.say("started")

    def train(self, given: dict[str, Any]) -> None:
        hold = given["hold"]
        for update in range(given["first"], given["last"] + 1):
            if hold and update == hold["update"]:
                self.last_update(hold)
            self.update(update)
        self.say("trained")

    def update(self, update: int) -> None:
        other = self.behaviour.get("another loss in") == update
        exact = {name: (0.5).hex() for name in ("norm", "coef", "denominator", "rate")}
        exact["loss"] = (update + 2.0**-50 * other).hex()
        self.say(
            "update", update=update, exact=exact, loss=1.0, norm=1.0, sent_bytes=1, received_bytes=1, ms=1.0, state={}
        )

    def last_update(self, hold: dict[str, Any]) -> None:
        update = hold["update"]
        if self.behaviour.get("finishes"):
            self.update(update)
        self.say("op", update=update, microbatch=0, kind="forward")
        if self.rank == hold["shard"]:
            if self.behaviour.get("goes on"):
                self.say("op", update=update, microbatch=0, kind="backward")
            if self.behaviour.get("misses the fault point"):
                return
            self.say("fault_point", update=update, microbatch=0)
            time.sleep(60)
            self.say("error", type="HoldExpired", message="nothing happened")
            os._exit(18)
        time.sleep(self.behaviour.get("notices after", 0.2))
        self.say("error", type="PeerLostError", message="connection reset")
        os._exit(17)

    def save(self, given: dict[str, Any]) -> None:
        how = self.behaviour.get("save")
        if how == "raises":
            self.say("error", type="NoSpaceError", message="the disk is full")
            os._exit(8)
        if how == "never ends":
            return
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        self.say("saved", step=given["step"], ms=1.0, receipt="")

    def close(self, given: dict[str, Any]) -> None:
        self.say("closed", peak_rss=1)
        if self.behaviour.get("stays"):
            time.sleep(60)
        os._exit(self.behaviour.get("exit", 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--host", type=Path)
    parser.add_argument("--generation", type=int)
    parser.add_argument("--pipe", type=int)
    parser.add_argument("--heartbeat", type=float)
    StandIn(parser.parse_known_args()[0]).run()
