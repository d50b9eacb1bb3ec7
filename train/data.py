"""From a recipe's `data` section to encoded examples and, where asked, the target's cached outputs."""

from pathlib import Path
from typing import Any, NamedTuple

from ..data.chats import encode_response
from ..data.encoded_set import EncodedSet, encode_examples
from ..data.sources import Example, examples_hash, read_examples
from ..data.store import Store
from ..decode.sampling import Sampling
from ..distill.answers import Amount, AnswerSettings, write_answers
from ..distill.author import writing_dtype
from ..distill.id_frequencies import expected_counts_in
from ..distill.teacher import absolute_layer
from ..distill.teacher_cache import CacheForm, cache_teacher
from ..errors import BadInput
from ..heads.build import cached_layers
from ..models.target import Target
from ..progress import say
from ..recipe import DataSection, Recipe, SamplingSection


class TrainingData(NamedTuple):
    """What the loop reads."""

    encoded: EncodedSet
    cached: Store | None  # the target's outputs at the labels; its sequences are numbered by ``encoded.sources``


def served_sampling(section: SamplingSection) -> Sampling:
    """A recipe's sampling section as the decoder takes it."""
    return Sampling(section.temperature, section.top_k, section.top_p, section.min_p)


def usable_length(max_length: int, context_limit: int | None) -> int:
    """Tokens an example may have: no more than the target can read."""
    if context_limit is None or max_length <= context_limit:
        return max_length
    say(
        f"data.max_length: {max_length:,} tokens, but the target reads {context_limit:,}: longer examples are cut there"
    )
    return context_limit


def read_prompts_or_chats(data: DataSection) -> list[Example]:
    """Examples of every source but ``self``; empty when the target writes all prompts itself."""
    sources = [source for source in data.sources if source != "self"]
    if not sources:
        return []
    return read_examples(sources, data.split, data.limit, require_answers=data.responses == "given")


def tokenizer_of(recipe: Recipe, target: Target) -> Any:
    """The target's tokenizer. Raises BadInput where it has none: no data can be encoded."""
    if target.tokenizer is None:
        raise BadInput(f"target.model: {recipe.target.model} has no tokenizer, so no data can be encoded")
    return target.tokenizer


def prepare_data(recipe: Recipe, target: Target, folder: Path, seconds: float | None) -> TrainingData:
    """Write, or read, what the run trains on. `seconds`: the data's part of a budget in minutes.

    Raises:
        BadInput: whatever is wrong with the data; nothing to learn in it.
    """
    data = recipe.data
    tokenizer = tokenizer_of(recipe, target)
    examples = read_prompts_or_chats(data)
    max_length = usable_length(data.max_length, target.context_limit)
    if data.responses == "given":
        encoded = encode_examples(tokenizer, examples, max_length, where="data.prompts")
        cached = None
        if data.cache != "none":
            cached = _cache(recipe, target, encoded, folder, examples_hash(examples))
        return TrainingData(encoded, cached)
    settings, amount = answers_asked(recipe, target, max_length, seconds)
    store = write_answers(target, examples, "self" in data.sources, settings, amount, folder / "answers")
    encoded = encode_answers(store)
    kept = settings.keep_hidden or settings.keep_states
    if kept and getattr(recipe.drafter, "vocabulary", None) is not None:
        encoded.expected_counts = expected_counts_in(folder / "expected_counts.safetensors", target, store)
    if data.cache == "topk":
        return TrainingData(encoded, _cache(recipe, target, encoded, folder, encoded.content_hash()))
    return TrainingData(encoded, None if data.cache == "none" else store)


def answers_asked(
    recipe: Recipe, target: Target, max_length: int, seconds: float | None
) -> tuple[AnswerSettings, Amount]:
    """How, and how much, a recipe lets the target write. `max_length`: as :func:`usable_length` has it."""
    data = recipe.data
    read = cached_layers(recipe.drafter, target.num_layers) if data.cache == "hidden" else None
    settings = AnswerSettings(
        served_sampling(data.sampling),
        data.max_new_tokens,
        min(data.max_prompt_length or max_length // 2, max_length - 1),
        max_length,
        data.generation_batch,
        recipe.seed,
        keep_hidden=data.cache == "hidden" and read is None,
        prompt_sampling=None if data.prompt_sampling is None else served_sampling(data.prompt_sampling),
        self_share=data.self_share,
        keep_states=tuple(dict.fromkeys(absolute_layer(layer, target.num_layers) for layer in read or ())),
        dtype=writing_dtype(data.dtype, target.dtype, target.device, data.generation_batch),
    )
    return settings, Amount(data.num_self_prompts, seconds)


def _cache(recipe: Recipe, target: Target, encoded: EncodedSet, folder: Path, data_hash: str) -> Store:
    """The target's outputs over the whole set, in the form that the drafter needs."""
    form = cache_form(recipe, target.num_layers)
    place = folder / f"teacher_{form.form}"
    return cache_teacher(target, encoded, form.form, form.top_k, place, data_hash, form.layers)


def cache_form(recipe: Recipe, num_layers: int) -> CacheForm:
    """The form that the drafter needs of the cache that the recipe asks for; `num_layers` of the target."""
    layers = cached_layers(recipe.drafter, num_layers) if recipe.data.cache == "hidden" else None
    form = recipe.data.cache if layers is None else "states"
    assert form != "none"
    return CacheForm(form, recipe.data.cache_top_k, tuple(layers or ()))


def encode_answers(store: Store) -> EncodedSet:
    """The target's answers as training examples: example i is sequence i of the store, its answer supervised."""
    return EncodedSet.collect(
        (number, encode_response(sequence.input_ids.tolist(), sequence.prompt_length))
        for number, sequence in enumerate(store)
    )
