"""Tokens that were begun (run through the first layers only) and finished in a later pass, in a ragged batch."""

import pytest
import torch

from draftsmith.decode.forward import CachedLM
from draftsmith.models.views import TwoParts

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]


def random_tokens(count, seed):
    return torch.randint(64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_finishing_gives_the_logits_and_the_cache_of_one_pass(family, request):
    """Drafts of several lengths, begun token by token and kept in part, past the sliding windows."""
    model = request.getfixturevalue(family)(layers=3)
    parts = TwoParts(model, 2)
    rows = [random_tokens(n, seed=n) for n in (5, 9, 2)]
    shared, plain = CachedLM(model, 3, hidden_states=[2, -1]), CachedLM(model, 3, hidden_states=[-1])
    ids = torch.zeros(3, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    for lm in (shared, plain):
        lm.prefill(ids, [len(row) for row in rows])
    for step in range(6):
        fed = torch.tensor([random_tokens(4, seed=100 * step + i) for i in range(3)])
        begun = [0, 1, 3, 4, 2, 3][step]
        pieces = [shared.begin(fed[:, i : i + 1], parts)[0] for i in range(begun)]
        out, expected = shared.feed(fed), plain.feed(fed)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(out.hidden_states[-1], expected.hidden_states[-1], atol=2e-5, rtol=1e-4)
        if pieces:
            assert torch.equal(out.hidden_states[2][:, :begun], torch.cat(pieces, 1))
        counts = [(step + i) % 5 for i in range(3)]
        for lm in (shared, plain):
            lm.keep(torch.tensor(counts), counts)
    for layer in range(3):
        for row, length in enumerate(shared.host_lengths):
            for found, wanted in zip(
                shared.cache.visible(layer, row, length), plain.cache.visible(layer, row, length), strict=True
            ):
                torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_what_was_begun_can_be_forgotten(tiny_llama):
    model = tiny_llama(layers=3)
    lm, parts = CachedLM(model, 1), TwoParts(model, 1)
    lm.prefill(torch.tensor([[5, 6, 7]]), [3])
    lm.begin(torch.tensor([[8, 9]]), parts)
    lm.forget_pending()
    out = lm.feed(torch.tensor([[1]]))
    expected = model(input_ids=torch.tensor([[5, 6, 7, 1]])).logits[:, -1:]
    torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=1e-4)


def test_only_the_hidden_states_between_the_parts_and_the_last_are_known(tiny_llama):
    model = tiny_llama(layers=3)
    lm = CachedLM(model, 1, hidden_states=[2, 1])
    lm.prefill(torch.tensor([[5]]), [1])
    lm.begin(torch.tensor([[8]]), TwoParts(model, 1))
    with pytest.raises(ValueError, match=r"layers \[2\]"):
        lm.feed(torch.tensor([[8]]))
