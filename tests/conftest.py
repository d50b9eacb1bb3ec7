"""Shared fixtures: tiny random models of several families, a tiny tokenizer, and the data beside the checkout."""

import json
import os
import resource
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the suite never needs the network, and must not wait for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ModelFactory = Callable[..., Any]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = [
    "The ferry leaves the island at seven, and the market opens an hour later.",
    "A baker weighs the flour, adds water and salt, and waits for the dough to rise.",
    "How many apples are left when a basket of twelve loses five of them?",
    "def area(width, height):\n    return width * height\n",
    "Please write a short letter to the town library about longer opening hours.",
    "Rain fell all night; in the morning the river had covered the lower path.",
    "What is the capital of the country whose coast faces both seas?",
]


def pytest_configure(config: pytest.Config) -> None:
    """One thread: on a busy machine two can be slower than one. And signatures are checked, here and nowhere else."""
    torch.set_num_threads(1)
    # An int where a float is declared is fine (PEP 484's numeric tower), which beartype has to be told.
    checker = types.ModuleType("draftsmith_tests_checker")
    checker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[checker.__name__] = checker
    install_import_hook("draftsmith", f"{checker.__name__}.check")  # before any test module imports the package


def randomize(model: PreTrainedModel, seed: int, std: float = 0.3) -> PreTrainedModel:
    """Weights wide enough that next-token distributions are far from flat, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(std * noise)
            else:  # norms and biases keep their centre
                parameter.add_(0.1 * noise)
    return model.float().eval()


def _llama_like(model_class: Any, config_class: Any, **family: Any) -> ModelFactory:
    def make(vocab_size: int = 64, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
        settings = {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return randomize(model_class(config_class(**{**settings, **family, **config})), seed)

    return make


@pytest.fixture(scope="session")
def tiny_llama() -> ModelFactory:
    """`make(vocab_size=64, layers=2, hidden=32, seed=0, **config)`: a random float32 Llama in eval mode, tied."""
    return _llama_like(LlamaForCausalLM, LlamaConfig)


@pytest.fixture(scope="session")
def tiny_qwen2() -> ModelFactory:
    """As `tiny_llama`, with Qwen2's biases."""
    return _llama_like(Qwen2ForCausalLM, Qwen2Config)


@pytest.fixture(scope="session")
def tiny_qwen3() -> ModelFactory:
    """As `tiny_llama`, with Qwen3's query and key norms."""
    return _llama_like(Qwen3ForCausalLM, Qwen3Config)


@pytest.fixture(scope="session")
def tiny_mistral() -> ModelFactory:
    """As `tiny_llama`, Mistral: every layer has a sliding window of 8."""
    return _llama_like(MistralForCausalLM, MistralConfig, sliding_window=8)


@pytest.fixture(scope="session")
def tiny_gemma3() -> ModelFactory:
    """As `tiny_llama`, Gemma 3: sliding (window 8) and full attention layers take turns, the last is full."""
    make = _llama_like(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=8, query_pre_attn_scalar=8)

    def with_layer_types(vocab_size: int = 64, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
        kinds = ["full_attention" if (layers - i) % 2 else "sliding_attention" for i in range(layers)]
        return make(vocab_size, layers, hidden, seed, **{"layer_types": kinds, **config})

    return with_layer_types


@pytest.fixture(scope="session")
def tiny_gpt2() -> ModelFactory:
    """As `tiny_llama`, GPT-2: learned positions, layer norms, biases."""

    def make(vocab_size: int = 64, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
        settings = {
            "vocab_size": vocab_size,
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return randomize(GPT2LMHeadModel(GPT2Config(**{**settings, **config})), seed)

    return make


@pytest.fixture(scope="session")
def tokenizer_factory() -> Callable[..., PreTrainedTokenizerFast]:
    """`make(vocab_size=320, texts=SENTENCES, chat_template=CHATML)`: a byte-level BPE tokenizer trained on the spot.

    Ids 0, 1, 2 are ``<|endoftext|>`` (pad), ``<|im_start|>`` (bos) and ``<|im_end|>`` (eos).
    """

    def make(
        vocab_size: int = 320, texts: list[str] | None = None, chat_template: str | None = CHATML
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[
                AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
            ],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts or SENTENCES, trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer(tokenizer_factory: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 320 ids and a ChatML template. Shared: do not change it."""
    return tokenizer_factory()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real prompts, corpora and small models beside the checkout; skips where it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: real prompts and models are not kept in the repository")
    return folder


@pytest.fixture
def small_disk() -> Callable[[int], AbstractContextManager[None]]:
    """``with small_disk(size):`` no file can grow beyond `size` bytes inside. The real writers meet what a full disk does."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


THINGS = ["apples", "boats", "chairs", "doors", "lamps", "stones", "birds", "letters"]
PLACES = ["garden", "harbour", "kitchen", "library", "market", "river", "tower", "village"]
NUMBERS = ["two", "three", "four", "five", "seven", "nine", "eleven", "twelve"]


def _chats() -> list[list[dict[str, str]]]:
    """Questions and answers from few words: a tiny model learns their form in seconds, yet stays unsure of the numbers."""
    found = []
    for i, thing in enumerate(THINGS):
        for j, place in enumerate(PLACES):
            answer = f"There are {NUMBERS[(3 * i + 5 * j) % 8]} {thing} in the {place}."
            question = {"role": "user", "content": f"How many {thing} are in the {place}?"}
            found.append([question, {"role": "assistant", "content": answer}])
    return found


def _teach(model: Any, rows: list[list[int]], steps: int) -> None:
    """Next-token training on short rows, in place."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        batch = ids[torch.randint(len(ids), (16,), generator=generator)]
        logits = model(input_ids=batch).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="session")
def chat_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: ModelFactory, tokenizer_factory: Callable[..., Any]
) -> Path:
    """``model/``: a tiny Llama that has learned to chat, with its tokenizer; ``chats.jsonl`` (48 chats in its language)
    and ``prompts.jsonl`` (16 other first turns, in two categories). Shared: write nothing into it."""
    folder = tmp_path_factory.mktemp("chat")
    chats = _chats()
    tokenizer = tokenizer_factory(384, [message["content"] for chat in chats for message in chat])
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    model = tiny_llama(vocab_size=384, layers=3, hidden=48, max_position_embeddings=256)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
    _teach(model, [tokenizer(text, add_special_tokens=False).input_ids for text in rendered], steps=90)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    held_out = [i for i in range(len(chats)) if i % 4 == 3]
    with (folder / "chats.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"id": i, "messages": chat}) + "\n" for i, chat in enumerate(chats) if i not in held_out
        )
    with (folder / "prompts.jsonl").open("w") as file:
        for i in held_out:
            row = {"question_id": i, "category": ("even", "odd")[i // 4 % 2], "turns": [chats[i][0]["content"]]}
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="session")
def trained_folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: one layer of the chat model, full vocabulary, trained for a second on its chats.

    Shared: write nothing into it.
    """
    from accelerate.state import AcceleratorState

    from draftsmith.recipe import Recipe
    from draftsmith.train.run import train

    recipe = {
        "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
        "drafter": {"kind": "model", "init": {"layers": [0]}},
        "data": {"prompts": str(chat_folder / "chats.jsonl"), "max_length": 64},
        "optimizer": {"learning_rate": 1e-2},
        "engine": {"steps": 12, "tokens_per_step": 512, "checkpoint_every": 6},
        "evaluate": {
            "prompts": str(chat_folder / "prompts.jsonl"),
            "every": 6,
            "max_new_tokens": 12,
            "sampling": {"temperature": 0},
        },
        "output": str(tmp_path_factory.mktemp("trained") / "run"),
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    train(Recipe.model_validate(recipe), resume=False, command=["draftsmith", "train", "recipe.yaml"])
    AcceleratorState._reset_state(reset_partial_state=True)
    return Path(recipe["output"])
