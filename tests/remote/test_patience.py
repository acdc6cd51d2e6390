"""Retries: growing random pauses, each attempt and all of them within a deadline (B074)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, SSLError

from ckptstore.backends.deadline import deadline
from ckptstore.backends.s3.failures import is_transient, translated
from ckptstore.backends.s3.patience import Patience
from ckptstore.errors import BackendError, CkptStoreError, UsageError
from ckptstore.threads import in_threads


class Clock:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


def answer(status: int, code: str = "") -> ClientError:
    error = {"Error": {"Code": code}} if code else {}
    return ClientError({**error, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[arg-type]


def failing(times: int, error: Exception, result: str = "done") -> Callable[[], str]:
    left = iter([error] * times)

    def work() -> str:
        for failure in left:
            raise failure
        return result

    return work


def patient(clock: Clock, operation: float = 300.0) -> Patience:
    return Patience(60.0, operation, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize(
    "error",
    [
        answer(503, "SlowDown"),
        answer(503),
        answer(429),
        answer(500, "InternalError"),
        answer(400, "RequestTimeout"),
        answer(400, "BadDigest"),
        answer(409, "ConditionalRequestConflict"),
        answer(200, "InternalError"),
        EndpointConnectionError(endpoint_url="http://x"),
        ConnectTimeoutError(endpoint_url="http://x"),
        ConnectionResetError(104, "reset"),
    ],
    ids=str,
)
def test_eight_failures_that_pass_are_ridden_out(error: Exception) -> None:
    clock = Clock()
    assert patient(clock).call("put", failing(8, error)) == "done"
    assert clock.now - 1000 <= 0.1 * (2**8 - 1)


def test_pauses_grow_to_a_limit_and_no_two_clients_take_the_same() -> None:
    totals = []
    for _ in range(8):
        clock = Clock()
        with pytest.raises(ClientError):
            patient(clock, 200.0).call("put", failing(10_000, answer(503, "SlowDown")))
        assert 0 < clock.now - 1000 <= 200.0
        assert max(clock.pauses) <= 0.2 + 1e-9  # slept in slices, so that giving up is noticed
        totals.append(tuple(clock.pauses))
    assert len(set(totals)) == len(totals)


def test_the_state_of_the_process_s_random_generator_is_not_touched() -> None:
    """It is part of a checkpoint: a slow network must not change a root."""
    before = random.getstate()
    patient(Clock()).call("put", failing(20, answer(503)))
    assert random.getstate() == before


@pytest.mark.parametrize(
    "error",
    [
        answer(403, "AccessDenied"),
        answer(404, "NoSuchKey"),
        answer(412, "PreconditionFailed"),
        answer(501, "NotImplemented"),
        answer(403, "InvalidObjectState"),
        answer(403, "RequestTimeTooSkewed"),
        SSLError(endpoint_url="https://x", error="CERTIFICATE_VERIFY_FAILED"),
        ValueError("a bug"),
    ],
    ids=str,
)
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    clock = Clock()
    with pytest.raises(type(error)):
        patient(clock).call("put", failing(1, error))
    assert clock.pauses == []
    assert not is_transient(error)


def test_an_attempt_that_hangs_is_left_alone_and_the_next_one_counts() -> None:
    hung = threading.Event()
    calls: list[int] = []

    def work() -> str:
        calls.append(1)
        if len(calls) == 1:
            hung.wait(20)
        return f"attempt {len(calls)}"

    assert Patience(0.2, 10.0).call("get", work) == "attempt 2"
    hung.set()


def test_an_outer_deadline_ends_pauses_and_attempts() -> None:
    hung = threading.Event()
    for work in (failing(10_000, answer(503)), lambda: str(hung.wait(20))):
        began = time.monotonic()
        with pytest.raises(BackendError, match=r"not done within the deadline of 0\.5 s"), deadline(0.5):
            Patience(60.0, 300.0).call("get", work)
        assert time.monotonic() - began < 15
    hung.set()


def test_work_in_threads_keeps_its_deadline_and_is_given_up_with_the_first_failure() -> None:
    """Or a Ctrl-C would wait for every request that is under way."""
    hung = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            raise ValueError("broken")
        return Patience(60.0, 300.0).call("get", lambda: int(hung.wait(30)))

    began = time.monotonic()
    with pytest.raises(ValueError, match="broken"):
        list(in_threads(work, range(8), 4))
    with pytest.raises(BackendError, match="deadline"), deadline(0.3):
        list(in_threads(work, range(1, 8), 4))
    assert time.monotonic() - began < 20
    hung.set()


def test_threads_stop_between_items_when_their_time_is_over() -> None:
    done: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            time.sleep(0.01)
            yield number

    with pytest.raises(BackendError, match="deadline"), deadline(0.2):
        done.extend(in_threads(lambda item: item, items(), 2))
    assert 0 < len(done) < 1000


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_is_a_time_to_come(seconds: float) -> None:
    with pytest.raises(UsageError), deadline(seconds):
        pass


@pytest.mark.parametrize(
    ("error", "writing", "code"),
    [
        (answer(403, "AccessDenied"), True, "read-only"),
        (answer(403, "AccessDenied"), False, "backend"),
        (answer(404, "NoSuchBucket"), True, "missing"),
        (answer(404, "NoSuchKey"), False, "missing"),
        (answer(403, "InvalidObjectState"), False, "refused"),
        (answer(507, "InsufficientStorage"), True, "no-space"),
        (answer(403, "QuotaExceeded"), True, "no-space"),
        (answer(400, "ExpiredToken"), False, "backend"),
        (answer(403, "RequestTimeTooSkewed"), False, "backend"),
        (answer(503, "SlowDown"), True, "backend"),
        (RuntimeError("odd"), True, "backend"),
    ],
    ids=str,
)
def test_every_failure_is_an_error_of_ours_that_says_what_to_do(error: Exception, writing: bool, code: str) -> None:
    ours = translated(error, "writing key k", "s3://bucket", writing=writing)
    assert isinstance(ours, CkptStoreError)
    assert ours.code == code
    assert ours.what == "writing key k"
    assert ours.why
    assert ours.hint
