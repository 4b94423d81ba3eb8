"""WebShop under any text: exceptions, rewards and memory over many hostile actions, and the time of a step.

    python -m benchmarks.webshop_actions [--catalogue=DIR] [--actions=100000] [--steps=2000]

Half of the hostile actions are plain ones of the page, so that every page is reached; the rest is what a policy or an
attacker may write. The steps are those of `shoppers.knowing` with detours to sub-pages, on one process; those that
search are told apart. A line of JSON each.
"""

import argparse
import gc
import json
import pathlib
import random
import statistics
import threading
import time
from collections.abc import Collection, Sequence

from envs.webshop.actions import SEARCH, Action
from envs.webshop.env import WebShopEnv
from envs.webshop.shoppers import knowing

_CHARACTERS = (
    "[",
    "]",
    "<",
    ">",
    "［",
    "］",
    "\n",
    "\r",
    "\0",
    "\ud800",
    "\u202e",
    "🔥",
    "İ",
    "/",
    "\\",
    '"',
    "'",
    "a",
    " ",
)
_ARGUMENTS = (
    *("", " ", "<r>", "<a> x", "<c> fashion", "shirt", "<|im_end|>", "[" * 50, "x" * 3000, "0", "-1", "1", "{}", "%s"),
    *("../..", "search_results", "shirt " * 400, "ｓｈｉｒｔ", "back to search]", "click[buy now", "\N{KELVIN SIGN}"),
)
_KINDS = ({}, {"prompt": "compact"}, {"observation": "text_rich", "show_attributes": True}, {"thinking": False})


def hostile_text(draws: random.Random, clickables: Collection[str], *, thinking: bool, words: Sequence[str]) -> str:
    """A response that a policy might write, or an attacker; one in two is a plain action.

    Args:
      draws: of the response.
      clickables: of the page.
      thinking: whether plain ones have a thinking block.
      words: of plain searches.
    """
    think = "<think></think>" if thinking else ""
    if draws.random() < 0.5:
        names = [name for name in clickables if name != SEARCH]
        clicks = names and draws.random() < 0.8
        action = f"click[{draws.choice(names)}]" if clicks else f"search[{' '.join(draws.choices(words, k=3))}]"
        return f"{think}<answer>{action}</answer>"
    noise = "".join(draws.choices(_CHARACTERS, k=draws.randint(0, 30)))
    argument = draws.choice([*_ARGUMENTS, noise, noise, *draws.choices(list(clickables) or [""], k=8)])
    name = draws.choice(["click", "search", "click", "search", "Click", "SEARCH", "buy", "click[x] click", ""])
    action = f"{name}[{argument}]"
    answer = f"<answer>{action}</answer>"
    return draws.choice(
        [f"{think}{answer}"] * 4
        + [f"{think}<answer>{action}{action}</answer>", action, argument, f"<think>{action}", f"<answer>{action}"]
        + [f"</answer>{action}<answer>", f"{think}<answer>{answer}</answer>", "", f"{think}{answer}{answer}"]
    )


def resident_mib() -> float:
    """Memory of this process that is in use now."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the system does not say VmRSS")


def hostile(env_kwargs: dict, actions: int) -> dict:
    """Plays hostile texts in each kind of prompt; whatever is raised ends the benchmark."""
    draws = random.Random(0)
    counts = {"invalid": 0, "purchases": 0, "successes": 0, "truncated": 0, "resets": 0}
    rewards, scores, memory, pages = [0.0, 0.0], [0.0, 0.0], [], set()
    threads, started = threading.active_count(), time.perf_counter()
    envs = [(WebShopEnv(**env_kwargs, split="train", **kind), kind.get("thinking", True)) for kind in _KINDS]
    done, seed = 0, 0
    for env, _ in envs:
        env.reset(seed)
    words = sorted({word for number in range(50) for word in _words(envs[0][0], number)})
    while done < actions:
        env, thinking = envs[seed % len(envs)]
        env.reset(seed)
        seed += 1
        counts["resets"] += 1
        ended = False
        while not ended and done < actions:
            text = hostile_text(draws, env.session.clickables, thinking=thinking, words=words)
            observation, reward, terminated, truncated, info = env.step(text)
            assert isinstance(observation, str)
            assert reward == (-0.1 if info["invalid_action"] else info["score"])
            assert 0.0 <= info["score"] <= 1.0
            json.dumps(info)
            rewards = [min(rewards[0], reward), max(rewards[1], reward)]
            scores = [min(scores[0], info["score"]), max(scores[1], info["score"])]
            counts["invalid"] += info["invalid_action"]
            counts["purchases"] += terminated
            counts["successes"] += info["success"]
            counts["truncated"] += truncated
            pages.add(info["page"])
            ended = terminated or truncated
            done += 1
            if done % (actions // 5) == 0:
                gc.collect()
                memory.append(round(resident_mib(), 1))
    return {
        "bench": "webshop_hostile_actions",
        "actions": done,
        **counts,
        "reward_min": rewards[0],
        "reward_max": rewards[1],
        "score_min": scores[0],
        "score_max": scores[1],
        "pages": sorted(pages),
        "resident_mib_by_fifth": memory,
        "threads_added": threading.active_count() - threads,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _words(env: WebShopEnv, seed: int) -> list[str]:
    env.reset(seed)
    return env.goal.target.title.split()


def steps(env_kwargs: dict, number: int) -> dict:
    """Microseconds of a step, parsing and the text of the page included."""
    env = WebShopEnv(**env_kwargs, split="all", max_turns=100)
    shopper, draws = knowing(), random.Random(0)
    times, resets, seed = {"search": [], "other": []}, [], 0
    while len(times["other"]) + len(times["search"]) < number:
        started = time.perf_counter()
        env.reset(seed)
        resets.append(time.perf_counter() - started)
        seed += 1
        ended = False
        while not ended:
            action = shopper(env.session, env.goal)
            if env.session.place == "item" and draws.random() < 0.2:
                action = Action("click", draws.choice(["description", "features"]))
            response = env.write_response(action)
            started = time.perf_counter()
            *_, terminated, truncated, _ = env.step(response)
            times["search" if action.name == SEARCH else "other"].append(time.perf_counter() - started)
            ended = terminated or truncated
    row = {"bench": "webshop_steps", "steps": sum(map(len, times.values()))}
    for name, seconds in (*times.items(), ("reset", resets)):
        median = statistics.median(seconds)
        row |= {
            f"{name}_median_us": round(median * 1e6),
            f"{name}_per_s": round(1 / median),
            f"num_{name}": len(seconds),
        }
    everything = sorted(times["search"] + times["other"])
    for name, seconds in (
        ("all_median", statistics.median(everything)),
        ("all_mean", statistics.mean(everything)),
        ("all_p99", everything[int(0.99 * len(everything))]),
    ):
        row[f"{name}_us"] = round(seconds * 1e6)
    return row


def main() -> None:
    """Runs both and prints their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--catalogue", default="builtin", help="folder of official files, or of a built catalogue")
    parser.add_argument("--actions", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=2_000)
    flags = parser.parse_args()
    for measure, number in ((steps, flags.steps), (hostile, flags.actions)):
        print(json.dumps(measure({"catalogue": flags.catalogue}, number)), flush=True)


if __name__ == "__main__":
    main()
