"""The parts of gpu_check.py. Each runs in a process of its own, says what it found, and raises when something is wrong."""

import json
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _steps import count_reads
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftsmith.data.chats import encode_prompt
from draftsmith.data.sources import read_examples, shipped_evaluation
from draftsmith.decode.loop import plain_generate, speculative_generate
from draftsmith.decode.prompts import pad_rows
from draftsmith.heads.load import load_drafter
from draftsmith.models.target import Target, load_target
from draftsmith.provenance import peak_memory_gib
from draftsmith.recipe import Recipe
from draftsmith.train.logs import read_metrics
from draftsmith.train.run import train

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The architecture of Qwen3-0.6B, without its weights.
QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
TOY = QWEN3_06B | {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    device: str
    config: dict[str, Any] = field(default_factory=lambda: QWEN3_06B)
    tokenizer_ids: int = 8192
    examples: int = 192
    answer_tokens: int = 96
    tokens_per_step: int = 8192
    steps: int = 40
    new_tokens: int = 128
    prompts: int = 8
    resumed_loss_may_differ: float = 1e-2  # relative; a GPU's sums may change their order

    @property
    def cuda(self) -> bool:
        """Whether this is the real check."""
        return self.device == "cuda"


SMOKE = Size("cpu", TOY, 600, 6, 8, 256, 4, 8, 2, 1e-6)


def make_model(folder: Path, size: Size) -> str:
    """A target with random weights and a tokenizer made on the spot, saved as a folder in bf16."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    with torch.device(size.device):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**size.config, **ends), dtype=torch.bfloat16)
    model.save_pretrained(folder / "target")
    make_tokenizer(size.tokenizer_ids).save_pretrained(folder / "target")
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:,.1f} M random parameters, Qwen3"


def make_tokenizer(ids: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over our own prompts, with a ChatML template."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ids,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((turn for example in read_examples("shipped") for turn in example.turns), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[1], eos_token=special[2], pad_token=special[0]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def recipe(folder: Path, size: Size, output: str, **engine: Any) -> Recipe:
    """A draft model cut from the target, distilled on what the target answers to our prompts."""
    threads = None if size.cuda else 1
    data = {
        "prompts": "shipped",
        "responses": "target",
        "limit": size.examples,
        "max_length": 256,
        "max_prompt_length": 200,
        "max_new_tokens": size.answer_tokens,
        "sampling": {"temperature": 0.8},
        "cache": "hidden",
    }
    steps = {"steps": size.steps, "checkpoint_every": size.steps // 2, "threads": threads, **engine}
    return Recipe.model_validate(
        {
            "target": {"model": str(folder / "target"), "dtype": "bfloat16"},
            "drafter": {"kind": "model", "init": {"layers": [0, 1]}},
            "data": data,
            "optimizer": {"learning_rate": 1e-3},
            "engine": {"precision": "bf16", "tokens_per_step": size.tokens_per_step, **steps},
            "evaluate": {"limit": size.prompts, "every": size.steps, "max_new_tokens": 16},
            "output": str(folder / output),
        }
    )


def run_recipe(wanted: Recipe, resume: bool = False) -> list[float]:
    """Train; the losses of all steps."""
    train(wanted, resume=resume, command=["gpu_check"])
    records = read_metrics(Path(wanted.output) / "metrics.jsonl")
    return [record["loss"] for record in records if record["kind"] == "train"]


def train_bf16(folder: Path, size: Size) -> str:
    """Train in bf16."""
    start = time.perf_counter()
    losses = run_recipe(recipe(folder, size, "bf16"))
    if len(losses) != size.steps or not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    memory = peak_memory_gib()
    return (
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {size.steps} steps, {time.perf_counter() - start:.0f} s with data, "
        f"peak {memory.get('gpu', memory['cpu']):.1f} GiB"
    )


def resume_bf16(folder: Path, size: Size) -> str:
    """Take the run back to its middle and go on: the losses must be those it had."""
    before, copy = folder / "bf16", folder / "resumed"
    shutil.copytree(before, copy, symlinks=True)
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / f"step_{size.steps:06d}")
    (copy / "latest").unlink()
    losses = run_recipe(recipe(folder, size, "resumed"), resume=True)
    expected = [record["loss"] for record in read_metrics(before / "metrics.jsonl") if record["kind"] == "train"]
    off = max(abs(mine - right) / right for mine, right in zip(losses, expected, strict=True))
    if off > size.resumed_loss_may_differ:
        raise AssertionError(f"losses after resuming differ by {off:.1e}: {losses} instead of {expected}")
    return f"steps {size.steps // 2 + 1} to {size.steps} again: losses differ by {off:.1e} at most"


def train_zero2(folder: Path, size: Size) -> str:
    """The same run under DeepSpeed, ZeRO stage 2, nccl on a GPU."""
    losses = run_recipe(recipe(folder, size, "zero2", deepspeed={"zero_optimization": {"stage": 2}}))
    session = json.loads((folder / "zero2" / "provenance.json").read_text())["sessions"][-1]
    engine, backend = session["engine"][0], "nccl" if size.cuda else "gloo"
    if not all(words in engine for words in ("DeepSpeed", "ZeRO stage 2", f"over {backend}")):
        raise AssertionError(f"expected DeepSpeed, ZeRO stage 2 over {backend}, got: {engine}")
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses}")
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {engine}"


def prompts_of(target: Target, size: Size) -> list[list[int]]:
    """Prompts from our evaluation set."""
    return [encode_prompt(target.tokenizer, example.turns[:1]) for example in shipped_evaluation(size.prompts)]  # type: ignore[arg-type]


def greedy_identity(folder: Path, size: Size) -> str:
    """In float32 greedy speculative decoding emits plain decoding's tokens, one prompt at a time and side by side."""
    target = load_target(str(folder / "target"), "float32", size.device)
    trained = load_drafter(folder / "bf16" / "final", target)
    trained.module.float()  # type: ignore[attr-defined]
    prompts, words = prompts_of(target, size), []
    settings: dict[str, Any] = {"max_new_tokens": size.new_tokens, "eos_token_id": []}
    plain = [_new(plain_generate(target, torch.tensor([p], device=target.device), **settings), [p])[0] for p in prompts]
    for name, drafter in (("trained drafter", trained), ("target as its own drafter", target.model)):
        group = pad_rows(prompts, target)
        out = speculative_generate(target, drafter, group.ids, group.attention_mask, **settings)
        alone = [
            _new(speculative_generate(target, drafter, torch.tensor([p], device=target.device), **settings), [p])[0]
            for p in prompts
        ]
        for mode, answers in (("batch", _new(out, prompts)), ("alone", alone)):
            same = sum(mine == right for mine, right in zip(answers, plain, strict=True))
            if same != len(prompts):
                raise AssertionError(f"{name}, {mode}: {same} of {len(prompts)} answers are plain decoding's")
        words.append(f"{name} {out.stats.block_efficiency or 0:.2f} tokens a pass")
    return f"{len(prompts)}/{len(prompts)} identical, alone and in a batch; {', '.join(words)}"


def _new(out: Any, prompts: list[list[int]]) -> list[list[int]]:
    rows = zip(out.tokens.tolist(), prompts, out.lengths.tolist(), strict=True)
    return [row[len(prompt) : end] for row, prompt, end in rows]


def decode_bf16(folder: Path, size: Size) -> str:
    """Tokens a second in bf16, plain and speculative in turns, and how often a step waits for the device."""
    target = load_target(str(folder / "target"), "bfloat16", size.device)
    drafter = load_drafter(folder / "bf16" / "final", target)
    prompts = prompts_of(target, size)
    settings: dict[str, Any] = {"max_new_tokens": size.new_tokens, "eos_token_id": []}
    rates: dict[str, list[float]] = {"plain": [], "speculative": []}
    for prompt in [prompts[0], *prompts]:  # the first one warms up
        ids = torch.tensor([prompt], device=target.device)
        for name, chosen in (("plain", None), ("speculative", drafter)):
            start = time.perf_counter()
            out = speculative_generate(target, chosen, ids, **settings)
            rates[name].append(out.stats.emitted / (time.perf_counter() - start))
    medians = ", ".join(f"{name} {statistics.median(values[1:]):.1f}" for name, values in rates.items())
    arguments = {"max_new_tokens": size.new_tokens, "num_speculative_tokens": 4}
    reads = count_reads(target, drafter, prompts[0], **arguments)
    if reads > 1:
        raise AssertionError(f"the host reads tensors {reads:.1f} times a step, expected at most once")
    words = f"tokens/s: {medians}; {reads:.1f} reads of tensors a step"
    if size.cuda:
        with synchronisations() as counted:
            out = speculative_generate(target, drafter, torch.tensor([prompts[0]], device="cuda"), **settings)
        words += f", {len(counted) / out.stats.target_calls:.1f} synchronisations"
    return words


@contextmanager
def synchronisations() -> Iterator[list[Any]]:
    """Collects what makes the host wait for the GPU, as torch reports it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode("default")


def sampling(folder: Path, size: Size) -> str:
    """A batch sampled twice with the same seed, with several transforms, is the same."""
    target = load_target(str(folder / "target"), "bfloat16", size.device)
    drafter = load_drafter(folder / "bf16" / "final", target)
    group = pad_rows(prompts_of(target, size), target)
    settings: dict[str, Any] = {"max_new_tokens": size.new_tokens, "temperature": 0.7, "top_p": 0.9, "top_k": 50}
    first, second = (
        speculative_generate(target, drafter, group.ids, group.attention_mask, seed=7, **settings) for _ in range(2)
    )
    if not torch.equal(first.tokens, second.tokens):
        raise AssertionError("two runs with the same seed differ")
    return f"batch of {len(group.lengths)}, {first.stats.emitted} tokens twice, {first.stats.block_efficiency or 0:.2f} a pass"


PARTS: dict[str, Callable[[Path, Size], str]] = {
    "model": make_model,
    "train, bf16": train_bf16,
    "resume": resume_bf16,
    "train, DeepSpeed ZeRO-2": train_zero2,
    "greedy identity, float32": greedy_identity,
    "decode, bf16": decode_bf16,
    "sampling, bf16": sampling,
}
