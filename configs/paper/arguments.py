"""What the paper's configs share: argument `algo=…,model=…,topology=…,…`, choices for each slice, and sections."""

import dataclasses
from collections.abc import Mapping

from ml_collections import ConfigDict

from configs.sections import algorithm_section, base_config, section, sft_section
from turnppo_jax.parallel.mesh import MeshSettings, RolloutMeshSettings
from turnppo_jax.settings import ModelSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings
from turnppo_jax.training.optimizer import OptimizerConfig
from turnppo_jax.training.presets import ALGORITHMS, ALIASES

GROUP_SIZE = 16  # of the methods that compare trajectories of one prompt; the others play each prompt once
MODELS = {
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """How one model runs on one slice; the paper's numbers do not depend on it.

    Attributes:
      fsdp, tensor: the learner's mesh.
      micro_rows: rows of a forward and backward pass.
      remat: of the learner.
      slots: conversations of a host at once.
      rollout_tensor: chips that share one copy of the weights in the rollout.
    """

    fsdp: int
    tensor: int
    micro_rows: int
    remat: str
    slots: int
    rollout_tensor: int


def parse(
    argument: str, known: Mapping[tuple[str, str], Hardware], **others: tuple[str, ...]
) -> tuple[str, Hardware, str, dict[str, str]]:
    """Reads an argument "algo=NAME,model=NAME,topology=NAME,…"; what is left out is that of the first match.

    Args:
      argument: of `--config=FILE.py:ARGUMENT`.
      known: choices by (model, topology).
      **others: further options and their values, the default first.

    Returns:
      (model name, hardware, algorithm, value of each further option).

    Raises:
      ValueError: another argument, or a pair that has no choices; the known ones are listed.
    """
    options = dict(part.partition("=")[::2] for part in argument.split(",") if part)
    algo = options.pop("algo", "turn_ppo")
    algo = ALIASES.get(algo, algo)
    chosen = {name: options.pop(name, values[0]) for name, values in others.items()}
    all_known = algo in ALGORITHMS and all(chosen[name] in values for name, values in others.items())
    if all_known and set(options) <= {"model", "topology"}:
        for (model, topology), hardware in known.items():
            if options.get("model", model) == model and options.get("topology", topology) == topology:
                return MODELS[model], hardware, algo, chosen
    pairs = "; ".join(f"model={model},topology={topology}" for model, topology in known)
    further = "".join(f"; with {name}={'|'.join(values)}" for name, values in others.items())
    algos = ", ".join([*ALGORITHMS, *ALIASES])
    raise ValueError(f"config argument {argument!r}; allowed: {pairs}{further}; with algo=NAME, NAME in {algos}")


def shared_sections(model: str, hardware: Hardware, algo: str, *, thinking: bool = True) -> ConfigDict:
    """The sections that do not depend on the environment.

    Args:
      model: the model's name.
      hardware: the choices for the slice.
      algo: the algorithm's name.
      thinking: of the model's chat template.
    """
    config = base_config(algo)
    config.steps = 200
    config.model = section(ModelSettings, name=model, thinking=thinking)
    config.mesh = section(MeshSettings, fsdp=hardware.fsdp, tensor=hardware.tensor)
    config.rollout_mesh = section(RolloutMeshSettings, tensor=hardware.rollout_tensor)
    config.forward = section(ForwardSettings, compute_dtype="bfloat16", remat=hardware.remat, head_chunk=512)
    config.algorithm = algorithm_section(algo, group_size=GROUP_SIZE, num_minibatches=4)
    config.actor_optimizer = section(OptimizerConfig, learning_rate=1e-6)
    config.critic_optimizer = section(OptimizerConfig, learning_rate=1e-5)
    config.sft = sft_section(steps=0)
    config.evaluation = section(EvaluationSettings, every=10, num_seeds=256, greedy=False)
    return config
