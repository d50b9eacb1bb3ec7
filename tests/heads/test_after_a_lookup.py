"""Heads and EAGLE behind a lookup: their states follow the target's whoever drafted a row."""

from typing import Any

import pytest
import torch

from draftsmith import checks as files
from draftsmith import load_drafter
from draftsmith.decode.drafters import lookup_first
from draftsmith.decode.lookup_first import LookupFirst
from draftsmith.decode.loop import decode_steps
from draftsmith.decode.packed import is_packed, use_backend
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.heads.eagle import eagle_in_training, save_eagle
from draftsmith.heads.eagle_drafter import Eagle
from draftsmith.heads.load import load_served
from draftsmith.heads.make import heads_in_training
from draftsmith.models.target import Target, as_target
from draftsmith.recipe import EagleDrafter, HydraDrafter, MedusaDrafter, ObjectiveSection

SECTIONS = {
    "medusa": MedusaDrafter(num_heads=3),
    "hydra prefix": HydraDrafter(num_heads=3, prefix_attention=True),
    "eagle 1": EagleDrafter(version=1),
    "eagle 3": EagleDrafter(version=3),
}
LOOKUP = "prompt_lookup:min_ngram=1"


def drafter_for(section, target) -> Any:
    torch.manual_seed(0)
    make: Any = eagle_in_training if isinstance(section, EagleDrafter) else heads_in_training
    return make(section, ObjectiveSection(), target, None, Sampling()).drafter


@pytest.mark.parametrize("tree", [None, [2, 1, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_greedy_output_is_plain_greedy_output(section, tree, tiny_gemma3, checks):
    """In a ragged batch, past the sliding window, with a prompt of one token."""
    target = as_target(tiny_gemma3(layers=3))
    both = lookup_first(LOOKUP, drafter_for(section, target))
    stats = checks.check_greedy(target, both, [9, 1, 5], new=40, num_speculative_tokens=3, tree=tree)
    assert stats.drafted > 0
    assert 0 < both.passes < 3 * both.steps


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_sampled_output_has_the_targets_joint_distribution(section, tiny_llama, checks):
    target = as_target(tiny_llama(vocab_size=6, layers=2, seed=5))
    both = lookup_first(LOOKUP, drafter_for(section, target))
    checks.check_sampled(target, both, {"temperature": 0.8, "top_p": 0.95, "num_speculative_tokens": 2})


class Checked(Eagle):
    """Compares its output, after every draft, with that of one pass over the whole text."""

    target: Target
    text: list[int]
    drafts: int

    def propose(self, num_tokens, sampling, generators):
        draft = super().propose(num_tokens, sampling, generators)
        ids = torch.tensor([self.text])
        states = self.target.model(input_ids=ids, output_hidden_states=True).hidden_states
        hidden = {layer: states[layer] for layer in self.wants["hidden_states"]}
        expected = self.outputs_over(ids, hidden)[0, -1]
        torch.testing.assert_close(self.outputs[0], expected, atol=1e-4, rtol=1e-3)
        self.drafts += 1
        return draft


@pytest.mark.parametrize("version", [1, 3])
@torch.no_grad()
def test_eagles_features_are_the_targets_after_steps_that_the_lookup_drafted(version, tiny_llama):
    target = as_target(tiny_llama(layers=3, vocab_size=12))
    made = drafter_for(EagleDrafter(version=version), target)
    checked = Checked(made.model, target, made.wants["hidden_states"])
    checked.target, checked.text, checked.drafts = target, [1, 2, 3], 0
    both = lookup_first(LOOKUP, checked)
    for step in decode_steps(
        target,
        both,
        pad_rows([[1, 2, 3]], target),
        sampling=Sampling(1.0),
        max_new_tokens=40,
        num_speculative_tokens=3,
        eos_token_id=[],
    ):
        checked.text += step.tokens[0]
    assert 0 < checked.drafts < both.steps


def test_by_name_it_is_loaded_and_served_with_the_others_weights_packed(tiny_llama, tmp_path):
    target = as_target(tiny_llama(layers=3))
    folder = tmp_path / "a+b"
    save_eagle(EagleDrafter(), drafter_for(EagleDrafter(), target).model, target, folder)
    name = f"prompt_lookup:min_ngram=3+{folder}"
    files.check_drafter(name, "DRAFTER")
    use_backend(target.model, "packed")
    served = load_served(name, target)
    assert isinstance(served, LookupFirst)
    assert vars(served.lookup)["min_ngram"] == 3
    assert served.module is not None
    assert is_packed(served.module)
    with pytest.raises(BadInput, match="no such file or folder"):
        files.check_drafter(f"{name}x", "DRAFTER")
    with pytest.raises(BadInput, match=r"lookahead|prompt_lookup"):
        load_drafter(f"prompt_lookup:min_gram=3+{folder}", target)
