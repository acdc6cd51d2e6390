"""Gather: an archive holds documents and receipts as they are, and names everything that it leaves in the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Digest, evidence
from ckptstore.errors import CorruptError
from ckptstore.evidence import Reference
from ckptstore.format import canonical
from ckptstore.format.keys import document_key
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.training import make_training, save_steps


@pytest.fixture
def roots(store: Store, tmp_path: Path) -> list[Digest]:
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    (folder / "plan.json").write_bytes(b"{}")
    (folder / "deep" / "small").write_bytes(b"small" * 100)
    (folder / "large.bin").write_bytes(os.urandom(3000))
    tree = store.put_tree(folder)
    with store.run("main", **make_training().objects(), files=tree) as run:
        run.resume()
        first = run.save(0)
    return [first]


def test_documents_and_receipts_are_members_with_their_exact_bytes(store: Store, roots: list[Digest]) -> None:
    gathered = ckptstore.gather_evidence(store, roots)
    closure = store.closure(roots[0])
    assert closure.documents.keys() <= gathered.members.keys()
    for key in closure.documents:
        assert gathered.members[key] == store.backend.get(key)
    receipts = [stat.key for stat in store.backend.list(f"receipts/{roots[0].hex}/")]
    assert receipts
    assert set(receipts) <= gathered.members.keys()
    assert canonical.decode(gathered.members["roots.json"], 10**6) == {"roots": [str(roots[0])]}


def test_small_files_are_members_and_large_ones_references(store: Store, roots: list[Digest]) -> None:
    gathered = ckptstore.gather_evidence(store, roots, file_limit=1000)
    tree = store.checkpoint(roots[0]).files
    assert tree is not None
    assert gathered.members[f"trees/{tree.hex}/plan.json"] == b"{}"
    assert gathered.members[f"trees/{tree.hex}/deep/small"] == b"small" * 100
    assert f"trees/{tree.hex}/large.bin" not in gathered.members
    (large,) = (file for file in store.tree(tree).files if file.path == "large.bin")
    assert large.chunks[0] in {reference.digest for reference in gathered.references}


def test_every_object_is_in_the_archive_or_named_by_it(store: Store, roots: list[Digest]) -> None:
    gathered = ckptstore.gather_evidence(store, roots)
    named = {reference.key: reference for reference in gathered.references}
    held = {Digest.of(data) for data in gathered.members.values()}
    for key, need in store.closure(roots[0]).objects.items():
        if need.digest not in held:
            assert named[key] == Reference(key, need.length, need.digest)


def test_ancestors_are_in_it_as_history(store: Store) -> None:
    first, second = save_steps(store, "main", make_training(), 2)
    gathered = ckptstore.gather_evidence(store, [second])
    assert document_key(first) in gathered.members
    assert document_key(store.checkpoint(first).shards[0]) not in gathered.members


def test_the_same_checkpoints_give_the_same_archive(store: Store, roots: list[Digest], tmp_path: Path) -> None:
    infos = []
    for name in ("a.tar", "b.tar"):
        gathered = ckptstore.gather_evidence(store, roots)
        infos.append(evidence.pack(gathered.members, tmp_path / name, gathered.references))
    assert infos[0].blake3 == infos[1].blake3
    assert ckptstore.misnamed_documents(infos[0]) == []


def test_a_document_under_another_name_is_found(store: Store, roots: list[Digest], tmp_path: Path) -> None:
    gathered = ckptstore.gather_evidence(store, roots)
    key = document_key(roots[0])
    forged = {**gathered.members, key: gathered.members[key].replace(b'"step":0', b'"step":9')}
    info = evidence.pack(forged, tmp_path / "x.tar", gathered.references)
    (found,) = ckptstore.misnamed_documents(info)
    assert key in found


def test_corrupt_bytes_become_no_evidence(store: Store, roots: list[Digest]) -> None:
    faulty = FaultyBackend(store.backend)
    faulty.flip_bit(document_key(store.checkpoint(roots[0]).shards[0]), 9)
    with pytest.raises(CorruptError):
        ckptstore.gather_evidence(Store(faulty), roots)
