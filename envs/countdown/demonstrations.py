"""Conversations that solve the problem they were made from: the data of a warm start."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

from envs import registry
from envs.countdown.env import CountdownEnv
from envs.countdown.problems import random_expression
from envs.demonstrating import check_demonstrations
from envs.single_turn import demonstrate


def demonstrations(
    env_kwargs: dict[str, Any],
    seeds: Iterable[int],
    *,
    env_id: str = "countdown",
    noise: float = 0.0,
    think: str = "none",
    only_success: bool = False,
    run_seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Plays episodes through the environment itself, so with `split="train"` no evaluation problem is demonstrated.

    Args:
      env_kwargs: arguments of the environment.
      seeds: one episode each.
      env_id: "countdown".
      noise: probability that the answer is a random expression of the numbers instead of the solution.
      think: "none" leaves the thinking block empty; "plan" writes the operations one after another. Without effect
        where the environment asks for no thinking block.
      only_success: leave out the episodes that do not reach the target.
      run_seed: of the noise.

    Yields:
      `{"messages": [{"role", "content"}, ...], "success": bool, "seed": int}`, the policy's message last.

    Raises:
      ValueError: an argument out of range, by name.
    """
    check_demonstrations(noise=noise, think=think)

    def answer_of(env: CountdownEnv, draws: random.Random) -> tuple[str, str]:
        answer, steps = env.problem.solution, env.problem.steps
        if draws.random() < noise:
            _, answer, steps = random_expression(draws, env.problem.numbers)
        return " ".join(steps), answer

    env = registry.make(env_id, **env_kwargs)
    return demonstrate(env, seeds, answer_of, think=think, only_success=only_success, run_seed=run_seed)
