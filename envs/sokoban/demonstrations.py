"""Conversations in which the solver plays: the data of a warm start.

A model that has never seen the response format earns no reward, so it is first trained on these.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

from envs import registry
from envs.demonstrating import check_demonstrations
from envs.draws import draws_for
from envs.sokoban import rules, solver


def demonstrations(
    env_kwargs: dict[str, Any],
    seeds: Iterable[int],
    *,
    env_id: str = "sokoban",
    actions_per_turn: int | str = "random",
    noise: float = 0.0,
    think: str = "none",
    only_success: bool = False,
    run_seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Plays episodes with the solver, through the environment itself.

    The prompts are those that the policy will see, so rooms, split and limits are the environment's: with
    `split="train"` (its default) no evaluation room is ever demonstrated. Each demonstration depends on its
    own seed and `run_seed` alone, not on the others.

    Args:
      env_kwargs: arguments of the environment.
      seeds: one episode each.
      env_id: "sokoban" or another id of a Sokoban environment.
      actions_per_turn: how many actions an answer names: a number, or "random" for 1 to the environment's
        own limit, drawn anew each turn. Never more than that limit.
      noise: probability that an action is drawn uniformly from all four instead of taken from the plan. The
        plan is then made anew; where the room can no longer be solved the demonstration ends with that turn.
        Keeps a warm start from becoming certain of every action.
      think: "none" leaves the thinking block empty; "plan" names the cells of player, boxes and targets and
        the moves to come. Without effect where the environment asks for no thinking block.
      only_success: leave out episodes that do not end solved (noise, or a room longer than the limits).
      run_seed: of noise and lengths.

    Yields:
      `{"messages": [{"role", "content"}, ...], "success": bool, "seed": int}`, each fit for a line of JSON. The
      last message is the policy's. Rooms that the solver gives up on are passed over.

    Raises:
      ValueError: an argument out of range, by name.
    """
    if not (actions_per_turn == "random" or (isinstance(actions_per_turn, int) and actions_per_turn >= 1)):
        raise ValueError(f"actions_per_turn must be 'random' or at least 1, got {actions_per_turn!r}")
    check_demonstrations(noise=noise, think=think)
    env = registry.make(env_id, **env_kwargs)
    return _play_all(env, seeds, actions_per_turn, noise, think, only_success, run_seed)


def _play_all(env, seeds, actions_per_turn, noise, think, only_success, run_seed) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        draws = draws_for(run_seed, seed)
        demonstration = _play(env, seed, actions_per_turn, noise, think, draws)
        if demonstration is not None and (demonstration["success"] or not only_success):
            yield demonstration
    env.close()


def _play(env, seed: int, actions_per_turn: int | str, noise: float, think: str, draws: random.Random):
    observation, info = env.reset(seed)
    plan = solver.solve(env.room)
    if plan is None:
        return None
    messages = [{"role": "system", "content": env.instructions}] if env.instructions else []
    ended = False
    while plan and not ended:
        wanted = actions_per_turn
        if wanted == "random":
            wanted = 1 + int(draws.random() * env.actions_per_turn)
        wanted = min(wanted, env.actions_per_turn, env.actions_left)
        thought = _plan_text(env.room, plan) if think == "plan" else ""
        actions, plan = _choose(env.room, plan, wanted, noise, draws)
        response = f"<answer>{' || '.join(actions)}</answer>"
        if env.thinking:
            response = f"<think>{thought}</think>{response}"
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": response}]
        observation, _, terminated, truncated, info = env.step(response)
        ended = terminated or truncated
    return {"messages": messages, "success": info["success"], "seed": seed}


def _choose(room: rules.Room, plan: list[str], count: int, noise: float, draws: random.Random):
    """The actions of one turn, and the plan after them; None where no plan is left."""
    actions = []
    while len(actions) < count and plan:
        action = plan[0]
        if draws.random() < noise:
            action = rules.ACTIONS[int(draws.random() * len(rules.ACTIONS))]
        actions.append(action)
        room, _ = rules.move(room, action)
        plan = plan[1:] if action == plan[0] else solver.solve(room)
    return actions, plan


def _plan_text(room: rules.Room, plan: list[str]) -> str:
    def where(name: str, cells: Iterable[int]) -> list[str]:
        return [f"{name} at row {cell // room.width} col {cell % room.width}" for cell in sorted(cells)]

    things = [*where("player", [room.player]), *where("box", room.boxes), *where("target", room.targets)]
    return f"{', '.join(things)}. {' '.join(plan)}"
