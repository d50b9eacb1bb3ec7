"""Jacobi decoding: the draft is what the target predicted for these positions in its last pass."""

import torch

from draftsmith import speculative_generate
from draftsmith.decode.draft import TargetOutputs
from draftsmith.decode.jacobi import Jacobi


def jacobi_by_hand(model, prompt, count, width, pad):
    """Full passes over the text and guesses; the guesses of every step."""
    tokens, guesses, seen = list(prompt), [], []
    while len(tokens) < len(prompt) + count:
        guesses = (guesses + [pad] * width)[:width]
        seen.append(guesses)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens + guesses]), use_cache=False).logits[0]
        predicted = logits[len(tokens) - 1 :].argmax(-1).tolist()
        right = next((i for i, guess in enumerate(guesses) if guess != predicted[i]), width)
        tokens += predicted[: right + 1]
        guesses = predicted[right + 1 :]
    return seen


class Recording(Jacobi):
    def start(self, *args):
        super().start(*args)
        self.drafts = []

    def propose(self, *args):
        draft = super().propose(*args)
        self.drafts.append(draft.tokens.tolist())
        return draft


def test_the_draft_is_the_last_passes_own_predictions(tiny_llama, reference):
    target, prompt = tiny_llama(seed=1), reference.prompt_of(6, 1)
    drafter = Recording(pad_id=7)
    speculative_generate(
        target, drafter, torch.tensor([prompt]), max_new_tokens=40, num_speculative_tokens=4, eos_token_id=[]
    )
    expected = jacobi_by_hand(target, prompt, 40, 4, pad=7)
    whole = [draft for (draft,) in drafter.drafts if len(draft) == 4]  # the last ones are cut to the limit
    assert whole == expected[: len(whole)]
    assert len(whole) > 10
    assert any(7 not in draft for draft in whole) or any(draft.count(7) < 4 for draft in whole)


def test_predictions_after_another_rows_longer_draft_are_not_taken(reference):
    """What a row learns must not depend on its neighbours."""
    drafter = reference.started(Jacobi(pad_id=0), [[1], [2]])
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]]), 9).float()
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    accepted = reference.emitted([[3], [3]])
    drafter.observe(accepted, TargetOutputs(torch.zeros(2, 4, dtype=torch.long), valid, {}, logits))
    assert reference.proposed(drafter, 4) == [[4, 5, 6, 0], [4, 0, 0, 0]]


def test_where_the_target_repeats_itself_every_second_pass_is_guessed_whole(tiny_llama, reference):
    """The first pass has nothing but padding to go by, the next has its predictions, and they are right."""
    target = tiny_llama(seed=1)
    with torch.no_grad():
        target.get_output_embeddings().weight.zero_()
    out = speculative_generate(
        target,
        Jacobi(pad_id=3),
        torch.tensor([[5, 5, 5]]),
        max_new_tokens=30,
        num_speculative_tokens=4,
        eos_token_id=[],
    )
    assert out.tokens[0, 3:].tolist() == [0] * 30
    assert (out.stats.accepted, out.stats.drafted) == (20, 40)
