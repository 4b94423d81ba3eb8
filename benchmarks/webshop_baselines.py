"""What scripted shoppers score over a split of WebShop: the bounds between which a policy is read.

    python -m benchmarks.webshop_baselines [--catalogue=DIR] [--num_products=N] [--split=eval] [--episodes=500]

`first_item` searches the instruction and buys the first product; `shopper` knows the product that the goal was made
from. A line of JSON each: mean score and success rate with their standard errors over episodes, and turns.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence

from envs.webshop.env import WebShopEnv
from envs.webshop.shoppers import first_item, knowing, play

SHOPPERS = {"first_item": first_item, "shopper": knowing("instruction"), "shopper_by_query": knowing("query")}


def row(name: str, played: Sequence[dict]) -> dict:
    """The means of one shopper's episodes."""
    result = {"bench": "webshop_baseline", "shopper": name, "episodes": len(played)}
    for field in ("score", "success", "num_turns"):
        values = [float(episode[field]) for episode in played]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        result |= {f"{field}_mean": round(statistics.mean(values), 4), f"{field}_error": round(error, 4)}
    return result


def main() -> None:
    """Plays every shopper over the same seeds, from 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--catalogue", default="builtin", help="folder of official files, or of a built catalogue")
    parser.add_argument("--num_products", type=int, default=None, help="of the catalogue; see WebShopEnv")
    parser.add_argument("--split", default="eval")
    parser.add_argument("--goals", default="synthetic")
    parser.add_argument("--episodes", type=int, default=500, help="at most; a split is played once")
    parser.add_argument("--fair_options", action="store_true")
    parser.add_argument("--max_turns", type=int, default=15)
    flags = vars(parser.parse_args())
    episodes = flags.pop("episodes")
    env = WebShopEnv(**flags)
    if flags["split"] != "train":
        episodes = min(episodes, env.num_goals)
    for name, shopper in SHOPPERS.items():
        print(json.dumps(row(name, play(env, shopper, range(episodes)))), flush=True)


if __name__ == "__main__":
    main()
