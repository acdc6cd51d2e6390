"""The report of a run as plain JSON values; the page (trainer/lifecycle/page.py) is made from it and from nothing
else."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ckptstore import Digest
from ckptstore.evidence import ArchiveInfo
from ckptstore.format import canonical
from trainer.lifecycle.commits import REFERENCE, Committed
from trainer.lifecycle.journal import Journal
from trainer.lifecycle.record import Record
from trainer.lifecycle.requests import Requests
from trainer.preparation.plan import Plan
from trainer.scoring import statistics
from trainer.scoring.evaluation import Answer, Result
from trainer.scoring.statistics import Comparison

FORMAT = 1


def make_report(record: Record, journal: Journal) -> dict[str, Any]:
    """Everything that a finished run found, without paths, so that two reports can be laid side by side."""
    plan = record.plan
    early, middle, last = plan.commits
    assert record.loss is not None
    reference, recovered = record.root(middle, REFERENCE), record.root(middle)
    return {
        "format": FORMAT,
        "profile": plan.profile,
        "began_at": journal.began_at,
        "seconds": journal.seconds(),
        "prepared_identity": str(record.identity),
        "trees": plain(record.trees),
        "plan": {
            "digest": str(plan.digest),
            "updates": len(plan.updates),
            "documents_per_update": len(plan.update(1).documents),
            "commits": list(plan.commits),
            "parameters": sum(one["parameters"] for one in record.ownership),
            "drill": plain(plan.drill),
            "heartbeat_seconds": plan.timeouts.heartbeat,
            "heartbeats_missed": plan.timeouts.heartbeats_missed,
            "confidence": plan.evaluation.criteria.confidence,
            "retention_margin": plan.evaluation.criteria.margin,
        },
        "data": _data(plan),
        "controller": {"torch_imported": record.torch_imported, "python": platform.python_version()},
        "hosts": {"kind": record.hosts_kind, "views": plain(record.views)},
        "isolation": record.hosts_claim,
        "operator": {
            "store": record.operator_kind,
            "refused_write": record.refused_write,
            "requests": plain(record.requests),
        },
        "binding": dict(record.binding),
        "ownership": record.ownership,
        "roots": {
            str(early): {"root": str(record.root(early).root)},
            str(middle): {
                "reference": str(reference.root),
                "recovered": str(recovered.root),
                "equal": reference.root == recovered.root,
            },
            str(last): {"root": str(record.root(last).root), "parent": _text(record.root(last).parent)},
        },
        "replay": {
            "first": early + 1,
            "last": middle,
            "updates": len(record.replay),
            "losses_and_norms_equal": record.replay == {n: record.reference[n] for n in range(early + 1, middle + 1)},
        },
        "checkpoints": [_checkpoint(one) for one in record.committed],
        "stagings": plain(record.stagings),
        "empty_listing": record.empty_listing,
        "pulled": plain(record.pulled),
        "loss_of_host": plain(record.loss),
        "groups": plain(record.groups),
        "updates": {
            "reference": [one.to_plain() for one in record.reference.values()],
            "replay": [one.to_plain() for one in record.replay.values()],
            "continued": [one.to_plain() for one in record.continued.values()],
        },
        "evaluation": _evaluation(record),
        "phases": plain(journal.spans),
        "cleanup": {
            "processes": plain(record.endings),
            "hosts": plain(record.shut),
            "folders": [_without_path(one) for one in record.cleared],
        },
        "cost": "one local machine, nothing was rented",
    }


def with_archive(report: Mapping[str, Any], info: ArchiveInfo, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The report with what is only known once it lies in an archive: the archive's own digests and receipt."""
    about = {
        "file": info.path.name,
        "bytes": info.size,
        "sha256": info.sha256,
        "blake3": str(info.blake3),
        "members": len(info.members),
        "references": len(info.references),
        "reference_bytes": sum(one.size for one in info.references),
        **stored,
    }
    return {**report, "archive": about}


def with_requests(report: Mapping[str, Any], requests: Sequence[Requests]) -> dict[str, Any]:
    """The report with what was asked of the operator's server; the last of it stored the archive."""
    return {**report, "operator": {**report["operator"], "requests": plain(requests)}}


def plain(value: Any) -> Any:
    """Dataclasses, mappings, sequences and digests as JSON values; floats stay floats."""
    if is_dataclass(value) and not isinstance(value, type) and not isinstance(value, Digest):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Digest):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _checkpoint(committed: Committed) -> dict[str, Any]:
    body: dict[str, Any] = plain(committed)
    body["sent_bytes"] = sum(one.sent_bytes for one in committed.moved)
    body["readback_bytes"] = sum(one.readback_bytes for one in committed.moved)
    return body


def _data(plan: Plan) -> dict[str, Any]:
    """Who is trained and who is only scored, by the digests of their words, and what both have in common."""
    members = {name: set(digests.values()) for name, digests in plan.memberships().items()}
    trained = set().union(*(members[phase.name] for phase in plan.phases))
    scored = set().union(*(members[one.name] for one in plan.evaluation.sets))
    return {
        "sets": [
            {"name": name, "documents": len(digests), "digest": str(Digest.of(canonical.encode([*sorted(digests)])))}
            for name, digests in members.items()
        ],
        "trained": len(trained),
        "trained_again": len(plan.replayed),
        "scored": len(scored),
        "trained_and_scored": len(trained & scored),
    }


def _evaluation(record: Record) -> dict[str, Any]:
    plan = record.plan
    criteria = plan.evaluation.criteria
    start, middle, last = (record.results[step] for step in plan.evaluation.after)
    whole = statistics.compare(start, last, criteria.confidence)
    verdict = statistics.verdict(criteria, whole)
    return {
        "runs": record.evaluations,
        "scores": [_scores(result) for result in (start, middle, last)],
        "comparisons": [
            _comparison(name, statistics.compare(before, after, criteria.confidence))
            for name, before, after in (
                ("start to recovered", start, middle),
                ("recovered to last", middle, last),
                ("start to last", start, last),
            )
        ],
        "verdict": {"promote": verdict.promote, "reasons": list(verdict.reasons), "text": str(verdict)},
        "answers": _answers(start, middle, last),
    }


def _scores(result: Result) -> dict[str, Any]:
    return {
        "update": result.update,
        "sets": [
            {
                "name": one.name,
                "documents": len(one.losses),
                "loss": one.mean,
                "correct": one.correct,
                "generated": len(one.answers),
            }
            for one in result.sets
        ],
    }


def _comparison(name: str, compared: Sequence[Comparison]) -> dict[str, Any]:
    return {"name": name, "sets": plain(compared)}


def _answers(*results: Result) -> list[dict[str, Any]]:
    """Every generated answer at each stage, case by case."""
    found = []
    for sets in zip(*(result.sets for result in results), strict=True):
        for cases in zip(*(one.answers for one in sets), strict=True):
            stages = [_answer(result.update, case) for result, case in zip(results, cases, strict=True)]
            found.append({"set": sets[0].name, "document": cases[0].document, "stages": stages})
    return found


def _answer(update: int, answer: Answer) -> dict[str, Any]:
    return {"update": update, "text": answer.text, "ended": answer.ended, "correct": answer.correct}


def _without_path(cleared: Any) -> dict[str, Any]:
    body: dict[str, Any] = plain(cleared)
    del body["path"]
    return body


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)
