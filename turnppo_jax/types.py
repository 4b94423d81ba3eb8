"""The data that every part of turnppo_jax exchanges. Nothing else defines a batch.

Letters used in shapes, here and everywhere:

| letter | counts | letter | counts |
|---|---|---|---|
| `B` | rows of a batch | `S` | slots of the sampler |
| `M` | trajectories | `V` | vocabulary |
| `G` | members of a group | `D` | model width |
| `K` | turns of a row | `N` | query heads |
| `T` | tokens of a row | `H` | head size |
| `A` | sampled tokens of a row | `L` | layers |
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np


class StopReason(enum.StrEnum):
    """Why the sampling of one response ended."""

    EOS = "eos"  # an end-of-turn id was sampled; it is the last of response_ids
    STOP_STRING = "stop_string"  # the decoded text holds a stop string
    TURN_LIMIT = "turn_limit"  # the token limit of a turn was reached
    CONTEXT_LIMIT = "context_limit"  # the context is full


@dataclasses.dataclass
class Turn:
    """One response of the policy and the environment's answer to it.

    Attributes:
      prompt_ids: [P] int32, the tokens appended since the previous response ended; the whole prompt
        where `starts_row` is set.
      response_ids: [R] int32, exactly what was sampled.
      behavior_logprobs: [R] float32, log-probability of each sampled token under the sampler, over
        the full vocabulary at the sampling temperature.
      reward: the environment's reward for this turn, penalties included.
      stop: why sampling ended.
      policy_step: the training step whose parameters sampled the response.
      observation: the text that the response answers.
      action: the decoded response.
      info: what the environment said with its answer (JSON types).
      starts_row: the prompt does not extend the previous turn's tokens but begins a new row
        (window prompts). The first turn of a trajectory always begins a row; set there, it says that prompts are
        rendered anew each turn, so that a prompt which nobody answered stands alone too.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    behavior_logprobs: np.ndarray
    reward: float
    stop: StopReason
    policy_step: int
    observation: str = ""
    action: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    starts_row: bool = False


@dataclasses.dataclass
class Trajectory:
    """One episode as the policy saw it.

    Attributes:
      turns: in order; empty when the first prompt does not fit the context.
      terminated: the task ended.
      truncated: a limit ended the episode (turns, context); may be set beside `terminated`, which wins.
      group: trajectories with equal `group` answer the same prompt.
      seed: the environment's seed.
      episode: index of the episode in the rollout, 0..M-1; its randomness is a function of it.
      final_prompt_ids: [P] int32, when truncated: the prompt that the next turn would have had, for a
        bootstrap value; None where it does not fit the context, and where the task terminated.
      info: the environment's info at reset (JSON types).
      instructions: the environment's system prompt; "" for none.
      final_observation: what the environment showed after the last turn; None where there is no turn.
    """

    turns: list[Turn]
    terminated: bool
    truncated: bool
    group: int
    seed: int
    episode: int
    final_prompt_ids: np.ndarray | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    instructions: str = ""
    final_observation: str | None = None

    @property
    def total_reward(self) -> float:
        """Undiscounted sum of the rewards of all turns."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> bool:
        """What the environment said last in `info["success"]`; never guessed from the reward."""
        return bool(self.turns and self.turns[-1].info.get("success", False))

    @property
    def score(self) -> float | None:
        """What the environment said last in `info["score"]`; None where it gives no partial credit."""
        return self.turns[-1].info.get("score") if self.turns else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryBatch:
    """Trajectories packed into `B` rows of `T` tokens, `K` turns and `A` sampled tokens at most.

    A turn here is a decision unit: only the code that fills `turn_ids` and `value_positions` knows
    what the unit is. Padding: segment 0 in `segment_ids`, -1 in every index field, 0 elsewhere.
    """

    tokens: Any  # [B, T] int32
    positions: Any  # [B, T] int32, restart at 0 with each segment
    segment_ids: Any  # [B, T] int32, 1.. per row; 0 = padding
    turn_ids: Any  # [B, T] int32, index 0..K-1 in the row of the turn a sampled token belongs to; -1
    sampled_positions: Any  # [B, A] int32, column t of each sampled token in order (its log-prob is read at t-1); -1
    behavior_logprobs: Any  # [B, T] float32, at sampled tokens
    value_positions: Any  # [B, K] int32, column of the last prompt token of the turn; -1
    turn_rewards: Any  # [B, K] float32
    turn_mask: Any  # [B, K] bool
    turn_last: Any  # [B, K] bool, this turn ends its trajectory
    trajectory_ids: Any  # [B, K] int32, 0..M-1; -1
    turn_index: Any  # [B, K] int32, which turn of its trajectory, 0..; -1
    bootstrap_positions: Any  # [B, K] int32, last token of the unanswered prompt after a truncated last turn; -1
    group_ids: Any  # [M] int32; -1 where there is no trajectory
