"""Readback behind: a checkpoint that is durable on this machine is read from its medium while the training goes on."""

from __future__ import annotations

import math
import time
from functools import partial

from ckptstore.backends import deadline
from ckptstore.errors import BackendError
from ckptstore.findings import raise_finding
from ckptstore.format.digest import Digest
from ckptstore.running.background import Background
from ckptstore.running.untold import Untold
from ckptstore.store import Store
from ckptstore.verify import verify


class ReadbackBehind:
    """Reads the checkpoints of a run back, one after the other, and leaves a receipt about each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = Background("ckptstore-readback")
        self._untold = Untold()

    def read(self, root: Digest) -> None:
        """Read ``root`` back in the background; what this process has read back before is not read again."""
        self._thread.do(partial(self._read, root))

    def wait(self) -> bool:
        """Wait until all is read; False if the caller's own time is over before."""
        return self._thread.wait()

    def give_up(self) -> None:
        """End as soon as possible, and return when that is done."""
        self._thread.give_up()
        self._thread.wait()

    def failures(self) -> list[BaseException]:
        """What went wrong and was not told yet; it is told now."""
        return self._untold.take()

    def _read(self, root: Digest) -> None:
        store = self._store
        try:
            before = store.objects.keys_read_back()
            report = verify(store.backend, root, skip=before)
            for finding in report.findings:
                store.objects.forget(finding.key)
            if report.findings:
                raise_finding(report.findings[0])
            now = time.monotonic()
            moments = [store.objects.read_back_at(key) for key in report.keys if key in before]
            oldest = min((moment for moment in moments if moment is not None), default=now)
            for key in report.keys:
                if key not in before:
                    store.objects.note_read_back(key)
            age = math.ceil(now - oldest)
            store.add_receipt(report.receipt(store.url, max_age_seconds=age))
        except BaseException as error:  # told in the thread that trains
            hint = f"ckpt verify {root.hex} reads it back"
            given_up = BackendError(f"readback of checkpoint {root.short}", "given up", hint)
            self._untold.add(given_up if deadline.remaining() == 0.0 else error)
