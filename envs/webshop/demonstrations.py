"""Conversations in which a scripted shopper buys what is asked for: the data of a warm start.

    python -m envs.webshop.demonstrations --out=FILE.jsonl [--episodes=1000] [--env_kwargs='{"prompt": "compact"}']

writes them to a file that `config.sft.path` can name; a config can also have them made (`config.sft.source`).
"""

import argparse
import json
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

from envs import registry
from envs.demonstrating import check_demonstrations
from envs.draws import draws_for
from envs.webshop.actions import CLICK, SEARCH, Action
from envs.webshop.env import WebShopEnv
from envs.webshop.pages import BUY
from envs.webshop.shoppers import Shopper, knowing


def demonstrations(
    env_kwargs: dict[str, Any],
    seeds: Iterable[int],
    *,
    env_id: str = "webshop",
    query: str = "instruction",
    noise: float = 0.0,
    think: str = "none",
    only_success: bool = False,
    run_seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Plays episodes with `shoppers.knowing`, through the environment itself.

    The prompts are those that the policy will see, so goals, split and limits are the environment's: with
    `split="train"` (its default) no held-out product is ever asked for. Each demonstration depends on its own seed and
    `run_seed` alone, not on the others.

    Args:
      env_kwargs: arguments of the environment.
      seeds: one episode each.
      env_id: "webshop" or another id of a WebShop environment.
      query: what the shopper searches for: "instruction", "request" or "query", see `shoppers.search_text`.
      noise: probability that a turn clicks something at random that is on the page, anything but the purchase; the
        shopper goes on from there. Keeps a warm start from becoming certain of every action.
      think: "none" leaves the thinking block empty; "plan" says why the action is taken. Without effect where the
        environment asks for no thinking block.
      only_success: leave out episodes whose purchase scores less than 1, or that reach the limit of turns.
      run_seed: of the noise.

    Yields:
      `{"messages": [{"role", "content"}, ...], "success": bool, "score": float, "seed": int}`, each fit for a line of
      JSON. The last message is the policy's.

    Raises:
      ValueError: an argument out of range, by name.
    """
    check_demonstrations(noise=noise, think=think)
    shopper = knowing(query)
    env = registry.make(env_id, **env_kwargs)
    return _play_all(env, shopper, seeds, noise, think, only_success, run_seed)


def _play_all(env, shopper, seeds, noise, think, only_success, run_seed) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        draws = draws_for(run_seed, seed)
        demonstration = _play(env, shopper, seed, noise, think, draws)
        if demonstration["success"] or not only_success:
            yield demonstration
    env.close()


def _play(env: WebShopEnv, shopper: Shopper, seed: int, noise: float, think: str, draws: random.Random):
    observation, info = env.reset(seed)
    messages = [{"role": "system", "content": env.instructions}] if env.instructions else []
    ended = False
    while not ended:
        action = shopper(env.session, env.goal)
        others = [name for name in env.session.clickables if name not in (BUY.lower(), SEARCH)]
        if draws.random() < noise and others:
            action = Action(CLICK, others[int(draws.random() * len(others))])
        response = env.write_response(action, _thought(env, action) if think == "plan" else "")
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": response}]
        observation, _, terminated, truncated, info = env.step(response)
        ended = terminated or truncated
    return {"messages": messages, "success": info["success"], "score": info["score"], "seed": seed}


def _thought(env: WebShopEnv, action: Action) -> str:
    """Why the action is taken, in words that the pages and the instruction hold."""
    goal, session = env.goal, env.session
    if action.name == SEARCH:
        return "I have to find the product first."
    if session.place == "results":
        for product in session.shown_products():
            if product.asin.lower() == action.argument:
                kind = "fits the instruction" if product == goal.target else "is worth a look"
                return f"{product.title} {kind}."
        return "The product is not on this page."
    if session.place == "item":
        if action.argument == BUY.lower():
            return "Everything is chosen."
        for name, values in session.shown_product().options.items():
            if action.argument in values:
                return f"The {name} is {action.argument}."
    return "I go on from here."


def main(arguments: list[str] | None = None) -> None:
    """Writes demonstrations, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--first_seed", type=int, default=10_000)
    parser.add_argument("--env_kwargs", type=json.loads, default={}, help="arguments of the environment, as JSON")
    parser.add_argument("--query", default="instruction")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--think", default="none")
    parser.add_argument("--only_success", action="store_true")
    flags = vars(parser.parse_args(arguments))
    out, env_kwargs = flags.pop("out"), flags.pop("env_kwargs")
    first, episodes = flags.pop("first_seed"), flags.pop("episodes")
    try:
        rows = demonstrations(env_kwargs, range(first, first + episodes), **flags)
        written = successes = 0
        with out.open("w", encoding="ascii") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                written += 1
                successes += row["success"]
    except (OSError, ValueError) as error:
        parser.exit(2, f"demonstrations: {error}\n")
    print(f"{written} demonstrations, {successes} of them successful, in {out}")


if __name__ == "__main__":
    main()
