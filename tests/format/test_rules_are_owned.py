"""Every rule of docs/format.md is owned by a test, and no test names a rule that is not there.

A test owns the rules that its docstring names.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "format.md"
RULE = re.compile(r"\bF-\d+\b")


@cache
def rules() -> dict[str, str]:
    """Text of each rule by its number."""
    found: dict[str, str] = {}
    for number, text in re.findall(r"^\*\*(F-\d+)\*\* (.*?)(?=^\*\*F-|^#|\Z)", DOCUMENT.read_text(), re.M | re.S):
        assert number not in found, f"{number} is defined twice"
        found[number] = text
    return found


@cache
def owners() -> dict[str, list[str]]:
    """Tests by the rule that their docstrings name."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for rule in RULE.findall(ast.get_docstring(node) or ""):
                    found.setdefault(rule, []).append(f"{file.name}::{node.name}")
    return found


def test_every_rule_is_owned_by_a_test() -> None:
    """A rule that nothing checks is a rumour."""
    assert sorted(rules().keys() - owners().keys()) == []


def test_no_test_names_a_rule_that_is_not_there() -> None:
    """Numbers are never used again, so such a name is a slip."""
    assert {rule: tests for rule, tests in owners().items() if rule not in rules()} == {}


def test_invalid_documents_break_rules_that_are_there() -> None:
    """The index of invalid documents names the rule that each breaks."""
    index = json.loads((TESTS.parent / "manifests" / "v1" / "invalid" / "INDEX.json").read_text())
    assert {case["rule"] for case in index} <= rules().keys()


def test_each_rule_has_one_must() -> None:
    """So each can be owned, broken and argued about by itself."""
    assert {number: text for number, text in rules().items() if len(re.findall(r"\bMUST\b", text)) != 1} == {}


def test_rules_that_the_document_refers_to_are_there() -> None:
    """References inside the document."""
    assert set(RULE.findall(DOCUMENT.read_text())) <= rules().keys()
