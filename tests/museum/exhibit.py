"""What is said about a store of the museum, by everything that looks at it."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import ckptstore
from ckptstore.errors import CkptStoreError
from ckptstore_cli.main import run
from tests.golden import states
from tests.museum.damage import FORGED, Breaking

HERE = Path(__file__).parent


def recipes() -> dict[str, dict[str, Any]]:
    """Story and steps of every exhibit, by name."""
    found: dict[str, dict[str, Any]] = json.loads(HERE.joinpath("museum.json").read_text())
    return found


def recorded() -> dict[str, dict[str, Any]]:
    """What is said of every exhibit, by name."""
    file = HERE / "findings.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def observe(recipe: dict[str, Any], golden: Path, keys: dict[str, str], folder: Path) -> dict[str, Any]:
    """Break a copy of the golden store in ``folder`` and ask: what is wrong, what is the newest whole checkpoint, what
    would a collection do, what comes out of it, and what does a repair from the golden store make of it."""
    path = folder / "broken"
    shutil.copytree(golden, path)
    breaking = Breaking(path, keys)
    for step in recipe["steps"]:
        breaking.do(*step)
    before = contents(path)
    ask = Asking(path, keys)
    refs = [FORGED] if breaking.forged is not None else recipe.get("of", ["main"])
    found: dict[str, Any] = {}
    for ref in refs:
        found[f"verify {ref}"] = ask.findings("verify", ask.root(ref))
    found["latest"] = ask.latest(FORGED if FORGED in refs else "main")
    found["gc"] = ask.collection()
    found["restore"] = restored(path, ask.root(refs[0]))
    after = contents(path)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert all(key.startswith(("receipts/", "catalogue", "lock")) for key in changed), changed
    donor = ("--no-remotes", "--from", golden.as_uri())
    if recipe.get("header"):
        found["repair --header"] = ask.findings("repair", "--header")
    for ref in refs:
        if found[f"verify {ref}"]["exit"]:
            found[f"repair {ref}"] = ask.findings("repair", ask.root(ref), *donor)
            found[f"verify {ref} after that"] = ask.run("verify", ask.root(ref))[0]
    if recipe.get("delete"):
        found["gc --delete"] = ask.findings("gc", "--delete", "--yes")
    return found


class Asking:
    """Commands on the store at ``path``; keys are told by name."""

    def __init__(self, path: Path, keys: dict[str, str]) -> None:
        self.path = path
        self.names: dict[str, str] = {}
        self.keys = keys
        for name, key in keys.items():
            self.names.setdefault(key, name)
            if "/" in key:
                self.names.setdefault(key.rpartition("/")[2], name)

    def root(self, name: str) -> str:
        """A ref as it is, and a checkpoint by name as its digest."""
        return self.keys[name].rpartition("/")[2] if name in self.keys else name

    def run(self, *line: str) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
        """Exit code, what was printed, and the errors."""
        output, errors = StringIO(), StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = run([*line, "--json", "--store", str(self.path)])
        told = [[json.loads(text) for text in stream.getvalue().splitlines()] for stream in (output, errors)]
        return code, told[0], told[1]

    def findings(self, *line: str) -> dict[str, Any]:
        """Exit code, kinds of findings by key, what was healed, and codes of errors."""
        code, told, errors = self.run(*line)
        kinds: dict[str, set[str]] = {}
        for item in told:
            if item["type"] in ("finding", "healed"):
                kinds.setdefault(self._name(item["key"]), set()).add(item.get("kind", "healed"))
            elif item["type"] == "header":
                kinds |= {self._name(one["key"]): {"healed"} for one in item["healed"]}
        found = self._told(code, errors)
        if kinds:
            found["keys"] = {key: sorted(kinds[key]) for key in sorted(kinds)}
        return found

    def latest(self, ref: str) -> dict[str, Any]:
        """Which checkpoint, and how many were passed over."""
        code, told, errors = self.run("latest", ref)
        found = self._told(code, errors)
        for item in told:
            if item["type"] == "latest":
                root = item["root"].removeprefix("b3:")
                found |= {"root": self.names.get(root, "another"), "skipped": len(item["skipped"])}
        return found

    def collection(self) -> dict[str, Any]:
        """What a dry run keeps, and how much it would delete."""
        code, told, errors = self.run("gc")
        kinds = [item["type"] for item in told]
        counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        return self._told(code, errors) | ({"told": counts} if counts else {})

    def _told(self, code: int, errors: list[dict[str, Any]]) -> dict[str, Any]:
        codes = sorted({str(item["error"]) for item in errors if "error" in item})
        return {"exit": code} | ({"errors": codes} if codes else {})

    def _name(self, key: str) -> str:
        return self.names.get(key) or self.names.get(key.rpartition("/")[2]) or f"{key.partition('/')[0]}/…"


def restored(path: Path, ref: str) -> str:
    """What comes of restoring a ref: ``restored``, or the code of the error."""
    try:
        store = ckptstore.open(path)
        root = store.resolve(ref)
        count = len(store.checkpoint(root).shards)
        _, objects = states.whole() if count == 1 else states.part(0)
        store.restore(root, states.state(objects), shard=0 if count > 1 else None)
    except CkptStoreError as error:
        return error.code
    return "restored"


def contents(path: Path) -> dict[str, bytes]:
    """Bytes of every file of a store."""
    return {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}
