"""What events of a host's processes have to hold, checked where they arrive: what follows can rely on it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckptstore.errors import MalformedError
from trainer.compute.result import EXACT, UpdateResult
from trainer.preparation.records import exact_float
from trainer.workers.events import Event

# By event, the fields that a controller reads. Events and fields that are not here are for people and for evidence.
_FIELDS: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "error": {"type": str, "message": str},
        "listening": {"port": int},
        "joined": {
            "binding": dict,
            "fenced": bool,
            "parameters": int,
            "staged_sources": bool,
            "tensors": list,
        },
        "op": {"update": int, "microbatch": int, "kind": str},
        "fault_point": {"update": int, "microbatch": int},
        "update": {
            "update": int,
            "exact": dict,
            "loss": float,
            "norm": float,
            "sent_bytes": int,
            "received_bytes": int,
            "ms": float,
            "state": dict,
        },
        "saved": {"step": int, "receipt": str, "ms": float},
        "snapshot": {"bytes": int, "ms": float},
        "evaluated": {"result": str, "answers_ms": float, "tokens": int, "margin": float},
        "closed": {"peak_rss": int},
        "pulled": {"root": str, "sent_bytes": int, "present_keys": int, "readback_bytes": int, "method": str},
        "requests": {"operations": dict, "sent_bytes": int, "received_bytes": int},
        "tried_to_write": {"refused": str},
        "failed": {"type": str, "what": str, "why": str, "hint": str},
    }
)


def check(event: Event) -> Event:
    """The event, if it holds what its name promises. MalformedError names the field that is absent or of another type.

    A boolean is no number here, and an integer no float.
    """
    for field, kind in _FIELDS.get(event.name, {}).items():
        if type(event[field]) is not kind:
            why = f"{field} is {event[field]!r:.40}, and has to be of type {kind.__name__}"
            raise MalformedError(f"event {event.name}", why)
    if event.name == "joined" and not all(type(name) is str for name in event["tensors"]):
        raise MalformedError("event joined", "a name of a tensor is no text")
    return event


def update_result(event: Event) -> UpdateResult:
    """The result in an ``update`` event. MalformedError unless all its exact numbers are there and finite."""
    exact = event["exact"]
    if sorted(exact) != sorted(EXACT):
        raise MalformedError(
            f"update {event['update']}", f"exact numbers {', '.join(exact)}; needed {', '.join(EXACT)}"
        )
    return UpdateResult(
        update=event["update"],
        **{name: exact_float(text, f"{name} of update {event['update']}") for name, text in exact.items()},
        sent_bytes=event["sent_bytes"],
        received_bytes=event["received_bytes"],
        ms=event["ms"],
    )
