"""manifests/v1: schemas, valid and invalid documents, all of them executed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ckptstore.errors import CkptStoreError, MalformedError
from ckptstore.format.records import RefRecord
from tests.format.kinds import MANIFESTS, PARSERS, encode, valid_documents

INDEX: list[dict[str, Any]] = json.loads((MANIFESTS / "invalid" / "INDEX.json").read_text())
VALID = valid_documents()


@cache
def schema(kind: str) -> Draft202012Validator:
    content = json.loads((MANIFESTS / "schemas" / f"{kind}.schema.json").read_text())
    Draft202012Validator.check_schema(content)
    return Draft202012Validator(content)


@pytest.mark.parametrize(("kind", "name", "data"), VALID, ids=[f"{kind}/{name}" for kind, name, _ in VALID])
def test_a_valid_document_is_accepted_and_gives_its_bytes_back(kind: str, name: str, data: bytes) -> None:
    """F-12."""
    assert encode(kind, PARSERS[kind](data)) == data


@pytest.mark.parametrize(("kind", "name", "data"), VALID, ids=[f"{kind}/{name}" for kind, name, _ in VALID])
def test_the_schema_accepts_a_valid_document(kind: str, name: str, data: bytes) -> None:
    """F-18."""
    assert [error.message for error in schema(kind).iter_errors(json.loads(data))] == []


@pytest.mark.parametrize("case", INDEX, ids=[case["file"] for case in INDEX])
def test_an_invalid_document_is_refused_with_its_code(case: dict[str, Any]) -> None:
    """F-18, F-19 and the rule that each case names."""
    kind = case["file"].split("/")[0]
    with pytest.raises(CkptStoreError) as refused:
        PARSERS[kind]((MANIFESTS / "invalid" / case["file"]).read_bytes())
    assert refused.value.code == case["code"]


@pytest.mark.parametrize("case", INDEX, ids=[case["file"] for case in INDEX])
def test_the_schema_refuses_what_a_schema_can_express(case: dict[str, Any]) -> None:
    """F-18. ``schema`` is true where the schema refuses it, false where only the rule does, null if it is no JSON."""
    kind = case["file"].split("/")[0]
    try:
        value = json.loads((MANIFESTS / "invalid" / case["file"]).read_bytes().decode())
    except (ValueError, RecursionError):
        assert case["schema"] is None
        return
    assert schema(kind).is_valid(value) is not case["schema"]


def test_every_kind_has_a_schema_valid_and_invalid_documents() -> None:
    """F-19."""
    assert {file.name.removesuffix(".schema.json") for file in (MANIFESTS / "schemas").iterdir()} == PARSERS.keys()
    assert {kind for kind, _, _ in VALID} == PARSERS.keys()
    assert {case["file"].split("/")[0] for case in INDEX} == PARSERS.keys()


def test_the_index_lists_every_invalid_document_once() -> None:
    """F-12."""
    folder = MANIFESTS / "invalid"
    listed = [case["file"] for case in INDEX]
    assert sorted(listed) == sorted(str(file.relative_to(folder)) for file in folder.glob("*/*.json"))


@pytest.mark.parametrize("kind", sorted(PARSERS))
def test_a_document_is_refused_by_every_other_kind(kind: str) -> None:
    """F-19."""
    for other, _, data in VALID:
        if other != kind:
            with pytest.raises(MalformedError, match="kind"):
                PARSERS[kind](data)


def test_a_field_removed_renamed_or_added_anywhere_is_refused() -> None:
    """F-18."""
    for kind, _, data in VALID:
        for broken in _broken_objects(json.loads(data)):
            with pytest.raises(CkptStoreError):
                PARSERS[kind](json.dumps(broken, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode())


def _broken_objects(value: Any) -> list[Any]:
    """Copies of ``value`` in each of which one object, anywhere, lost a field or has one too many."""
    broken: list[Any] = []
    if isinstance(value, dict):
        for key, item in value.items():
            rest = {k: v for k, v in value.items() if k != key}
            broken += [rest, {**rest, f"{key}_": item}]
            broken += [{**value, key: inner} for inner in _broken_objects(item)]
        broken.append({**value, "zz": None})
    elif isinstance(value, list):
        for place, item in enumerate(value[:8]):
            broken += [[*value[:place], inner, *value[place + 1 :]] for inner in _broken_objects(item)]
    return broken


def test_the_parser_never_says_less_than_the_schema(tmp_path: Path) -> None:
    """F-103: a record that agrees with its schema, and not with its check, is corrupt and not malformed."""
    record = json.loads((MANIFESTS / "valid" / "ref" / "first.json").read_bytes())
    record["nonce"] = "0" * 32
    data = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    assert schema("ref").is_valid(record)
    with pytest.raises(CkptStoreError) as refused:
        RefRecord.parse(data)
    assert refused.value.code == "corrupt"
