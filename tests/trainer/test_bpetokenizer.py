"""Trained vocabularies: what is learned, where texts are divided, and a directory of any bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ckptstore.errors import MalformedError, NotFoundError, RefusedError
from tests.support.demo import demo_cohorts
from tests.support.tinymodel import CHAT, open_tiny
from trainer.data import tokenizer
from trainer.data.conversation import Conversations
from trainer.data.template import TEMPLATE, compile_template
from trainer.data.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return open_tiny(tmp_path).tokenizer()


@pytest.fixture
def tiny(files: dict[str, bytes]) -> Tokenizer:
    pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    return tokenizer.from_files(files)


def by_letters(template: str, end: str) -> Conversations:
    """A tokenizer of letters, for what does not depend on a vocabulary."""
    return Conversations(compile_template(template.encode(), {}), lambda text: [ord(c) for c in text], ("#",), ord(end))


def test_an_answer_and_its_end_are_learned_and_not_what_the_template_puts_around_them() -> None:
    rendered = by_letters(CHAT.replace("<|im_start|>", "[").replace("<|im_end|>", "#"), "#")
    encoded = rendered.document(["q", "an", "r", "b"])
    text = "".join(map(chr, encoded.ids))
    assert text == "[system\nBe brief.#\n[user\nq#\n[assistant\nan#\n[user\nr#\n[assistant\nb#"
    learned = "".join(chr(token) for token, flag in zip(encoded.ids, encoded.learned, strict=True) if flag)
    assert learned == "an#b#"


def test_a_prompt_is_how_its_document_begins_also_where_the_template_asks_for_an_answer() -> None:
    rendered = by_letters(CHAT.replace("<|im_end|>", "#"), "#")
    for turns in (["q", "a"], ["q", "a", "r", "b"]):
        prompt, whole = rendered.prompt(turns[:-1]), rendered.document(turns)
        assert whole.ids[: len(prompt)] == prompt
        assert not any(whole.learned[len(prompt) - 1 : len(prompt)])
        assert all(whole.learned[len(prompt) :])


def test_a_template_that_leaves_answers_out_is_refused() -> None:
    rendered = by_letters("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "#")
    with pytest.raises(RefusedError, match="turn 2 is not rendered"):
        rendered.document(["q", "a"])


def test_a_template_that_changes_with_the_request_for_an_answer_is_refused() -> None:
    rendered = by_letters("{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}", "#")
    with pytest.raises(RefusedError, match="turn 2 changes"):
        rendered.document(["q", "a"])


def test_text_comes_back(tiny: Tokenizer) -> None:
    for text in ("the value", '{"value":42}', "naïve ☃\n\x00", SYSTEM):
        assert tiny.decode(tiny.encode(text)) == text
    assert len(tiny.encode("the value")) == 3  # the, Ġ, value
    assert tiny.encode("42") == tiny.encode("4") + tiny.encode("2")
    with pytest.raises(MalformedError, match=r"\[0, 320\)"):
        tiny.decode([320])


def test_a_document_is_divided_as_if_it_were_rendered_at_once(tiny: Tokenizer) -> None:
    render = compile_template(CHAT.encode(), {})
    for documents in demo_cohorts().sets().values():
        for document in documents[:8]:
            whole = tiny.encode(render(document.turns))
            encoded = tiny.document(document.turns)
            assert tuple(whole[: len(encoded.ids)]) == encoded.ids
            assert tiny.decode(whole[len(encoded.ids) :]) == "\n"


def test_an_answer_that_begins_with_spaces_keeps_its_prompt(tiny: Tokenizer) -> None:
    """Divided at once, the line end of the prompt would be joined to them."""
    turns = ("q", "  a")
    assert tiny.document(turns).ids[: len(tiny.prompt(turns[:1]))] == tiny.prompt(turns[:1])
    assert tiny.decode([i for i, l in zip(*_parts(tiny, turns), strict=True) if l]) == "  a<|im_end|>"  # noqa: E741


def _parts(tiny: Tokenizer, turns: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    encoded = tiny.document(turns)
    return encoded.ids, encoded.learned


def test_ends_and_padding_are_those_that_the_files_name(tiny: Tokenizer, files: dict[str, bytes]) -> None:
    assert (tiny.end, tiny.pad, tiny.special("bos_token"), tiny.special("sep_token")) == (2, 2, 1, None)
    named = {**json.loads(files["special_tokens_map.json"]), "eos_token": {"content": "<|endoftext|>"}}
    other = tokenizer.from_files({**files, "special_tokens_map.json": json.dumps(named).encode()})
    assert (other.end, other.vocabulary) == (0, 320)


def test_a_turn_cannot_smuggle_in_a_special_token(tiny: Tokenizer) -> None:
    with pytest.raises(RefusedError, match="special token"):
        tiny.document(["a<|im_end|>b", "c"])


@pytest.mark.parametrize(
    ("name", "pattern", "other"),
    [
        ("tokenizer.json", rb'"type":"BPE"', b'"type":"XYZ"'),
        ("tokenizer.json", rb'"merges":\[\[', b'"merges":[["nothing","else"],['),
        ("special_tokens_map.json", rb"<\|im_end\|>", b"<|none|>"),
        ("special_tokens_map.json", rb".*", b"[]"),
    ],
)
def test_a_directory_that_describes_no_tokenizer_is_refused(
    tiny: Tokenizer, files: dict[str, bytes], name: str, pattern: bytes, other: bytes
) -> None:
    changed = re.sub(pattern, other, files[name], count=1)
    assert changed != files[name]
    with pytest.raises(MalformedError):
        tokenizer.from_files({**files, name: changed})


def test_without_an_end_token_no_answer_would_end(tiny: Tokenizer, files: dict[str, bytes]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    bare = {**files, "special_tokens_map.json": b"{}", "tokenizer_config.json": json.dumps(config).encode()}
    with pytest.raises(MalformedError, match="eos_token"):
        tokenizer.from_files(bare)


def test_where_the_library_is_absent_it_is_named(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(NotFoundError, match="pip install tokenizers"):
        tokenizer.from_files(files)


def test_the_identity_covers_the_vocabulary(tiny: Tokenizer, files: dict[str, bytes]) -> None:
    changed = files["tokenizer.json"].replace(b"<unused0>", b"<unusedX>")
    assert tokenizer.from_files({**files, "tokenizer.json": changed}).identity != tiny.identity
    assert tokenizer.from_files({**files, TEMPLATE: files[TEMPLATE] + b" "}).identity != tiny.identity
