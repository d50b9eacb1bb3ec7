"""Streaming: text as it comes, whole characters, accepted draft tokens coloured."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from draftsmith.cli_generate import pieces, show, stream
from draftsmith.errors import BadInput
from draftsmith.eval.options import GenerateOptions


class Letters:
    """A tokenizer by hand: ids are bytes of UTF-8; 0 is special; a leading space is lost, as SentencePiece does."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        text = bytes(i for i in ids if i).decode("utf-8", errors="replace")
        return text.removeprefix(" ")


def test_pieces_join_to_the_text_and_wait_for_whole_characters():
    ids = [*"né €".encode(), 0]
    found = list(pieces(Letters(), [(token, index % 2 == 0) for index, token in enumerate(ids)]))
    assert [text for text, _ in found] == ["n", "é", " ", "€", ""]
    assert found[0][1] is True
    assert [text for text, _ in pieces(Letters(), [(226, False), (130, True)])] == ["\ufffd"], "an end inside one"


def test_drafted_tokens_are_coloured_and_counted(capsys):
    stats = SimpleNamespace(pooled=SimpleNamespace(emitted=3, drafted=4, accepted=1, target_calls=2))
    steps = [
        SimpleNamespace(tokens=[97, 98], drafted=[True, False], stats=stats),
        SimpleNamespace(tokens=[99], drafted=[False], stats=stats),
    ]
    file = io.StringIO()
    show(Letters(), steps, Console(file=file, force_terminal=True, color_system="standard", width=5))
    assert file.getvalue() == "\x1b[32ma\x1b[0mbc\n"
    assert "1 of 4 draft tokens accepted, 1.50 tokens a target pass" in capsys.readouterr().err


def test_a_file_gets_the_answer_character_for_character():
    text = "a\tb\r\n[bold]c\x0b"
    steps = [SimpleNamespace(tokens=[ord(letter) for letter in text], drafted=[False] * len(text), stats=None)]
    file = io.StringIO()
    show(Letters(), steps, Console(file=file, width=5))
    assert file.getvalue() == text + "\n"


def test_a_real_pair_streams_the_targets_own_answer(tmp_path, tiny_llama, tiny_tokenizer, capsys):
    for name, seed in (("target", 0), ("drafter", 0), ("other", 1)):
        tiny_llama(vocab_size=320, seed=seed).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    stream(GenerateOptions(target=str(tmp_path / "target"), drafter="prompt_lookup", prompt="a", max_new_tokens=1))
    capsys.readouterr()  # what libraries print when they are first imported
    said = {}
    for drafter in (None, "drafter", "other", "prompt_lookup"):
        path = str(tmp_path / drafter) if drafter in ("drafter", "other") else drafter
        stream(GenerateOptions(target=str(tmp_path / "target"), drafter=path, prompt="The ferry", max_new_tokens=12))
        said[drafter] = capsys.readouterr()
    for lengths in ("heuristic", "confidence", "auto:most=2"):
        target, drafter = str(tmp_path / "target"), str(tmp_path / "other")
        asked = GenerateOptions(
            target=target, drafter=drafter, prompt="The ferry", max_new_tokens=12, num_speculative_tokens=lengths
        )
        stream(asked)
        said[lengths] = capsys.readouterr()
    assert len({out for out, _ in said.values()}) == 1, "greedy output does not depend on the drafter"
    assert "draft tokens" not in said[None].err
    accepted = said["drafter"].err.split("; ")[1]
    assert accepted.split()[0] == accepted.split()[2], "a copy of the target is always accepted"


def test_a_target_without_a_tokenizer_is_refused(tmp_path, tiny_llama):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="tokenizer"):
        stream(GenerateOptions(target=str(tmp_path), prompt="hi"))
