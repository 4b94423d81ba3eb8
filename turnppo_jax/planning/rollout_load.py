"""What one host has to do in the rollout of a step: decode steps and prefills."""

import dataclasses
import heapq
import math

from turnppo_jax.planning.workload import PlanSettings, Workload
from turnppo_jax.rollout.sampler import SamplerSettings


@dataclasses.dataclass(frozen=True)
class RolloutLoad:
    """What one host plays in a training step.

    Attributes:
      episodes: of the host.
      decode_steps: tokens that the busiest slot draws, episodes taking slots as they come free.
      prefills: (bucket, prompts of an episode that fall into it).
      mean_context: tokens that a slot holds, in the average over an episode.
    """

    episodes: int
    decode_steps: int
    prefills: tuple[tuple[int, int], ...]
    mean_context: float

    def prefill_calls(self, rows: int) -> float:
        """Calls of the prefill program with every row in use, buckets of all sizes together."""
        return sum(prompts for _, prompts in self.prefills) * self.episodes / rows


def rollout_load(workload: Workload, plan: PlanSettings, sampler: SamplerSettings, hosts: int) -> RolloutLoad:
    """The load of one of `hosts` that share the episodes evenly."""
    mine = workload.episode_tokens[: math.ceil(len(workload.episode_tokens) / hosts)]
    free = [0] * sampler.num_slots
    for tokens in mine:
        heapq.heapreplace(free, free[0] + int(tokens))
    buckets: dict[int, int] = {}
    # The last token of a response is prefilled with the prompt that follows it.
    for length in (plan.first_prompt_tokens - 1, *[plan.next_prompt_tokens] * (workload.turns - 1)):
        while length > 0:
            piece = min(length, sampler.prefill_chunk)
            buckets[sampler.bucket(piece)] = buckets.get(sampler.bucket(piece), 0) + 1
            length -= piece
    mean_context = (plan.first_prompt_tokens + workload.context) / 2
    return RolloutLoad(len(mine), max(free), tuple(sorted(buckets.items())), mean_context)
