"""What a training step has to do on average: the assumptions of a plan, and what the learner's packing makes of it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from turnppo_jax.command_line import UserError
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape, PackingStats, pack
from turnppo_jax.types import StopReason, Trajectory, TrajectoryBatch, Turn


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """`config.plan`: the average episode. No program depends on it; times and MFU do.

    Attributes:
      turns: responses of an episode; 0 means `rollout.max_turns`.
      first_prompt_tokens: instructions, first observation and what the chat template adds.
      next_prompt_tokens: what is appended before every later response.
      response_tokens: of a turn; 0 means half of `rollout.max_turn_tokens`.
      spread: lengths of responses are drawn evenly from (1 - spread) to (1 + spread) times the average.
    """

    turns: int = 0
    first_prompt_tokens: int = 256
    next_prompt_tokens: int = 64
    response_tokens: int = 0
    spread: float = 0.5

    def __post_init__(self):
        for name in ("turns", "response_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"plan.{name}={getattr(self, name)}; allowed: 0 (from the limits) or more")
        for name in ("first_prompt_tokens", "next_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name}={getattr(self, name)}; allowed: at least 1")
        if not 0 <= self.spread < 1:
            raise ValueError(f"plan.spread={self.spread}; allowed: from 0 to below 1")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One minibatch of average episodes as the learner packs it.

    Attributes:
      batch: the packed arrays; their shapes are those of the learner's programs.
      actor: what packing made of the rows.
      critic: the same of the critic's own rows; those of the actor where it has none.
      segments: [n] tokens of each trajectory.
      critic_segments: [n] tokens of each trajectory in the critic's rows.
      turns: of an episode.
      prompt_tokens: of an episode.
      episode_tokens: [M] sampled tokens of each episode of the step.
    """

    batch: TrajectoryBatch
    actor: PackingStats
    critic: PackingStats
    segments: np.ndarray
    critic_segments: np.ndarray
    turns: int
    prompt_tokens: int
    episode_tokens: np.ndarray

    @property
    def context(self) -> float:
        """Tokens of a whole episode, in the average."""
        return self.prompt_tokens + float(self.episode_tokens.mean())


def expected_workload(
    plan: PlanSettings, shape: BatchShape, algorithm: AlgorithmConfig, *, max_turn_tokens: int, context_length: int
) -> Workload:
    """Packs one minibatch of average episodes with the learner's own packer.

    Args:
      plan: the average episode.
      shape: of the learner's batches.
      algorithm: how many minibatches there are, and what the critic reads.
      max_turn_tokens: limit of a response.
      context_length: limit of an episode.

    Raises:
      UserError: the average episode breaks a limit of the config.
    """
    turns = plan.turns or shape.max_turns
    response = plan.response_tokens or max(1, max_turn_tokens // 2)
    if turns > shape.max_turns:
        raise UserError(f"config.plan.turns={turns} exceeds rollout.max_turns={shape.max_turns}")
    if response > max_turn_tokens:
        raise UserError(f"config.plan.response_tokens={response} exceeds rollout.max_turn_tokens={max_turn_tokens}")
    prompts = plan.first_prompt_tokens + (turns - 1) * plan.next_prompt_tokens
    rng = np.random.default_rng(0)
    low, high = round(response * (1 - plan.spread)), round(response * (1 + plan.spread))
    lengths = rng.integers(low, high, (shape.trajectories, turns), endpoint=True).clip(1, max_turn_tokens)
    longest = prompts + int(lengths.sum(axis=1).max())
    if longest > context_length:
        raise UserError(
            f"config.plan: an episode of {turns} turns would have up to {longest} tokens, sampler.context_length="
            f"{context_length}; lower plan.turns, plan.response_tokens or the prompts"
        )
    episodes = [_episode(plan, row, number) for number, row in enumerate(lengths)]
    members = range(-(-shape.trajectories // algorithm.num_minibatches))
    options = {"members": members, "bootstrap": algorithm.bootstraps}
    batch, actor = pack(episodes, shape, **options)
    critic_batch, critic = batch, actor
    if algorithm.has_critic and not algorithm.share_backbone and algorithm.advantage_level == "turn":
        critic_batch, critic = pack(episodes, shape, **options, values_only=True)
    return Workload(
        batch=batch,
        actor=actor,
        critic=critic,
        segments=_segment_lengths(batch),
        critic_segments=_segment_lengths(critic_batch),
        turns=turns,
        prompt_tokens=prompts,
        episode_tokens=lengths.sum(axis=1),
    )


def model_flops(
    sizes: ModelSizes, parameters: float, tokens: float, segments: Sequence[int] | np.ndarray, *, passes: int = 3
) -> float:
    """What a perfect program would need: 2 · passes · parameters · tokens, and causal attention.

    A forward pass counts once, a backward pass twice: passes = 3 is the usual 6 · parameters · tokens. Causal
    attention of a segment of n tokens takes 2 products of n²/2 pairs, 2 · L · N · H · n² FLOPs a pass.

    Args:
      sizes: of the model.
      parameters: that it has.
      tokens: real ones, padding left out.
      segments: [n] tokens of each trajectory.
      passes: 1 for scoring, 3 for an update.
    """
    squares = float(np.sum(np.square(np.asarray(segments, np.float64))))
    attention = 2.0 * sizes.num_layers * sizes.num_heads * sizes.head_dim * squares
    return passes * (2.0 * parameters * tokens + attention)


def unneeded_flops(sizes: ModelSizes, tables: int, tokens: float, sampled: float, *, passes: int = 3) -> float:
    """Of `model_flops`, what is counted for embedding and head and no program needs.

    Looking up an embedding takes none, and the head runs on sampled tokens alone.

    Args:
      sizes: of the model.
      tables: arrays [V, D] among its parameters: 2 with an untied head, 1 with a tied one and in a critic.
      tokens: real ones.
      sampled: tokens that the head runs on; 0 in a critic.
      passes: as in `model_flops`.
    """
    return passes * 2.0 * sizes.vocab_size * sizes.hidden_size * (tables * tokens - sampled)


def _episode(plan: PlanSettings, lengths: np.ndarray, number: int) -> Trajectory:
    turns = [
        Turn(
            prompt_ids=np.zeros(plan.next_prompt_tokens if index else plan.first_prompt_tokens, np.int32),
            response_ids=np.zeros(length, np.int32),
            behavior_logprobs=np.zeros(length, np.float32),
            reward=0.0,
            stop=StopReason.EOS,
            policy_step=0,
        )
        for index, length in enumerate(lengths)
    ]
    return Trajectory(turns, terminated=True, truncated=False, group=number, seed=number, episode=number)


def _segment_lengths(batch: TrajectoryBatch) -> np.ndarray:
    counts = [np.bincount(row)[1:] for row in np.asarray(batch.segment_ids)]
    lengths = np.concatenate(counts)
    return lengths[lengths > 0]
