"""The evaluation prompts and the target's answers to them."""

import json

from draftsmith.data.chats import encode_prompt
from draftsmith.decode.sampling import Sampling
from draftsmith.models.target import load_target
from draftsmith.recipe import EvaluateSection
from draftsmith.train.held_out import HeldOut


def test_a_prompt_that_nearly_fills_the_context_shortens_its_own_answer_alone(chat_folder, tmp_path):
    target = load_target(str(chat_folder / "model"))
    prompts = [json.loads(line) for line in (chat_folder / "prompts.jsonl").read_text().splitlines()][:4]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    assert target.tokenizer is not None
    words = "apples"
    while len(encode_prompt(target.tokenizer, [{"role": "user", "content": words + " apples"}])) < 253:
        words += " apples"
    long = {"question_id": 99, "category": "odd", "turns": [words]}
    (tmp_path / "more.jsonl").write_text((tmp_path / "few.jsonl").read_text() + json.dumps(long) + "\n")
    few, more = (
        HeldOut(
            EvaluateSection(prompts=str(tmp_path / name), max_new_tokens=16),
            target,
            Sampling(0.0),
            batch_size=2,
            seed=0,
        ).answers
        for name in ("few.jsonl", "more.jsonl")
    )
    room = 256 - len(more[-1].prompt)
    assert 0 < room < max(len(answer.tokens) for answer in few)
    assert [answer.tokens for answer in more[:-1]] == [answer.tokens for answer in few]
    assert 1 <= len(more[-1].tokens) <= room
