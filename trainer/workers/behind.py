"""One piece of work at a time beside a worker's main thread, whose failure the main thread gets to know."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Behind:
    """Does one job at a time in a thread of its own. Whoever asks for the next waits until the last one is done."""

    def __init__(self, name: str) -> None:
        """``name`` is that of the thread."""
        self._name = name
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def do(self, job: Callable[[], object]) -> None:
        """Begin ``job`` once the one before is done. Raises what went wrong in that one, and then does not begin."""
        self.wait()
        self._thread = Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong so far and was not raised yet; does not wait."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait until nothing is under way. Raises as :meth:`check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._failure = error
