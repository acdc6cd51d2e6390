"""manifests/v1/vectors: digests that b3sum computed over bytes written by hand, and a whole store made so."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.format.digest import Digest, derive
from ckptstore.format.merkle import MerkleTree
from ckptstore.format.packs import PackLayout
from ckptstore.format.records import attempt_subject, closure_digest
from ckptstore.format.shard import RngEntry
from ckptstore.format.state import rng_root
from ckptstore.format.tensors import CHUNK, chunk_lengths, tensor_digest
from tests.format.kinds import MANIFESTS, VECTORS

DOCUMENT = MANIFESTS.parents[1] / "docs" / "format.md"


def vectors(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (VECTORS / f"{name}.jsonl").read_text().splitlines()]


def test_plain_digests_are_those_of_b3sum() -> None:
    """F-10."""
    for vector in vectors("digests"):
        assert Digest.of(bytes.fromhex(vector["byte"]) * vector["times"]).hex == vector["digest"]


@pytest.mark.parametrize("vector", vectors("merkle"), ids=lambda vector: vector["name"])
def test_merkle_trees_are_those_of_b3sum(vector: dict[str, Any]) -> None:
    """F-11, F-20, F-21, F-22 (B049)."""
    tree = MerkleTree(vector["subject"])
    leaves = [bytes.fromhex(leaf) for leaf in vector["leaves"]]
    assert tree.head([tree.leaf(leaf) for leaf in leaves]).hex() == vector["head"]
    assert derive(f"ckptstore 1 {tree.subject} root", vector["statement"].encode()).hex() == vector["root"]
    bound = {key: value for key, value in json.loads(vector["statement"]).items() if key not in ("count", "tree")}
    assert tree.root(leaves, bound).hex == vector["root"]


def test_merkle_vectors_are_all_different() -> None:
    """F-21, F-22 (B049)."""
    roots = [vector["root"] for vector in vectors("merkle")]
    assert len(set(roots)) == len(roots) == 12


@pytest.mark.parametrize("vector", vectors("tensors"), ids=lambda vector: f"{vector['dtype']}{vector['shape']}")
def test_tensor_digests_are_those_of_b3sum(vector: dict[str, Any]) -> None:
    """F-33, F-35 (B038)."""
    lengths = list(chunk_lengths(vector["length"]))
    chunks = [Digest.of(bytes([number]) * length) for number, length in enumerate(lengths)]
    assert [chunk.hex for chunk in chunks] == vector["chunks"]
    assert tensor_digest(vector["dtype"], vector["shape"], chunks).hex == vector["digest"]


@pytest.mark.parametrize("vector", vectors("packs"), ids=lambda vector: vector["name"])
def test_packs_are_those_of_b3sum(vector: dict[str, Any]) -> None:
    """F-37, F-38."""
    layout, contents = PackLayout(), bytearray()
    for item in vector["items"]:
        data = bytes.fromhex(item["byte"]) * item["times"]
        if layout.place(item["path"], Digest.of(data), len(data)):
            contents += data
    packs, start = [], 0
    for length in layout.lengths():
        packs.append(Digest.of(contents[start : start + length]).hex)
        start += length
    assert packs == vector["packs"]
    assert start == len(contents)


def checkpoint_vectors() -> dict[str, dict[str, Any]]:
    return {vector["name"]: vector for vector in vectors("checkpoints")}


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    shutil.copytree(VECTORS / "store", tmp_path / "store")
    return ckptstore.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["one owner", "two owners"])
def test_a_store_that_no_encoder_of_ours_wrote_verifies(store: ckptstore.Store, name: str) -> None:
    """F-03, F-04, F-25, F-28, F-80, F-114, F-151."""
    vector = checkpoint_vectors()[name]
    root = Digest.parse(vector["root"])
    report = store.verify(root)
    assert report.findings == ()
    assert report.closure.hex == vector["closure"]
    assert closure_digest(store.closure(root).sizes()).hex == vector["closure"]
    assert report.bytes_read == sum(size for _, size in store.closure(root).sizes())
    checkpoint = store.checkpoint(root)
    assert (checkpoint.state_root.hex, checkpoint.rng_root.hex) == (vector["state_root"], vector["rng_root"])
    assert Digest.of(checkpoint.encode()) == root


def test_the_ref_of_that_store_leads_to_both_checkpoints(store: ckptstore.Store) -> None:
    """F-05, F-103, F-105."""
    names = checkpoint_vectors()
    assert store.head("main") == Digest.parse(names["two owners"]["root"])
    assert store.verify("main").findings == ()
    assert [root.hex for root, _ in store.history(store.resolve("main"))] == [
        names["two owners"]["root"],
        names["one owner"]["root"],
    ]


def test_one_and_two_owners_have_one_state_root(store: ckptstore.Store) -> None:
    """F-25, F-85."""
    one, two = (store.checkpoint(Digest.parse(checkpoint_vectors()[n]["root"])) for n in ("one owner", "two owners"))
    assert one.state_root == two.state_root
    assert one.progress == two.progress
    assert one.rng_root != two.rng_root


def test_swapped_generators_have_the_rng_root_of_b3sum(store: ckptstore.Store) -> None:
    """F-28 (B005)."""
    closure = store.closure(store.resolve("main"))
    first, second = (closure.shards[index].shard.rng for index in (0, 1))
    assert rng_root([second, first]).hex == checkpoint_vectors()["two owners, generators swapped"]["rng_root"]
    assert all(isinstance(entry, RngEntry) for entry in first)


def test_the_subject_of_an_attempt_is_that_of_b3sum() -> None:
    """F-110."""
    vector = checkpoint_vectors()["subject of an attempt's shard receipts"]
    assert attempt_subject(vector["attempt"]).hex == vector["digest"]


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("b3sum") is None, reason="b3sum is not installed")
def test_the_script_makes_the_same_vectors_again(tmp_path: Path) -> None:
    """F-10, F-11."""
    subprocess.run(["bash", str(VECTORS / "make.sh"), str(tmp_path)], check=True)
    made = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    kept = {file.relative_to(VECTORS): file.read_bytes() for file in VECTORS.rglob("*") if file.is_file()}
    kept.pop(Path("make.sh"))
    assert made == kept


def test_the_worked_example_is_the_store_of_the_vectors() -> None:
    """F-12: an example in a document that nothing reads is decoration."""
    text = DOCUMENT.read_text()
    example = text[text.index("## 12. A worked example") :]
    stored = b"".join(file.read_bytes() for file in (VECTORS / "store").rglob("*") if file.is_file()).decode()
    rows = re.findall(r"^([0-9a-f]{4})  ( *)(\S.*)$", example, re.M)
    dump = [row for row in rows if re.match(r"([0-9a-f]{2} )+", row[2])]
    page = [row for row in rows if row not in dump]
    assert "".join(content for _, _, content in page) in stored
    assert [int(offset, 16) for offset, _, _ in page] == _offsets([content for _, _, content in page])
    record = b"".join(bytes.fromhex(content.split("  ")[0]) for _, _, content in dump).decode()
    assert record == (VECTORS / "store" / "refs" / "main" / "0000000000000001").read_text()
    assert "".join(content.split("  ")[-1] for _, _, content in dump) == record
    known = json.dumps(vectors("checkpoints")) + stored
    assert set(re.findall(r"\b[0-9a-f]{64}\b", example)) <= set(re.findall(r"[0-9a-f]{64}", known))
    leaves = [line for line in example.splitlines() if line.startswith('{"path"')]
    tree = MerkleTree("state")
    head = tree.head([tree.leaf(leaf.encode()) for leaf in leaves])
    pairs = [tree.node(*(tree.leaf(leaf.encode()) for leaf in leaves[n : n + 2])) for n in (0, 2, 4)]
    assert head == tree.node(tree.node(pairs[0], pairs[1]), pairs[2])
    assert tree.root([leaf.encode() for leaf in leaves], {}).hex == checkpoint_vectors()["one owner"]["state_root"]


def _offsets(pieces: list[str]) -> list[int]:
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece.encode()))
    return starts


def test_the_document_names_every_field_of_every_schema() -> None:
    """F-18."""
    text = DOCUMENT.read_text()
    words = set(re.findall(r"[a-z_]+", "".join(re.findall(r"`[^`\n]*`|^\|.*\|$", text, re.M))))
    for file in (MANIFESTS / "schemas").iterdir():
        assert _names(json.loads(file.read_text())) <= words, file.name
    assert CHUNK == 16777216


def _names(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
        return own.union(*map(_names, schema.values()))
    if isinstance(schema, list):
        return set().union(*map(_names, schema))
    return set()
