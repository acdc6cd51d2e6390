"""What a writer decides, it decides under its lease: from its first look at the store to its last word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import ckptstore
from ckptstore.errors import NotFoundError
from ckptstore.store import Store
from tests.support.faulty import FaultyBackend
from tests.support.states import memory_store
from tests.support.training import make_training, save_steps


def test_files_that_were_collected_before_the_save_are_missed_by_it(disk: Store, tmp_path: Path) -> None:
    """An object that this process wrote under an earlier lease may be gone: it is looked for before a ref names it."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_text("{}" * 50)
    tree = disk.put_tree(tmp_path / "files")
    (chunk,) = disk.tree(tree).files[0].chunks
    training = make_training()
    training.step()
    with disk.run("main", **training.objects(), files=tree) as run:
        run.resume()
        disk.backend.delete(f"objects/{chunk.hex[:2]}/{chunk.hex}")
        with pytest.raises(NotFoundError, match="tokenizer"):
            run.save(1)
        assert disk.head("main") is None
        assert disk.put_tree(tmp_path / "files") == tree
        run.save(1)
    assert disk.verify("main").ok


def test_every_writer_holds_a_lease_from_its_first_look_to_its_last_word(tmp_path: Path) -> None:
    """F-140, B078: what it finds there, and leaves out for that, is not collected before a ref or a pin names it."""
    here = ckptstore.open(tmp_path / "here", create=True)
    (root,) = save_steps(here, "main", make_training(), 1)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("a")
    from ckptstore.export import export_weights, import_weights

    export_weights(here, root, tmp_path / "weights.safetensors")

    def sharded(store: Store) -> None:
        attempt = store.begin("wide")
        parts = [ckptstore.TrainingState(model=nn.ModuleDict({name: nn.Linear(3, 3)})) for name in "ab"]
        receipts = [store.save_shard(part, attempt, step=1, index=i, count=2) for i, part in enumerate(parts)]
        store.commit(attempt, receipts)

    works: dict[str, Callable[[Store], object]] = {
        "save": lambda store: save_steps(store, "main", make_training(), 1),
        "sharded": sharded,
        "push": lambda store: ckptstore.push(here, store, root, ref="main"),
        "pull": lambda store: ckptstore.pull(here, store, root, shards=[0]),
        "tree": lambda store: store.put_tree(tmp_path / "files"),
        "import": lambda store: import_weights(store, tmp_path / "weights.safetensors", "weights"),
        "move": lambda store: store.refs.move("empty", None, None),
    }
    for name, work in works.items():
        backend = FaultyBackend(memory_store().backend)
        alone: list[str] = []

        def look(key: str, backend: FaultyBackend = backend, alone: list[str] = alone) -> None:
            if not list(backend.list("leases/")):
                alone.append(key)

        for prefix in ("objects/", "documents/", "refs/", "pins/", "retired/"):
            backend.before("create", look, prefix=prefix)
        work(Store(backend))
        assert alone == [], name
        assert list(backend.list("leases/")) == []
