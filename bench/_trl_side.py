"""trl's trainers as contenders of bench/trl_gkd.py. Runs in trl's environment, which need not hold draftsmith."""

import contextlib
import json
import sys
from typing import Any

import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from _turns import Clock, Referee, Stopped, read_batches
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]


class TakeTurns(TrainerCallback):
    """Holds the trainer before every step until it is its turn, and tells the time when the optimizer is through."""

    def __init__(self, referee: Referee) -> None:
        self.referee = referee
        self.clock, self.supervised, self.loss = Clock(), 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.referee.wait()
        self.clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.referee.say(**self.clock.read(), supervised=self.supervised, loss=self.loss)


def watched(base: type, turns: TakeTurns) -> Any:
    """The trainer, its loss and the tokens under it noted on the way."""

    class Watched(base):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            turns.loss = float(loss)
            return loss

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            labels = inputs.get("labels")
            mask = inputs["completion_mask"] if labels is None else labels[:, 1:] != -100
            turns.supervised = int(mask.sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Watched


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of both trainers. Gradient checkpointing, their default, would cost a second forward pass, and in GKD
    the cache of generation.
    """
    return {
        "output_dir": settings["scratch"],
        "per_device_train_batch_size": settings["batch_size"],
        "max_steps": 10_000,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "beta": 0.0,  # forward KL
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def build(settings: dict[str, Any], turns: TakeTurns) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(settings["target"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(settings[role], dtype=torch.float32) for role in ("target", "drafter")
    )
    examples = [example for batch in read_batches(settings["data"], settings["batch_size"]) for example in batch]
    models = {"model": student, "teacher_model": teacher, "processing_class": tokenizer, "callbacks": [turns]}
    if settings["trainer"] == "distillation":
        data = Dataset.from_list([{"prompt": example["prompt"]} for example in examples])
        new = {"max_completion_length": settings["max_new_tokens"], "shuffle_dataset": False}
        arguments = DistillationConfig(**common(settings), **new)
        return watched(DistillationTrainer, turns)(**models, args=arguments, train_dataset=data)
    data = Dataset.from_list([_pretokenized(example) for example in examples])
    arguments = GKDConfig(
        **common(settings),
        lmbda=float(settings["on_policy"]),
        max_new_tokens=settings["max_new_tokens"],
        max_length=settings["length"],
        train_sampling_strategy="sequential",
    )
    trainer = watched(GKDTrainer, turns)(**models, args=arguments, train_dataset=data)
    if not settings["on_policy"]:
        trainer.lmbda = -1.0  # a random number of exactly 0 would be on-policy
    return trainer


def _pretokenized(example: dict[str, Any]) -> dict[str, Any]:
    given, ids = example["prompt_length"], example["input_ids"]
    return {"prompt": example["prompt"], "input_ids": ids, "completion_mask": [0] * given + [1] * (len(ids) - given)}


def main() -> None:
    settings = json.loads(sys.argv[1])
    referee = Referee()
    torch.set_num_threads(settings["threads"])
    trainer = build(settings, TakeTurns(referee))
    versions = f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    referee.say(versions=versions)
    with contextlib.suppress(Stopped):
        trainer.train()


if __name__ == "__main__":
    main()
