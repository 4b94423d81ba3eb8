"""What one host has to do in the rollout of a step: decode steps and prefills."""

import dataclasses
import heapq
import math

import numpy as np

from turnppo_jax.planning.workload import PlanSettings, Workload
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.training.algorithm import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class RolloutLoad:
    """What one host plays in a training step.

    Attributes:
      episodes: of the host.
      decode_steps: tokens that the busiest slot draws, episodes taking slots as they come free.
      prefills: (bucket, prompts of an episode that fall into it, in the average).
      mean_context: tokens that a slot holds, in the average over an episode.
    """

    episodes: int
    decode_steps: int
    prefills: tuple[tuple[int, float], ...]
    mean_context: float

    def prefill_calls(self, rows: int) -> float:
        """Calls of the prefill program with every row in use, buckets of all sizes together."""
        return sum(prompts for _, prompts in self.prefills) * self.episodes / rows


def rollout_load(workload: Workload, plan: PlanSettings, sampler: SamplerSettings, hosts: int) -> RolloutLoad:
    """The load of one of `hosts` that share the episodes evenly."""
    return _load(workload.episode_tokens, workload, plan, sampler, hosts, begin_before=(0,))


def further_load(
    workload: Workload, plan: PlanSettings, sampler: SamplerSettings, algorithm: AlgorithmConfig, hosts: int
) -> RolloutLoad | None:
    """The load of the rollouts that the estimator asks for beside the step's own (see `rollout.extra_rollouts`).

    A greedy episode a prompt (ReMax), or `num_branches` episodes from the state before each turn (VinePPO), whose
    contexts are prefilled whole; they are played when the step's own have ended.

    Returns:
      What one of `hosts` plays; None where the estimator asks for nothing.
    """
    if algorithm.needs == "greedy_scores":
        tokens = workload.episode_tokens[:: algorithm.group_size]
        return _load(tokens, workload, plan, sampler, hosts, begin_before=(0,))
    if algorithm.needs == "branch_values":
        tokens = np.repeat(workload.episode_tokens, algorithm.num_branches)
        return _load(tokens, workload, plan, sampler, hosts, begin_before=tuple(range(workload.turns)))
    return None


def _load(
    tokens: np.ndarray,
    workload: Workload,
    plan: PlanSettings,
    sampler: SamplerSettings,
    hosts: int,
    *,
    begin_before: tuple[int, ...],
) -> RolloutLoad:
    """Episodes of so many sampled tokens, each played once from before each of the turns `begin_before`."""
    turns, starts = workload.turns, len(begin_before)
    drawn = [round(int(whole) * (turns - turn) / turns) for whole in tokens for turn in begin_before]
    mine = drawn[: math.ceil(len(drawn) / hosts)]
    free = [0] * sampler.num_slots
    for number in mine:
        heapq.heapreplace(free, free[0] + number)
    response = float(np.mean(tokens)) / turns
    contexts = [round(plan.first_prompt_tokens + turn * (plan.next_prompt_tokens + response)) for turn in begin_before]
    buckets: dict[int, float] = {}
    for turn, context in zip(begin_before, contexts, strict=True):
        # The last token of a response is prefilled with the prompt that follows it.
        for length in (context - 1, *[plan.next_prompt_tokens] * (turns - 1 - turn)):
            while length > 0:
                piece = min(length, sampler.prefill_chunk)
                buckets[sampler.bucket(piece)] = buckets.get(sampler.bucket(piece), 0) + 1 / starts
                length -= piece
    mean_context = (sum(contexts) / starts + workload.context) / 2
    return RolloutLoad(len(mine), max(free), tuple(sorted(buckets.items())), mean_context)
