"""What environments of a single turn have in common: arguments, the answer that ends the episode, demonstrations."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from envs.base import TextEnv
from envs.draws import draws_for

SPLITS = ("train", "eval", "seed")
PROMPTS = ("full", "compact")


def check_arguments(*, split: str, prompt: str, format_penalty: float) -> None:
    """Raises ValueError, by name, for an argument out of range."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if prompt not in PROMPTS:
        raise ValueError(f"unknown prompt {prompt!r}; known: {', '.join(PROMPTS)}")
    if not (math.isfinite(format_penalty) and format_penalty <= 0):
        raise ValueError(f"format_penalty must be finite and at most 0, got {format_penalty!r}")


def response_form(inside: str, *, thinking: bool) -> str:
    """The response format as prompts show it."""
    return f"{'<think>...</think>' if thinking else ''}<answer>{inside}</answer>"


def demonstrate(
    env: TextEnv,
    seeds: Iterable[int],
    answer_of: Callable[[Any, random.Random], tuple[str, str]],
    *,
    think: str,
    only_success: bool,
    run_seed: int,
) -> Iterator[dict[str, Any]]:
    """Plays an episode of each seed with the answer of a script, and closes the environment.

    Args:
      env: has `thinking` beside what every environment has.
      seeds: one episode each.
      answer_of: (the environment after its reset, random numbers of this episode) to (thought, answer).
      think: "none" leaves the thinking block empty; "plan" fills in the thought.
      only_success: leave out the episodes that the environment does not call a success.
      run_seed: of the random numbers, beside the episode's own seed.

    Yields:
      `{"messages": [{"role", "content"}, ...], "success": bool, "seed": int}`, the policy's message last.
    """
    for seed in seeds:
        observation, _ = env.reset(seed)
        thought, answer = answer_of(env, draws_for(run_seed, seed))
        block = f"<think>{thought if think == 'plan' else ''}</think>" if env.thinking else ""
        response = f"{block}<answer>{answer}</answer>"
        messages = [{"role": "system", "content": env.instructions}] if env.instructions else []
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": response}]
        success = env.step(response)[4]["success"]
        if success or not only_success:
            yield {"messages": messages, "success": success, "seed": seed}
    env.close()
