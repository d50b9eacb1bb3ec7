"""Loss masks: what is supervised, decoded again, for several styles of template and of tokenizer."""

from itertools import groupby

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftsmith.data.chats import (
    Encoded,
    encode_chat,
    encode_prompt,
    encode_response,
    encode_text,
    end_of_turn_ids,
    user_header,
)
from draftsmith.errors import BadInput

CHAT = [
    {"role": "user", "content": "What is seven times eight?"},
    {"role": "assistant", "content": "It is fifty-six."},
    {"role": "user", "content": "Line two."},
    {"role": "assistant", "content": "A longer answer:\n\n1. first"},
]
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}
ENDS |= dict.fromkeys(("thinking", "marked", "marked_content_only"), "<|im_end|>")


def supervised(tokenizer, encoded: Encoded) -> list[str]:
    """The runs of supervised tokens, each as text."""
    pairs = zip(encoded.input_ids, encoded.loss_mask, strict=True)
    return [tokenizer.decode([i for i, _ in run]) for learned, run in groupby(pairs, lambda pair: pair[1]) if learned]


@pytest.mark.parametrize("kind", ["bytes", "lines", "metaspace"])
@pytest.mark.parametrize("style", ENDS)
def test_answers_and_ends_of_turns_are_supervised_and_nothing_else(make_tokenizer, style, kind):
    tokenizer = make_tokenizer(style, kind)
    encoded = encode_chat(tokenizer, CHAT, 1000)
    runs = [run.strip() for run in supervised(tokenizer, encoded)]  # Mistral's answers begin with a space of their own
    assert runs == [CHAT[1]["content"] + ENDS[style], CHAT[3]["content"] + ENDS[style]]
    assert encoded.input_ids == tokenizer.apply_chat_template(CHAT)["input_ids"]


@pytest.mark.parametrize("style", ["chatml", "gemma", "mistral", "marked", "plain_roles"])
def test_what_precedes_the_answer_is_what_serving_gives(make_tokenizer, style):
    tokenizer = make_tokenizer(style)
    encoded = encode_chat(tokenizer, CHAT[:2], 1000)
    first = encoded.loss_mask.index(True)
    prompt = encode_prompt(tokenizer, CHAT[:1])
    assert encoded.input_ids[:first] == prompt
    assert encode_prompt(tokenizer, CHAT[0]["content"]) == prompt


@pytest.mark.parametrize("style", ["chatml", "marked", "marked_content_only"])
def test_system_prompt_is_not_supervised(make_tokenizer, style):
    tokenizer = make_tokenizer(style)
    chat = [{"role": "system", "content": "A longer answer:"}, *CHAT[:2]]
    assert supervised(tokenizer, encode_chat(tokenizer, chat, 1000)) == ["It is fifty-six.<|im_end|>"]


def test_template_that_strips_earlier_thinking(make_tokenizer):
    tokenizer = make_tokenizer("thinking")
    thought = {"role": "assistant", "content": "<think>\nthinking\n</think>\n\nIt is fifty-six."}
    earlier = supervised(tokenizer, encode_chat(tokenizer, [CHAT[0], thought, *CHAT[2:]], 1000))
    # Not the empty thinking that the template writes into the newest answer: no message holds it.
    assert earlier == ["It is fifty-six.<|im_end|>", "A longer answer:\n\n1. first<|im_end|>"]
    newest = supervised(tokenizer, encode_chat(tokenizer, [*CHAT[:3], thought], 1000))
    assert newest == ["It is fifty-six.<|im_end|>", "<think>\nthinking\n</think>\n\nIt is fifty-six.<|im_end|>"]


def test_template_that_trims_content(make_tokenizer):
    tokenizer = make_tokenizer("llama3")
    chat = [CHAT[0], {"role": "assistant", "content": "  \n It is fifty-six. \n"}]
    assert supervised(tokenizer, encode_chat(tokenizer, chat, 1000)) == ["It is fifty-six.<|eot_id|>"]


def test_repeated_and_nested_texts_do_not_confuse_the_spans(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    same = "assistant\nANSWERMARK <|im_end|>\n<|im_start|>assistant\n"
    chat = [{"role": role, "content": same} for role in ("user", "assistant", "user", "assistant")]
    assert supervised(tokenizer, encode_chat(tokenizer, chat, 1000)) == [same + "<|im_end|>"] * 2


def test_token_that_merges_header_and_answer_is_not_supervised(make_tokenizer):
    tokenizer = make_tokenizer("chatml", "lines")
    chat = [CHAT[0], {"role": "assistant", "content": "\nLine two."}]
    encoded = encode_chat(tokenizer, chat, 1000)
    first = encoded.loss_mask.index(True)
    assert tokenizer.decode(encoded.input_ids[first - 1]).startswith("\n\nL"), "nothing merges: nothing is shown"
    merged = tokenizer.decode(encoded.input_ids[first - 1])
    assert supervised(tokenizer, encoded) == [("\n\nLine two.<|im_end|>").removeprefix(merged)]


def test_token_that_merges_answer_and_next_header_is_not_supervised(make_tokenizer):
    tokenizer = make_tokenizer("plain_roles", "lines")
    chat = [CHAT[0], {"role": "assistant", "content": "Line one.\n\n\n"}, *CHAT[2:]]
    encoded = encode_chat(tokenizer, chat, 1000)
    runs = supervised(tokenizer, encoded)
    merged = tokenizer.decode(encoded.input_ids[encoded.loss_mask.index(True) + 1])
    assert merged == "\n\n", "the answer's last line end and the template's no longer merge: nothing is shown"
    assert runs[0] == "Line one.\n\n"


def test_special_tokens_that_swallow_white_space(make_tokenizer):
    tokenizer = make_tokenizer("chatml", rstrip=True)
    assert supervised(tokenizer, encode_chat(tokenizer, CHAT[:2], 1000)) == ["It is fifty-six.<|im_end|>"]


def test_eos_ends_a_chat_whose_template_writes_no_end(make_tokenizer):
    tokenizer = make_tokenizer("plain_roles")
    runs = supervised(tokenizer, encode_chat(tokenizer, CHAT, 1000))
    assert [run.strip() for run in runs] == ["It is fifty-six.", "A longer answer:\n\n1. first<|endoftext|>"]


def test_content_in_several_scripts_is_supervised_whole(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    answer = "  漢字 🙂 é  \n "
    encoded = encode_chat(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}], 1000)
    assert supervised(tokenizer, encoded) == [answer + "<|im_end|>"]


words = st.text(st.sampled_from("ab \n.é漢<|>/"), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(words.filter(str.strip), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
@example(turns=["a", "<|im_end|>", "\n\n", " a"])
@pytest.mark.parametrize("style", ["chatml", "mistral", "marked"])
def test_any_content_is_supervised_but_for_merged_tokens(make_tokenizer, turns, style):
    tokenizer = make_tokenizer(style)
    chat = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    encoded = encode_chat(tokenizer, chat, 1000)
    runs = supervised(tokenizer, encoded)
    assert not encoded.loss_mask[0]
    assert len(runs) == len(turns) // 2
    for run, answer in zip(runs, turns[1::2], strict=True):
        # A merged token may take leading white space along, or give Mistral's space to the answer.
        assert run.strip() == (answer + ENDS[style]).strip()


def test_no_template_continues_plain_text(make_tokenizer):
    tokenizer = make_tokenizer("none")
    encoded = encode_chat(tokenizer, CHAT, 1000)
    runs = [run.strip() for run in supervised(tokenizer, encoded)]
    assert runs == ["It is fifty-six.", "A longer answer:\n\n1. first</s>"]
    assert tokenizer.decode(encode_prompt(tokenizer, ["Line one.", "Line two."])) == "Line one.\nLine two."
    assert encode_prompt(tokenizer, CHAT[:3]) == encoded.input_ids[: len(encode_prompt(tokenizer, CHAT[:3]))]


def test_no_template_keeps_the_white_space_that_is_there(make_tokenizer):
    tokenizer = make_tokenizer("none", eos=None)
    chat = [{"role": "user", "content": "def f():\n"}, {"role": "assistant", "content": "    return 1\n"}]
    encoded = encode_chat(tokenizer, chat, 1000)
    assert tokenizer.decode(encoded.input_ids) == "def f():\n    return 1\n"
    assert supervised(tokenizer, encoded) == ["    return 1\n"]


def test_plain_text_is_supervised_from_its_second_token_and_split(make_tokenizer):
    tokenizer = make_tokenizer("none")
    whole = encode_text(tokenizer, "The market opens an hour after the ferry leaves.", 1000)
    assert len(whole) == 1
    assert whole[0].loss_mask == [False] + [True] * (len(whole[0].input_ids) - 1)
    assert whole[0].input_ids[-1] == tokenizer.eos_token_id
    pieces = encode_text(tokenizer, "The market opens an hour after the ferry leaves.", 3)
    assert [i for piece in pieces for i in piece.input_ids] == whole[0].input_ids[: 3 * len(pieces)]
    assert all(len(piece.input_ids) <= 3 for piece in pieces)


def test_cut_at_max_length_says_how_much(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    whole = encode_chat(tokenizer, CHAT, 1000)
    cut = encode_chat(tokenizer, CHAT, len(whole.input_ids) - 5)
    assert cut == Encoded(whole.input_ids[:-5], whole.loss_mask[:-5], 5)
    with pytest.raises(BadInput, match="max_length"):
        encode_chat(tokenizer, CHAT, 4)


@pytest.mark.parametrize(
    ("style", "chat", "reason"),
    [
        ("hiding", CHAT, "writes none of the chat's assistant turns"),
        ("chatml", CHAT[:1], "no assistant turn"),
        ("gemma", [{"role": "system", "content": "x"}, *CHAT], "no system role here"),
        ("mistral", CHAT[1:], "roles must alternate"),
        ("chatml", [CHAT[0], {"role": "assistant", "content": None}], "no text content"),
        ("chatml", [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{}]}], "tool_calls"),
    ],
)
def test_refused_with_a_reason(make_tokenizer, style, chat, reason):
    with pytest.raises(BadInput, match=reason):
        encode_chat(make_tokenizer(style), chat, 1000)


def test_template_whose_text_around_an_answer_depends_on_it_is_refused(make_tokenizer):
    template = "{% for m in messages %}{{ m.role + m.content|length|string + m.content + '\n' }}{% endfor %}"
    with pytest.raises(BadInput, match="depends on its content"):
        encode_chat(make_tokenizer(template=template), CHAT, 1000)
    repeating = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"
    with pytest.raises(BadInput, match="more than once"):
        encode_chat(make_tokenizer(template=repeating), CHAT, 1000)


def test_markers_that_enclose_nothing_are_refused(make_tokenizer):
    template = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(BadInput, match="enclose nothing"):
        encode_chat(make_tokenizer(template=template), CHAT, 1000)


@pytest.mark.parametrize(
    ("style", "header"),
    [
        ("chatml", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"),
        ("gemma", "<bos><start_of_turn>user\n"),
        ("mistral", "<s>[INST]"),
        ("none", "</s>"),
    ],
)
def test_user_header(make_tokenizer, style, header):
    tokenizer = make_tokenizer(style)
    assert tokenizer.decode(user_header(tokenizer)) == header


def test_end_of_turn_ids(make_tokenizer):
    def ends(style, role="assistant", **options):
        tokenizer = make_tokenizer(style, **options)
        return tokenizer.convert_ids_to_tokens(list(end_of_turn_ids(tokenizer, role)))

    assert ends("chatml") == ["<|im_end|>"]
    assert ends("llama3", eos="<|endoftext|>") == ["<|eot_id|>", "<|endoftext|>"]
    assert ends("mistral", "user") == ["[/INST]", "</s>"]
    assert ends("none") == ["</s>"]


def test_response_of_the_target_is_supervised_as_written():
    assert encode_response([5, 6, 7, 2], 2) == Encoded([5, 6, 7, 2], [False, False, True, True])
    with pytest.raises(BadInput, match="prompt of 2"):
        encode_response([5, 6], 2)
