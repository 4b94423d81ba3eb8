"""Conversations that pull the arm with the larger mean: the data of a warm start."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

from envs import registry
from envs.bandit.env import BanditEnv
from envs.demonstrating import check_demonstrations
from envs.single_turn import demonstrate


def demonstrations(
    env_kwargs: dict[str, Any],
    seeds: Iterable[int],
    *,
    env_id: str = "bandit",
    noise: float = 0.0,
    think: str = "none",
    only_success: bool = False,
    run_seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Plays episodes through the environment itself, so prompts and split are the environment's.

    Args:
      env_kwargs: arguments of the environment.
      seeds: one episode each.
      env_id: "bandit".
      noise: probability that the other arm is pulled.
      think: "none" leaves the thinking block empty; "plan" says which arm is risky. Without effect where the
        environment asks for no thinking block.
      only_success: leave out the episodes that pull the other arm.
      run_seed: of the noise.

    Yields:
      `{"messages": [{"role", "content"}, ...], "success": bool, "seed": int}`, the policy's message last.

    Raises:
      ValueError: an argument out of range, by name.
    """
    check_demonstrations(noise=noise, think=think)

    def answer_of(env: BanditEnv, draws: random.Random) -> tuple[str, str]:
        names = {arm: name for name, arm in env.arm_of.items()}
        arm = env.best_arm
        if draws.random() < noise:
            arm = "low" if arm == "high" else "high"
        return f"{names['high']} is risky.", names[arm]

    env = registry.make(env_id, **env_kwargs)
    return demonstrate(env, seeds, answer_of, think=think, only_success=only_success, run_seed=run_seed)
