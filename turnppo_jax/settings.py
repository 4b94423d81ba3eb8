"""From a config to the frozen settings of a run: built and checked in one place, before anything is loaded.

Everything derived is computed here, so that no size stands in a config twice.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from envs.registry import check_id
from turnppo_jax.command_line import UserError, build
from turnppo_jax.parallel.hosts import check_inside_hosts, host_mesh
from turnppo_jax.parallel.mesh import MeshSettings, RolloutMeshSettings
from turnppo_jax.planning.workload import PlanSettings
from turnppo_jax.rollout.collector import EnvSettings
from turnppo_jax.rollout.episodes import PlayLimits
from turnppo_jax.rollout.sampler import SamplerSettings, Sampling
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.collapse import CollapseSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings, LearnerSettings
from turnppo_jax.training.optimizer import OptimizerConfig
from turnppo_jax.training.reward_terms import RewardSettings
from turnppo_jax.training.warm_start import sft_settings


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """`config.model`.

    Attributes:
      name: a directory in Hugging Face format, a hub id, or a key of `models.sizes.SIZES` for fresh weights.
      thinking: whether the chat template opens a thinking block (Qwen3).
      chat_template: see `rollout.chat.load_tokenizer`.
      words: of fresh weights' tokenizer, a token each beside those that it has; see `rollout.builtin_tokenizer`.
    """

    name: str
    thinking: bool = True
    chat_template: str = ""
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """`config.rollout`.

    Attributes:
      num_prompts: environment seeds a step; each is played `algorithm.group_size` times.
      max_turns, max_turn_tokens, max_retries: see PlayLimits.
      temperature, top_p, top_k: see Sampling; the temperature must be above 0.
      stop_strings: a response ends with the token that completes one of them.
      lockstep: one sampler over the devices of all hosts, for a model too large for those of one; by default each
        host has a sampler of its own.
    """

    num_prompts: int
    max_turns: int
    max_turn_tokens: int
    max_retries: int = 2
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_strings: tuple[str, ...] = ()
    lockstep: bool = False

    def __post_init__(self):
        if self.num_prompts < 1:
            raise ValueError(f"rollout.num_prompts={self.num_prompts}; allowed: at least 1")
        if not self.temperature > 0:
            raise ValueError(f"rollout.temperature={self.temperature}; allowed: above 0 (greedy is for evaluation)")

    @property
    def limits(self) -> PlayLimits:
        """Of an episode."""
        return PlayLimits(self.max_turns, self.max_turn_tokens, self.max_retries)

    @property
    def sampling(self) -> Sampling:
        """Of every token."""
        return Sampling(self.temperature, self.top_p, self.top_k)


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """`config.rows`: the fixed shape that trajectories are packed into.

    Attributes:
      micro_rows: rows of one forward and backward pass.
      tokens: T of a row; 0 means the context length.
      turns: K of a row; 0 means four episodes' worth.
      sampled: A of a row; 0 means as many as the turns of an episode can have, at most T.
    """

    micro_rows: int = 8
    tokens: int = 0
    turns: int = 0
    sampled: int = 0


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """`config.checkpoint`: see training.checkpoint.Checkpoints."""

    save_every: int = 10
    keep_latest: int = 2
    keep_best: int = 1


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """A whole run."""

    seed: int
    steps: int
    model: ModelSettings
    env: EnvSettings
    eval_env: EnvSettings
    rollout: RolloutSettings
    sampler: SamplerSettings
    learner: LearnerSettings
    actor_optimizer: OptimizerConfig
    critic_optimizer: OptimizerConfig | None
    evaluation: EvaluationSettings
    reward: RewardSettings
    collapse: CollapseSettings
    checkpoint: CheckpointSettings
    writers: tuple[str, ...]
    sft: dict[str, Any]
    mesh: MeshSettings
    rollout_mesh: RolloutMeshSettings
    plan: PlanSettings

    @property
    def num_episodes(self) -> int:
        """Episodes of a training step."""
        return self.rollout.num_prompts * self.learner.algorithm.group_size

    def make_meshes(self) -> tuple[Mesh, Mesh, Mesh]:
        """(the mesh that trains, the mesh that samples, this host's part of it or in lockstep the whole).

        Raises:
          ValueError: they do not fit the devices, or a group that must lie inside a host reaches across hosts.
        """
        mesh = self.mesh.make()
        rollout_mesh = self.rollout_mesh.make(mesh)
        if not self.rollout.lockstep:
            check_inside_hosts(mesh, "mesh")
        return mesh, rollout_mesh, host_mesh(rollout_mesh, lockstep=self.rollout.lockstep)


_SECTIONS = (
    "actor_optimizer", "algorithm", "checkpoint", "collapse", "critic_optimizer", "env", "evaluation", "forward",
    "mesh", "model", "plan", "reward", "rollout", "rollout_mesh", "rows", "sampler", "seed", "sft", "steps", "writers",
)  # fmt: skip


def run_settings(config: Mapping[str, Any]) -> RunSettings:
    """Builds the settings of a run from the finalised config (a plain dict, see `command_line.finalise`).

    Raises:
      UserError, ValueError: one line that names the field, its value and what is allowed.
    """
    for name in config:
        if name not in _SECTIONS:
            raise UserError(f"unknown field config.{name}; known: {', '.join(_SECTIONS)}")
    for name in ("seed", "steps", "model", "env", "rollout", "sampler"):
        if name not in config:
            raise UserError(f"field config.{name} is missing")
    for name, least in (("seed", 0), ("steps", 0)):
        if not isinstance(config[name], int) or config[name] < least:
            raise UserError(f"config.{name}={config[name]!r}: needs a whole number of at least {least}")
    algorithm = build(AlgorithmConfig, config.get("algorithm", {}), "config.algorithm")
    rollout = build(RolloutSettings, config["rollout"], "config.rollout")
    sampler = build(SamplerSettings, config["sampler"], "config.sampler")
    rows = build(RowSettings, config.get("rows", {}), "config.rows")
    env = _env_settings(config["env"])
    # The policy makes no step while the critic learns alone: each schedule ends with the last step of its own model.
    steps, per_step = config["steps"], algorithm.epochs * algorithm.num_minibatches
    updates = {
        "actor": max(steps - algorithm.critic_warmup_steps, min(steps, 1)) * per_step,
        "critic": steps * per_step,
    }
    collapse = build(CollapseSettings, config.get("collapse", {}), "config.collapse")
    writers = tuple(config.get("writers", ("jsonl", "console")))
    if collapse.stop_on_collapse and "jsonl" not in writers:
        raise UserError(
            f"config.collapse.stop_on_collapse=True with writers={writers}: needs 'jsonl' among them (a continued run "
            "reads its history from there)"
        )
    critic = config.get("critic_optimizer")
    return RunSettings(
        seed=config["seed"],
        steps=config["steps"],
        model=build(ModelSettings, config["model"], "config.model"),
        env=env,
        eval_env=env.with_kwargs(**dict(config["env"].get("eval_kwargs", {}))),
        rollout=rollout,
        sampler=sampler,
        learner=LearnerSettings(
            shape=_batch_shape(algorithm, rollout, sampler, rows),
            algorithm=algorithm,
            forward=build(ForwardSettings, config.get("forward", {}), "config.forward"),
        ),
        actor_optimizer=_optimizer(config.get("actor_optimizer", {}), "config.actor_optimizer", updates["actor"]),
        critic_optimizer=(
            _optimizer(critic or {}, "config.critic_optimizer", updates["critic"]) if algorithm.has_critic else None
        ),
        evaluation=build(EvaluationSettings, config.get("evaluation", {}), "config.evaluation"),
        reward=_reward_settings(config.get("reward", {})).resolved(rollout.max_turn_tokens),
        collapse=collapse,
        checkpoint=build(CheckpointSettings, config.get("checkpoint", {}), "config.checkpoint"),
        writers=writers,
        sft=sft_settings(config.get("sft", {"steps": 0})),
        mesh=build(MeshSettings, config.get("mesh", {}), "config.mesh"),
        rollout_mesh=build(RolloutMeshSettings, config.get("rollout_mesh", {}), "config.rollout_mesh"),
        plan=build(PlanSettings, config.get("plan", {}), "config.plan"),
    )


def _reward_settings(section: Mapping[str, Any]) -> RewardSettings:
    """The terms that have a weight."""
    section = dict(section)
    if "terms" in section:
        section["terms"] = {name: weight for name, weight in section["terms"].items() if weight is not None}
    return build(RewardSettings, section, "config.reward")


def _env_settings(section: Mapping[str, Any]) -> EnvSettings:
    fields = {name: value for name, value in section.items() if name != "eval_kwargs"}
    kwargs = tuple(sorted(dict(fields.pop("kwargs", {})).items()))
    settings = build(EnvSettings, {**fields, "kwargs": kwargs}, "config.env")
    check_id(settings.id)
    return settings


def _optimizer(section: Mapping[str, Any], name: str, updates: int) -> OptimizerConfig:
    if section.get("total_steps", 0) not in (0, updates):
        raise UserError(
            f"{name}.total_steps={section['total_steps']} is computed (steps * epochs * num_minibatches = {updates}, "
            "for the actor without algorithm.critic_warmup_steps); leave it at 0"
        )
    return build(OptimizerConfig, {**section, "total_steps": updates}, name)


def _batch_shape(
    algorithm: AlgorithmConfig, rollout: RolloutSettings, sampler: SamplerSettings, rows: RowSettings
) -> BatchShape:
    """The packed shape of a minibatch: a row for each of its trajectories at worst."""
    episodes = rollout.num_prompts * algorithm.group_size
    if algorithm.num_minibatches > episodes:
        raise UserError(
            f"config.algorithm.num_minibatches={algorithm.num_minibatches} exceeds the {episodes} episodes of a step "
            f"(rollout.num_prompts={rollout.num_prompts} * algorithm.group_size={algorithm.group_size})"
        )
    tokens = rows.tokens or sampler.context_length
    if tokens < sampler.context_length:
        raise UserError(
            f"config.rows.tokens={tokens} is less than sampler.context_length={sampler.context_length}; "
            "a trajectory must fit a row"
        )
    of_episode = min(tokens, rollout.max_turns * rollout.max_turn_tokens)
    members = -(-episodes // algorithm.num_minibatches)
    return BatchShape(
        rows=-(-members // rows.micro_rows) * rows.micro_rows,
        tokens=tokens,
        turns=rows.turns or 4 * rollout.max_turns,
        sampled=min(tokens, rows.sampled or of_episode),
        trajectories=episodes,
        max_turns=rollout.max_turns,
        max_sampled=of_episode,
        micro_rows=rows.micro_rows,
    )
