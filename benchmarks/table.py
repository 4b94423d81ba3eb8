"""Prints the ratios of medians from the rows that one sitting has written.

python -m benchmarks.table RESULTS.jsonl
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from turnppo_jax.training.json_lines import read_jsonl


def seconds(row: Mapping[str, Any]) -> float:
    """Median seconds of a row; of iterations, without the first, which compiles."""
    if "median_s" in row:
        return row["median_s"]
    return statistics.median(row["iter_s"][1:])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each piece of work that was measured, with the other package's time over ours where both were."""
    found = {(row["bench"], row.get("mode", "")): row for row in rows}  # of several sittings the last
    lines = [f"{'work':42}{'ours':>10}{'tunix':>10}{'tunix/ours':>12}"]
    for name, ours, theirs in (
        ("sample 16 x (128 + 128), with log-probs", ("ours_sampler", "top_p=1"), ("tunix_sampler", "top_p=1,logprobs")),
        ("the same, greedy", ("ours_sampler", "greedy"), ("tunix_sampler", "greedy")),
        (
            "the same, top-p .95",
            ("ours_sampler", "top_p=.95"),
            ("tunix_sampler", "top_p=.95 full-vocab sort,logprobs"),
        ),
        ("the same, one sequence", ("ours_sampler_batch1", ""), ("tunix_sampler_batch1", "")),
        ("PPO iteration 16 x (128 + 128)", ("ours_ppo_iteration", ""), ("tunix_ppo_iteration", "")),
    ):
        pair = [seconds(found[key]) if key in found else None for key in (ours, theirs)]
        if pair[0] is None:
            continue
        cells = [f"{value:9.3f}s" if value is not None else f"{'-':>10}" for value in pair]
        ratio = f"{pair[1] / pair[0]:12.2f}" if pair[1] is not None else f"{'-':>12}"
        lines.append(f"{name:42}{cells[0]}{cells[1]}{ratio}")
    plain, nucleus = found.get(("ours_sampler", "top_p=1")), found.get(("ours_sampler", "top_p=.95"))
    if plain and nucleus:
        lines.append(f"ours, top-p .95 over top-p 1: {seconds(nucleus) / seconds(plain):.3f}")
    turns = [row for row in rows if row["bench"] == "ours_turns"]
    if turns:
        later = [second for row in turns[1:] for second in row["turn_s"]]
        lines.append(
            f"ours, a turn of an episode: {statistics.median(later):.3f} s, programs {turns[0]['programs']} after the "
            f"first episode and {turns[-1]['programs']} after the last"
        )
    peers = [row for row in rows if row["bench"] == "tunix_agentic_like_turns"]
    if peers:
        later = [turn[0] for row in peers[1:] for turn in row["turns_sec_ntok_budget"]]
        lines.append(f"tunix, a turn of an episode: {statistics.median(later):.3f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read_jsonl(sys.argv[1])))
