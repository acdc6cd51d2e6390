"""Bytes and back, and a directory whose files are all there or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import MalformedError, RefusedError
from tests.support.demo import demo_tokenizer
from trainer.data import bytetokenizer, tokenizer
from trainer.data.bytetokenizer import BOS, EOS, SEP, SPECIALS, VOCABULARY
from trainer.preparation.prepare import TEMPLATE_ASSET

TEXT = st.text(min_size=1).filter(lambda text: not any(special in text for special in SPECIALS.values()))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, data in bytetokenizer.files(TEMPLATE_ASSET.read_bytes()).items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@settings(deadline=None)
@given(TEXT)
def test_text_comes_back(text: str) -> None:
    encoded = demo_tokenizer().encode(text)
    assert encoded == list(text.encode())
    assert demo_tokenizer().decode(encoded) == text


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5))
def test_exactly_the_answers_and_their_ends_are_learned(turns: list[str]) -> None:
    encoded = demo_tokenizer().document(turns)
    expected = [(BOS, 0)]
    for i, turn in enumerate(turns):
        expected += [(byte, i % 2) for byte in turn.encode()] + [(EOS if i % 2 else SEP, i % 2)]
    assert list(zip(encoded.ids, encoded.learned, strict=True)) == expected


@settings(deadline=None)
@given(st.lists(TEXT, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0))
def test_a_prompt_is_how_its_document_begins(turns: list[str]) -> None:
    whole = demo_tokenizer().document(turns)
    prompt = demo_tokenizer().prompt(turns[:-1])
    assert whole.ids[: len(prompt)] == prompt
    assert all(whole.learned[len(prompt) :])


def test_a_turn_cannot_smuggle_in_a_special_token() -> None:
    with pytest.raises(RefusedError, match="special token"):
        demo_tokenizer().document(["a<|eos|>b", "c"])


def test_broken_utf_8_is_shown_and_not_fatal() -> None:
    assert demo_tokenizer().decode([0xC3, 0x28, EOS]) == "\ufffd(<|eos|>"


@pytest.mark.parametrize("name", tokenizer.REQUIRED)
def test_a_missing_file_is_refused_by_name(directory: Path, name: str) -> None:
    """B089 (the seed's own failure; ray-project/ray PR#62121): a staged tokenizer without its chat template."""
    (directory / name).unlink()
    with pytest.raises(RefusedError, match=name):
        tokenizer.load(directory)


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refusal:
        tokenizer.load(tmp_path / "absent")
    assert all(name in str(refusal.value) for name in tokenizer.REQUIRED)


def test_the_identity_covers_every_file(directory: Path) -> None:
    before = tokenizer.load(directory).identity
    assert before == demo_tokenizer().identity
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "x.jinja").write_text("{{ bos_token }}")
    with_more = tokenizer.load(directory).identity
    template = directory / tokenizer.TEMPLATE
    template.write_bytes(template.read_bytes() + b"\n")
    assert len({before, with_more, tokenizer.load(directory).identity}) == 3


def test_the_template_really_renders(directory: Path) -> None:
    (directory / tokenizer.TEMPLATE).write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content|upper }}{% endfor %}"
    )
    assert tokenizer.load(directory).document(["ab", "cd"]).ids == (BOS, *b"ABCD")


def test_a_template_that_rewrites_its_beginning_is_refused(directory: Path) -> None:
    (directory / tokenizer.TEMPLATE).write_text(
        "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RefusedError, match="turn 2"):
        tokenizer.load(directory).document(["a", "b"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{% for m in messages %}", MalformedError),
        ("{{ ''.__class__.__mro__ }}", RefusedError),
        ("{{ raise_exception('no such role') }}", RefusedError),
    ],
)
def test_a_template_that_is_broken_or_reaches_out_is_an_error_of_ours(
    directory: Path, text: str, error: type[Exception]
) -> None:
    (directory / tokenizer.TEMPLATE).write_text(text)
    with pytest.raises(error, match=r"chat_template\.jinja"):
        tokenizer.load(directory).document(["a", "b"])


def test_another_vocabulary_is_refused(directory: Path) -> None:
    path = directory / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(described))
    with pytest.raises(MalformedError, match=r"tokenizer\.json"):
        tokenizer.load(directory)
    path.write_text("{")
    with pytest.raises(MalformedError, match="not JSON"):
        tokenizer.load(directory)


def test_the_directory_is_one_that_the_tokenizers_library_reads(directory: Path) -> None:
    library = pytest.importorskip("tokenizers")
    theirs = library.Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|bos|>naïve ☃\n\x00 <|sep|>ok<|eos|>"
    assert theirs.encode(text, add_special_tokens=False).ids == demo_tokenizer().encode(text)
    assert theirs.get_vocab_size() == VOCABULARY
