"""Conversations that pull the arm with the larger mean: the data of a warm start."""

from collections.abc import Iterable, Iterator
from typing import Any

from envs import registry
from envs.draws import draws_for

THINK_STYLES = ("none", "plan")


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
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be in [0, 1], got {noise!r}")
    if think not in THINK_STYLES:
        raise ValueError(f"unknown think {think!r}; known: {', '.join(THINK_STYLES)}")
    env = registry.make(env_id, **env_kwargs)
    return _play_all(env, seeds, noise, think, only_success, run_seed)


def _play_all(env, seeds, noise, think, only_success, run_seed) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        observation, _ = env.reset(seed)
        names = {arm: name for name, arm in env.arm_of.items()}
        arm = env.best_arm
        if draws_for(run_seed, seed).random() < noise:
            arm = "low" if arm == "high" else "high"
        thought = f"{names['high']} is risky." if think == "plan" else ""
        response = f"{f'<think>{thought}</think>' if env.thinking else ''}<answer>{names[arm]}</answer>"
        messages = [{"role": "system", "content": env.instructions}] if env.instructions else []
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": response}]
        success = env.step(response)[4]["success"]
        if success or not only_success:
            yield {"messages": messages, "success": success, "seed": seed}
    env.close()
