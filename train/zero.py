"""DeepSpeed's configuration: the recipe's own keys over defaults under which the loop's normalisation is exact."""

import copy
from typing import Any

from ..errors import BadInput, nearest

# Keys whose value another part of the recipe (or the loop) decides, and where to set it instead.
_DECIDED_ELSEWHERE = {
    "gradient_accumulation_steps": "the loop accumulates: set engine.tokens_per_step and engine.tokens_per_forward",
    "train_batch_size": "set engine.tokens_per_step",
    "train_micro_batch_size_per_gpu": "set engine.tokens_per_forward",
    "gradient_clipping": "set optimizer.clip",
    "optimizer": "set the optimizer section",
    "scheduler": "set optimizer.schedule and optimizer.warmup",
    "bf16": "set engine.precision",
    "fp16": "engine.precision is fp32 or bf16",
    "torch_autocast": "set engine.precision",
    "prescale_gradients": "the loop divides by the tokens of the whole step",
    "gradient_predivide_factor": "the loop divides by the tokens of the whole step",
}
# What DeepSpeed reads at the top of its configuration, for the suggestion beside an unknown key only.
_COMMON = ("zero_optimization", "communication_data_type", "activation_checkpointing", "comms_logger", "aio")


def zero_config(given: dict[str, Any], *, precision: str, clip: float | None) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize`` from the recipe's ``engine.deepspeed``.

    Raises BadInput for a key that belongs elsewhere in the recipe (the value "auto" is accepted and ignored) and for a
    ZeRO section that is missing or has no stage from 0 to 3.
    """
    config = copy.deepcopy(given)
    for key, instead in _DECIDED_ELSEWHERE.items():
        if config.pop(key, "auto") != "auto":
            raise BadInput(f"engine.deepspeed.{key}: not set here; {instead}")
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (0, 1, 2, 3):
        hint = next((nearest(key, _COMMON) for key in given if key not in _COMMON and nearest(key, _COMMON)), "")
        raise BadInput(f"engine.deepspeed: expected zero_optimization: {{stage: 0, 1, 2 or 3}}{hint}")
    config["zero_optimization"] = _zero_section(zero)
    # The loop hands over gradients of (sum of losses x ranks / supervised positions of the step): one micro-batch a
    # step as far as DeepSpeed knows, so that it divides by the number of ranks and by nothing else.
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config |= {"gradient_clipping": clip or 0.0, "bf16": {"enabled": precision == "bf16"}}
    # Offloading would otherwise swap in DeepSpeed's own CPU Adam, which compiles for minutes on first use.
    return {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True} | config


def _zero_section(given: dict[str, Any]) -> dict[str, Any]:
    """The ZeRO section without its "auto" values; stage 3 gathers whole weights for checkpoints unless told not to."""
    section = {key: value for key, value in given.items() if value != "auto"}
    return {"stage3_gather_16bit_weights_on_model_save": True} | section if section["stage"] == 3 else section
