"""The lifecycle with all that surrounds it: journal, report, evidence archive, and what to do next."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from ckptstore.errors import UsageError
from trainer.errors import of_system
from trainer.hosts.backend import PROCESS, Backend
from trainer.hosts.choice import open_hosts
from trainer.lifecycle import report as reporting
from trainer.lifecycle.access import S3, Access, near, reach, server_folder, serving
from trainer.lifecycle.archive import ARCHIVE, pack_run, store_archive
from trainer.lifecycle.expect import NotAsPlannedError, unexpected
from trainer.lifecycle.journal import Journal
from trainer.lifecycle.page import render
from trainer.lifecycle.phases import Lifecycle
from trainer.lifecycle.record import Record, Settings
from trainer.lifecycle.s3folder import CREDENTIALS


def run_experiment(settings: Settings, stream: TextIO) -> dict[str, Any]:
    """Run everything below ``settings.out``, which has to be empty; returns the report, which is also written there.

    Raises:
        NotAsPlannedError: the run did not do what it has to; hosts, stores, events and error output are kept.
        CkptStoreError: anything else that failed.
    """
    journal = Journal(settings.out / "events" / "controller.jsonl", stream)
    lifecycle = Lifecycle(settings, journal)
    try:
        journal.say(f"everything is below {settings.out}")
        with ExitStack() as stack:
            backend = _hosts(settings, journal, stack)
            stack.callback(lifecycle.abandon)  # before what hosts have in common goes
            access = _reach(settings, journal, stack, backend)
            record = lifecycle.run(access, backend)
            if settings.sabotage:
                raise unexpected("run with a flipped bit", "another root than the reference", "the same root")
            with lifecycle.phase("report", "writing the report and packing the evidence"):
                report = _report(record, settings, journal, lifecycle)
            report = _write(reporting.with_requests(report, lifecycle.ledger.entries), settings)
        _closing_words(report, settings, access, record, journal)
        return report
    except OSError as error:
        known = of_system(error, f"the run in {settings.out}")
        _record_failure(known, settings, lifecycle, journal)
        raise known from error
    except BaseException as error:
        _record_failure(error, settings, lifecycle, journal)
        raise
    finally:
        journal.close()


def _reach(settings: Settings, journal: Journal, stack: ExitStack, backend: Backend) -> Access:
    """Access to the operator's store, which ends with ``stack``."""
    reached = reach(settings.operator, settings.out, _python(), backend.reachable)
    if settings.operator != S3:
        return stack.enter_context(reached)
    with journal.phase("server", "starting an S3 server for the operator's store"):
        return stack.enter_context(reached)


def _hosts(settings: Settings, journal: Journal, stack: ExitStack) -> Backend:
    """The kind of hosts that the run gets; what they have in common ends with ``stack``."""
    outside = (settings.operator or "").startswith("s3://")
    kind, why = (PROCESS, "a bucket is outside of what namespaces reach") if outside else (None, "")
    backend, refused = open_hosts(settings.hosts or kind, fresh=settings.fresh, machines=settings.machines)
    stack.callback(backend.close)
    why = "" if settings.hosts else why or refused
    if outside and backend.isolated_network:
        raise UsageError(
            f"operator {settings.operator}", f"hosts of kind {backend.kind} reach no bucket", "--hosts process"
        )
    if settings.mode not in backend.modes:
        ways = ", ".join(backend.modes)
        raise UsageError(f"mode {settings.mode}", f"a host of kind {backend.kind} can be lost by {ways}")
    text = f"hosts are of kind {backend.kind}" + (f": {why}" if why else "")
    journal.note("hosts", text, kind=backend.kind, why=why)
    return backend


def _record_failure(error: BaseException, settings: Settings, lifecycle: Lifecycle, journal: Journal) -> None:
    """Say why it failed in the run's folder too; where that cannot be done, nothing must hide ``error``."""
    failure = {"type": type(error).__name__, "message": str(error), "phases": reporting.plain(journal.spans)}
    with suppress(OSError):  # BrokenPipeError if nobody reads what is said
        journal.say("NOT AS PLANNED" if isinstance(error, NotAsPlannedError) else "FAILED")
        journal.say(f"hosts, stores, events and error output are kept in {settings.out}")
        if (server_folder(settings.out) / CREDENTIALS).exists():
            again = serving(server_folder(settings.out), _python())
            journal.say(f"the operator's S3 server is started again by: {again}")
    for keep in (
        lifecycle.unseal,
        lambda: (settings.out / "failure.json").write_text(json.dumps(failure, indent=1) + "\n"),
        lambda: journal.note("failed", **failure),
        lifecycle.collect_events,
    ):
        with suppress(OSError):  # for instance, because the disk is full
            keep()


def _report(record: Record, settings: Settings, journal: Journal, lifecycle: Lifecycle) -> dict[str, Any]:
    report = reporting.make_report(record, journal)
    events, target = settings.out / "events", settings.out / "archive" / ARCHIVE
    info = pack_run(record, report, lifecycle.operator, events, target)
    stored = store_archive(info, lifecycle.operator)
    report = reporting.with_archive(report, info, reporting.plain(stored))
    journal.note("archived", f"{len(info.members)} members, {info.size:,} bytes, read back whole", sha256=info.sha256)
    return report


def _write(report: dict[str, Any], settings: Settings) -> dict[str, Any]:
    (settings.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (settings.out / "report.html").write_text(render(report))
    return report


def _closing_words(
    report: dict[str, Any], settings: Settings, access: Access, record: Record, journal: Journal
) -> None:
    out, roots, plan = settings.out, report["roots"], record.plan
    early, middle, last = map(str, plan.commits)
    evaluation, lost = report["evaluation"], report["loss_of_host"]
    store = str(near(Path(access.url))) if settings.operator is None else access.url
    archive, ckpt = report["archive"], _command()
    ours = ckpt if access.again else f"{ckpt} --store {shlex.quote(store)}"
    lines = [
        "",
        *journal.timeline(),
        "",
        f"prepared identity  {report['prepared_identity']}",
        f"root at {early:<10} {roots[early]['root']}",
        f"root at {middle:<10} {roots[middle]['recovered']}  (recovered; equal to the reference)",
        f"root at {last:<10} {roots[last]['root']}",
        f"host loss          noticed after {lost['detection_ms']:.0f} ms ({lost['detected_by']})",
        f"evaluation         {evaluation['verdict']['text']}",
        "",
        f"report             {near(out / 'report.html')}  (and report.json)",
        f"evidence           {near(out / 'archive' / ARCHIVE)}",
        f"                   SHA-256 {archive['sha256']}",
        "",
        *_asked(report),
        "next, for instance:",
        *(f"  {line}" for line in access.again),
        f"  {ours} log {record.ref}",
        f"  {ours} verify {record.ref}",
        f"  {ours} diff {_prefix(roots[early]['root'])} {_prefix(roots[middle]['recovered'])}",
        f"  {_python()} replay {_prefix(roots[early]['root'])} {_prefix(roots[middle]['recovered'])}"
        + ("" if access.again else f" --store {shlex.quote(store)}"),
        f"  {ckpt} evidence verify {shlex.quote(str(near(out / 'archive' / ARCHIVE)))}",
    ]
    for line in lines:
        print(line, file=journal.stream, flush=True)


def _command() -> str:
    """How the reader can call ``ckpt``: by its name, or by its path beside this interpreter."""
    beside = Path(sys.executable).with_name("ckpt")
    if shutil.which("ckpt") is None and beside.exists():
        return shlex.quote(str(near(beside)))
    return "ckpt"


def _python() -> str:
    """How the reader can call the trainer."""
    return f"{shlex.quote(str(near(Path(sys.executable))))} -m trainer"


def _asked(report: dict[str, Any]) -> list[str]:
    """What was asked of the operator's server, in one line and an empty one."""
    asked = report["operator"]["requests"]
    if not asked:
        return []
    count = sum(sum(one["operations"].values()) for one in asked)
    sent, received = (sum(one[name] for one in asked) for name in ("sent_bytes", "received_bytes"))
    return [f"operator's server  {count:,} requests, {sent:,} bytes sent, {received:,} received", ""]


def _prefix(root: str) -> str:
    return root.removeprefix("b3:")[:12]
