"""Targets of the trainer: messages between workers, orders, events, plans, fingerprints, data, weights,
tokenizers."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ckptstore.errors import NotFoundError
from ckptstore.format.digest import Digest
from tests.fuzz.files import HEADER_BOMBS
from tests.fuzz.target import Target, Tree, dump_json, load_json
from trainer.compute import weights
from trainer.compute.config import PRESETS, Decoding, Recipe
from trainer.compute.transport import Channel, Group, raw_bytes
from trainer.data import cohorts, families, tokenizer
from trainer.data.cohorts import Document
from trainer.errors import PeerLostError
from trainer.preparation.plan import (
    PLAN_LIMIT,
    Criteria,
    Drill,
    Entry,
    Evaluation,
    EvaluationSet,
    Microbatch,
    Numerics,
    Phase,
    Plan,
    Timeouts,
    Update,
)
from trainer.workers import fingerprints, orders, reports
from trainer.workers.events import Event
from trainer.workers.fingerprints import Fingerprint, TensorFingerprint

_SHAPE = (2, 3, 4)
_WORDS = 16


def targets() -> Iterator[Target]:
    """One for each of them."""
    yield Target("message", _message, _messages, 2**16, (b"tpkc", bytes(8), b"\xff" * 8), executions=150)
    for name, run, seeds, limit, executions in (
        ("order", _order, _orders, orders.LINE_LIMIT, 400),
        ("event", _event, _events, 2**20, 400),
        ("plan", _plan, _plans, PLAN_LIMIT, 100),
        ("fingerprints", _fingerprints, _fingerprint_files, 2**20, 200),
        ("training-document", _document, _documents, cohorts.LINE_LIMIT, 200),
        ("question", _question, _questions, 2**16, 400),
        ("tokenizer-json", _tokenizer_json, _tokenizer_files, 2**16, 20),
    ):
        yield Target(
            name,
            run,
            seeds,
            limit,
            (b"1e999", b"-1", b"0x1.8p+1", b"Infinity", b"NaN", b"\\ud800"),
            load=load_json,
            dump=dump_json,
            bombs={
                "brackets": lambda size: b"[" * size,
                "braces": lambda size: b'{"a":' * (size // 5),
                "digits": lambda size: b"9" * size,
                "a late number": lambda size: b'{"event":"a","time":"b","at":' + b"9" * (size - 40) + b"}",
                "empty lists": lambda size: b"[" + b"[]," * (size // 3 - 1) + b"[]]",
                "turns": lambda size: (
                    b'{"family":"conversation","name":"a","turns":[' + b'"a",' * (size // 4 - 20) + b'"b"]}'
                ),
                "special tokens": lambda size: (
                    b'{"family":"conversation","name":"a","turns":["' + b"<" * (size - 60) + b'","b"]}'
                ),
            },
            bomb_bytes=limit,
            executions=executions,
        )
    yield Target(
        "chat-template",
        _template,
        _templates,
        2**16,
        _TEMPLATE_WORDS,
        bombs=_TEMPLATE_BOMBS,
        bomb_bytes=2**16,
        executions=5,
        per_byte=200,
    )
    yield Target(
        "weights",
        _weights,
        _weight_files,
        2**20,
        (b'"dtype":"F32"', b'"BF16"', b'"shape":[', b'"data_offsets":[0,', b"__metadata__"),
        load=_header,
        dump=_with_header,
        bombs=HEADER_BOMBS,
        executions=250,
    )


class _Wire(Group):
    """The receiving end of a group whose network carries whatever it is given."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0, 2, 7, "cpu")
        self._left = data

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, tensor: Tensor, peer: int, tag: int) -> None:
        raise AssertionError("nothing is sent")

    def _take(self, into: Tensor, peer: int, tag: int) -> None:
        size = into.numel() * into.itemsize
        piece, self._left = self._left[:size], self._left[size:]
        if len(piece) < size:
            raise PeerLostError(f"shard {peer}", "the connection ended")
        raw_bytes(into)[:] = piece


def _message(data: bytes, _folder: Path) -> None:
    wire = _Wire(data)
    got = wire.recv(_SHAPE, torch.float32, 1, Channel.ACTIVATION, 3, 1)
    payload = bytes(raw_bytes(got.contiguous()))
    assert payload == data[_WORDS * 8 : _WORDS * 8 + len(payload)], "it is not what was sent"
    assert zlib.crc32(payload) == struct.unpack("<q", data[104:112])[0], "its checksum is another"


@cache
def _messages() -> list[bytes]:
    class Sender(_Wire):
        sent = b""

        def _put(self, tensor: Tensor, peer: int, tag: int) -> None:
            self.sent += bytes(raw_bytes(tensor))

    found = []
    for rank, update in ((1, 3), (1, 4), (0, 3)):
        sender = Sender(b"")
        sender.rank = rank
        sender.send(torch.arange(24, dtype=torch.float32).reshape(_SHAPE), 0, Channel.ACTIVATION, update, 1)
        found.append(sender.sent)
    return found


def _order(data: bytes, _folder: Path) -> None:
    order = orders.parse(data)
    assert orders.parse(orders.encode(order)) == order, "the line that says it says another"


def _orders() -> list[bytes]:
    found: list[orders.Order] = [
        orders.Join(29500),
        orders.Start(),
        orders.Restore(Digest.of(b"root"), "/tmp/store"),
        orders.Arm(),
        orders.Train(1, 8, orders.Hold(4, 0, 1, 30)),
        orders.Train(1, 8),
        orders.Save("main:0:-:" + "0" * 32, 8, "/tmp/store"),
        orders.Flip(1),
        orders.Evaluate(8),
        orders.Close(),
    ]
    return [orders.encode(order) for order in found]


def _event(data: bytes, _folder: Path) -> None:
    event = reports.check(Event.parse(data))
    again = Event.parse(event.encode())
    assert (again.name, again.time, dict(again.fields)) == (event.name, event.time, dict(event.fields)), (
        "it says another"
    )
    if event.name == "update":
        fingerprints.make(reports.update_result(event), [fingerprints.state_of(event)])


def _events() -> list[bytes]:
    exact = {name: (1.5).hex() for name in ("loss", "norm", "coef", "denominator", "rate")}
    said: list[tuple[str, dict[str, object]]] = [
        ("heartbeat", {"number": 1}),
        (
            "update",
            {"update": 3, "exact": exact, "loss": 1.5, "norm": 1.5, "sent_bytes": 1, "received_bytes": 2, "ms": 0.5}
            | {"state": {"a": str(Digest.of(b"a"))}},
        ),
        (
            "joined",
            {"binding": {}, "fenced": True, "parameters": 5, "staged_sources": False, "tensors": ["a"]},
        ),
        ("error", {"type": "a", "message": "b"}),
        ("pulled", {"root": "b3:", "sent_bytes": 1, "present_keys": 1, "readback_bytes": 1, "method": "direct"}),
        ("requests", {"operations": {"GetObject": 1}, "sent_bytes": 1, "received_bytes": 2}),
    ]
    return [json.dumps({"event": name, "at": 1.25, "time": "now", **rest}).encode() for name, rest in said]


def _fingerprints(data: bytes, _folder: Path) -> None:
    assert fingerprints.encode(fingerprints.parse(data)) == data, "it was accepted, and its encoding is another"


def _fingerprint_files() -> list[bytes]:
    state = (TensorFingerprint("a", Digest.of(b"a")), TensorFingerprint("b", Digest.of(b"b")))
    made = [Fingerprint(update, 0.5, 1.5, 1.0, 8.0, 1e-3, state if update == 3 else ()) for update in (2, 3)]
    return [fingerprints.encode(made), fingerprints.encode(made[1:]), b""]


def _plan(data: bytes, _folder: Path) -> None:
    plan = Plan.parse(data)
    assert plan.encode() == data, "it was accepted, and its encoding is another"
    plan.memberships()
    assert plan.owners, "nobody owns anything"


@cache
def _plans() -> list[bytes]:
    """The shape of a whole plan on as few documents as there can be."""
    digest = Digest.of(b"any")
    names = ("a", "b", "c", "d")
    made = Plan(
        profile="demo",
        seed="demo 1",
        config=PRESETS["demo"],
        cuts=(2,),
        numerics=Numerics("float32", "native"),
        tokenizer=digest,
        corpus=digest,
        start=digest,
        phases=(Phase("one", 1, 2), Phase("two", 3, 3)),
        documents=tuple(Entry(name, "lookup", Digest.of(name.encode()), 8 + i, 1.0) for i, name in enumerate(names)),
        updates=(
            Update(1, (Microbatch(("a",), 8),), 4.0),
            Update(2, (Microbatch(("b",), 9), Microbatch(("c",), 10)), 8.5),
            Update(3, (Microbatch(("a", "b"), 9),), 8.0),
        ),
        recipe=Recipe(),
        dropout=None,
        commits=(1, 3),
        fingerprints=1,
        drill=Drill(2, 1, "forward", 1, "kill"),
        timeouts=Timeouts(60, 60, 1, 3, 60),
        evaluation=Evaluation(
            sets=(EvaluationSet("held", ("d",), 1),),
            after=(0, 3),
            token_cap=6,
            criteria=Criteria(("held",), (), 0.02, 0.99),
            decoding=Decoding(8, 8, 24),
            recomputed=1,
        ),
    )
    return [made.encode()]


def _document(data: bytes, _folder: Path) -> None:
    document = Document.parse(data)
    assert document.encode() == data, "it was accepted, and its encoding is another"
    encoded = _tokenizer().document(document.turns)
    assert len(encoded.ids) == len(encoded.learned), "not as many are learned or given as there are"


def _documents() -> list[bytes]:
    return [
        Document("a-1", "conversation", ("Hello", "Hi", "é\0", "b")).encode(),
        Document("b", "lookup", ('{"task":"lookup","data":{"a":1},"key":"a"}', '{"value":1}')).encode(),
    ]


def _question(data: bytes, _folder: Path) -> None:
    text = data.decode(errors="surrogateescape")
    expected = families.solve(text)
    assert families.check(text, json.dumps({"value": expected})), "the right answer is wrong"
    assert not families.check(text, text), "a question is its answer"


def _questions() -> list[bytes]:
    return [
        b'{"task":"lookup","data":{"a":1,"b":"x"},"key":"a"}',
        b'{"task":"largest","items":[1,2,3]}',
        b'{"task":"last","items":["a","b"]}',
        b'{"task":"count_on","items":{"a":"on","b":"off"}}',
    ]


@cache
def _tokenizer() -> tokenizer.ByteTokenizer:
    return tokenizer.from_files(_files())


@cache
def _files() -> dict[str, bytes]:
    return tokenizer.files(_templates()[0])


def _tokenizer_json(data: bytes, _folder: Path) -> None:
    tokenizer.from_files({**_files(), "tokenizer_config.json": data})


def _tokenizer_files() -> list[bytes]:
    return [_files()["tokenizer_config.json"]]


def _template(data: bytes, _folder: Path) -> None:
    made = tokenizer.from_files({**_files(), tokenizer.TEMPLATE: data})
    made.document(("Hello", "Hi"))


def _templates() -> list[bytes]:
    from trainer.preparation.prepare import TEMPLATE_ASSET

    return [
        TEMPLATE_ASSET.read_bytes(),
        b"{% for message in messages %}{{ message['role'] }}{{ message.content | upper }}{% endfor %}",
        b"{{ raise_exception('no') }}",
        b"{{ 'a' * 3 }}{{ 2 ** 3 }}{{ [1, 2] | join(',') }}",
    ]


_TEMPLATE_WORDS = (
    b"{{ ",
    b" }}",
    b"{% for a in b %}",
    b"{% endfor %}",
    b" ** ",
    b" * ",
    b"{% if a %}",
    b"range(10**9)",
    b"9**9**9",
    b"'a'*10**9",
)
_TEMPLATE_BOMBS = {
    "loops": lambda size: b"{% for a in messages %}" * 30 + b"{% endfor %}" * 30,
    "parentheses": lambda size: b"{{ " + b"(" * (size // 2) + b"1" + b")" * (size // 2 - 10) + b" }}",
    "lists": lambda size: b"{{ " + b"[" * (size // 2) + b"]" * (size // 2 - 10) + b" }}",
    "powers": lambda size: b"{{ 9 ** 9 ** 9 ** 9 }}",
    "long text": lambda size: b"{{ 'a' * 10 ** 12 }}",
    "long list": lambda size: b"{{ [0] * 10 ** 12 }}",
    "shift": lambda size: b"{% for a in range(1000000000) %}a{% endfor %}",
    "width": lambda size: b"{{ '%1000000000000s' % 'a' }}",
    "digits": lambda size: b"{{ " + b"9" * 6000 + b" }}",
    "and so on": lambda size: b"{{ 1 " + b"+ 1 " * (size // 4 - 10) + b"}}",
}


def _weights(data: bytes, folder: Path) -> None:
    tensors = weights.decode(data, "fuzz")
    again = weights.decode(weights.encode(tensors), "fuzz")
    assert list(again.items()) == list(tensors.items()), "written again they are others"
    path = folder / "weights.safetensors"
    path.write_bytes(data)
    read = weights.read(path, list(tensors))
    assert dict(read.tensors) == tensors, "read from a file they are others"
    assert read.bytes_read == len(data), "not all of it was read"
    assert weights.places(path).keys() == tensors.keys()
    try:
        weights.read(path, ["not there"])
    except NotFoundError:
        return
    assert "not there" in tensors


@cache
def _weight_files() -> list[bytes]:
    return [
        weights.encode({}),
        weights.encode({"a": weights.StoredTensor("F32", (2, 2), bytes(range(16)))}),
        weights.encode(
            {
                "b": weights.StoredTensor("BF16", (3,), bytes(range(6))),
                "é": weights.StoredTensor("F32", (), bytes(4)),
                "c": weights.StoredTensor("F32", (0, 5), b""),
            }
        ),
    ]


def _header(data: bytes) -> Tree:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def _with_header(data: bytes, tree: Tree) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(tree, separators=(",", ":")).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + length :]
