"""Greedy audits: identical answers pass, ties and rounding are told apart from real differences, wherever they are."""

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.eval.audit import audit_drafter
from draftsmith.eval.exact import logits_after, logits_along, rounding
from draftsmith.models.target import as_target

PROMPTS = [[1, 4, 2], [3, 3, 0, 1, 5], [7, 8], [9]]


def changed(change, batch_row=1):
    """An engine whose answers `change` alters: it is given and returns the new tokens of one row of every batch."""

    def generate(target, drafter, input_ids, attention_mask, **settings):
        out = speculative_generate(target, drafter, input_ids, attention_mask, **settings)
        row = min(batch_row, len(out.tokens) - 1)
        start = int(attention_mask[row].sum())
        new = change(out.tokens[row, start : out.lengths[row]].tolist())
        width = max(start + len(new), out.tokens.shape[1])
        tokens = torch.nn.functional.pad(out.tokens, (0, width - out.tokens.shape[1]))
        tokens[row, start : start + len(new)] = torch.tensor(new)
        lengths = out.lengths.clone()
        lengths[row] = start + len(new)
        return out._replace(tokens=tokens, lengths=lengths)

    return generate


def greedy(target, drafter, **settings):
    return audit_drafter(target, drafter, PROMPTS, **{"max_new_tokens": 12, "batch_size": 4, **settings})


def test_identical_answers_pass_in_any_batch(tiny_gemma3):
    target, drafter = tiny_gemma3(seed=1), tiny_gemma3(seed=1, layers=2)
    for batch_size in (1, 4):
        result = greedy(target, drafter, batch_size=batch_size, max_new_tokens=20)
        assert result.passed
        assert "4 of 4 answers (80 tokens in all)" in result.lines[-2]
        assert result.lines[-1] == "PASSED: the output is the target's"


def test_repetition_penalty_is_part_of_what_is_compared(tiny_llama):
    target = tiny_llama(seed=1)
    sampling = Sampling(repetition_penalty=1.5)
    assert greedy(target, tiny_llama(seed=2), sampling=sampling).passed

    def forgetful(*args, repetition_penalty, **settings):
        return speculative_generate(*args, **settings)

    assert not greedy(target, tiny_llama(seed=2), sampling=sampling, decode=forgetful).passed


def test_a_wrong_token_is_real_and_named_with_prompt_position_and_margin(tiny_llama):
    result = greedy(
        tiny_llama(seed=1),
        tiny_llama(seed=2),
        decode=changed(lambda tokens: [*tokens[:5], (tokens[5] + 1) % 64, *tokens[6:]]),
        names=["a", "b", "c", "d"],
    )
    assert not result.passed
    (line,) = [line for line in result.lines[:-1] if line.startswith("FAILED")]
    assert line.startswith("FAILED b, position 5: token ")
    assert "top-2 margin" in line
    assert "a REAL difference" in line
    assert "1 really" in result.lines[-2]


def with_a_tie(model):
    """The output rows of ids 10 and 11 made equal to that of the id which is chosen first after PROMPTS[1]."""
    with torch.no_grad():
        first = int(model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1].argmax())
        weight = model.lm_head.weight.clone()
        weight[10] = weight[11] = weight[first]
        model.lm_head.weight = torch.nn.Parameter(weight)
    return model


def test_a_tie_is_no_fault_but_what_follows_it_is_still_judged(tiny_llama):
    target = with_a_tie(tiny_llama(seed=1, tie_word_embeddings=False))
    after_tie = plain_generate(target, torch.tensor([[*PROMPTS[1], 11]]), max_new_tokens=11, eos_token_id=[])
    other = [11, *after_tie.tokens[0, len(PROMPTS[1]) + 1 :].tolist()]
    result = greedy(target, tiny_llama(seed=2), decode=changed(lambda tokens: other))
    assert result.passed, result.lines
    assert any(
        line.startswith("prompt 1, position 0: token 11") and "a tie or rounding" in line for line in result.lines
    )
    assert "3 of 4" in result.lines[-2]
    broken = [*other[:8], (other[8] + 5) % 64, *other[9:]]
    result = greedy(target, tiny_llama(seed=2), decode=changed(lambda tokens: broken))
    assert not result.passed
    assert any("a tie or rounding, then position 8" in line for line in result.lines)


def test_bfloat16_differences_between_passes_are_rounding(tiny_llama):
    """Speculative and plain passes have other shapes, so that bfloat16 answers part; that is not the rule's doing."""
    target = tiny_llama(seed=1, layers=3).bfloat16()
    prompts = torch.randint(64, (24, 6), generator=torch.Generator().manual_seed(0)).tolist()
    result = audit_drafter(target, tiny_llama(seed=1, layers=3), prompts, max_new_tokens=16, batch_size=24)
    assert result.passed, result.lines


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: tokens[:-3], "ends after 9 tokens without an end-of-sequence token"),
        (lambda tokens: [*tokens, 1], "has 13 tokens where 12 were allowed"),
        (lambda tokens: [], "ends after 0 tokens"),
    ],
)
def test_a_wrong_length_is_real(tiny_llama, change, words):
    target = tiny_llama(seed=1)
    follows = (
        plain_generate(target, torch.tensor([PROMPTS[1]]), max_new_tokens=13, eos_token_id=[]).tokens[0, -1].item()
    )
    result = greedy(
        target, tiny_llama(seed=2), decode=changed(lambda t: [*change(t)[:12], *([follows] * (len(change(t)) > 12))])
    )
    assert not result.passed
    assert any(words in line for line in result.lines), result.lines


def test_going_on_after_the_end_of_sequence_is_real(tiny_llama):
    target = tiny_llama(seed=1)
    out = plain_generate(target, torch.tensor([PROMPTS[1]]), max_new_tokens=12, eos_token_id=[])
    answer = out.tokens[0, len(PROMPTS[1]) :].tolist()
    eos = answer[3]
    assert greedy(target, tiny_llama(seed=2), eos_token_id=eos).passed
    result = greedy(target, tiny_llama(seed=2), eos_token_id=eos, decode=changed(lambda tokens: answer))
    assert not result.passed
    assert any(
        f"goes on after the end-of-sequence token at position {answer.index(eos)}" in line for line in result.lines
    )


def test_where_nothing_was_drafted_nothing_was_shown(tiny_llama):
    result = audit_drafter(tiny_llama(seed=1), "prompt_lookup", [[1, 2, 3]], max_new_tokens=2)
    assert not result.passed
    assert any("NOTHING WAS DRAFTED" in line for line in result.lines)


def test_no_prompts_and_no_room_are_bad_input(tiny_llama):
    with pytest.raises(BadInput, match="at least one prompt"):
        audit_drafter(tiny_llama(), tiny_llama(), [])
    with pytest.raises(BadInput, match="no room for 2 more in a context of 16"):
        audit_drafter(
            tiny_llama(max_position_embeddings=16), tiny_llama(), [[1] * 15], sampling=Sampling(1.0), joint_tokens=2
        )


def test_logits_are_the_models_own_with_the_penalty_of_each_context(tiny_gpt2):
    model = tiny_gpt2(seed=1)
    prompt, answer = [1, 2, 3], [4, 2, 9, 9]
    with torch.no_grad():
        raw = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    along = logits_along(as_target(model), prompt, answer, Sampling(repetition_penalty=2.0))
    for i in range(len(answer)):
        context = prompt + answer[:i]
        expected = raw[len(context) - 1].clone()
        for token in set(context):
            expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
        torch.testing.assert_close(along[i], expected, rtol=0, atol=1e-5)
        alone = logits_after(as_target(model), [context], Sampling(repetition_penalty=2.0))[0]
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


def test_rounding_is_small_in_float32_and_larger_in_bfloat16(tiny_llama):
    context = [1, 2, 3, 4, 5, 6, 7, 8]
    exact = rounding(as_target(tiny_llama(seed=1)), context)
    coarse = rounding(as_target(tiny_llama(seed=1).bfloat16()), context)
    assert 0 < exact < 1e-4
    assert 100 * exact < coarse < 1
