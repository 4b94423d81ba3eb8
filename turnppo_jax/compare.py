"""Command: runs a set of arms with several seeds and compares them honestly; or shows two runs' episodes side by side.

    python -m turnppo_jax.compare --out=DIR --seeds=0,1,2 --runs='turn_ppo=configs/quickstart.py:algo=turn_ppo'
        --runs='grpo=configs/quickstart.py:algo=grpo;actor_optimizer.learning_rate=3e-4' --overrides=evaluation.every=10
    python -m turnppo_jax.compare --out=DIR --spec=configs/ablations/NAME.py      (see `comparison.arms.read_spec`)
    python -m turnppo_jax.compare --trajectories A B [--step=N] [--html=FILE]     (files or run directories)

Every run is `python -m turnppo_jax.train` in DIR/<arm>/seed<k>: the same command continues what was interrupted, and a
finished run is not run again. Arms whose model, env and sft sections are equal share one warm start a seed. Writes
comparison.md, comparison.json and comparison.png, anew whenever a run has ended. With one accelerator leave --jobs at
1: a TPU serves one process.
"""

import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from turnppo_jax import command_line
from turnppo_jax.command_line import UserError
from turnppo_jax.comparison import arms, pairs, pairs_page
from turnppo_jax.comparison.comparing import run_and_compare
from turnppo_jax.training.json_lines import write_atomically

_RUNS = flags.DEFINE_multi_string("runs", [], "NAME=CONFIG.py[:ARGUMENT][;field=value]...; the first is the reference.")
_SPEC = flags.DEFINE_string("spec", None, "FILE.py[:ARGUMENT] or FILE.json, in place of --runs.")
_OVERRIDES = flags.DEFINE_multi_string("overrides", [], "field=value for all arms of --runs.")
_SEEDS = flags.DEFINE_list("seeds", None, "Seeds of the runs, with commas; default 0,1,2.")
_METRIC = flags.DEFINE_string("metric", None, "What is compared; default the evaluated success rate.")
_LAST = flags.DEFINE_integer("last", None, "A run counts with the mean of so many last evaluations; default 3.")
_JOBS = flags.DEFINE_integer("jobs", None, "Runs at once; default 1.")
_OUT = flags.DEFINE_string("out", None, "The directory of the comparison.")
_TRAJECTORIES = flags.DEFINE_multi_string("trajectories", [], "Two trajectory files or run directories.")
_STEP = flags.DEFINE_integer("step", None, "Of run directories; default the newest step that both have.")
_HTML = flags.DEFINE_string("html", None, "With --trajectories: a page with all pairs.")
_PAIRS = flags.DEFINE_integer("pairs", 3, "With --trajectories: how many pairs are printed.")


def comparison_of_flags() -> arms.Comparison:
    """What the flags ask for; those that are given count before the fields of --spec.

    Raises:
      UserError: no arms, both kinds of them, or a value that is not allowed.
    """
    if _SPEC.value and (_RUNS.value or _OVERRIDES.value):
        raise UserError(f"--spec={_SPEC.value} with --runs or --overrides; allowed: one of the two ways")
    if _SPEC.value:
        fields = arms.read_spec(_SPEC.value)
    else:
        shared = arms.parse_changes(_OVERRIDES.value)
        fields = {"arms": tuple(arms.parse_arm(text, shared) for text in _RUNS.value)}
    if _SEEDS.value is not None or "seeds" not in fields:
        given = _SEEDS.value if _SEEDS.value is not None else ["0", "1", "2"]
        if not all(seed.strip().isdigit() for seed in given):
            raise UserError(f"--seeds={','.join(given)}: needs whole numbers with commas, such as 0,1,2")
        fields["seeds"] = tuple(int(seed) for seed in given)
    for name, flag in (("metric", _METRIC), ("last", _LAST), ("jobs", _JOBS)):
        if flag.value is not None:
            fields[name] = flag.value
    return arms.Comparison(**fields)


def show_trajectories(paths: Sequence[str], step: int | None, html: str | None, num_printed: int) -> None:
    """Prints the first pairs of episodes with the same seed, and writes a page with all of them.

    Raises:
      UserError: not two files or directories, or none of their episodes have a seed in common.
    """
    if len(paths) != 2:
        raise UserError(f"--trajectories needs two files or run directories, got {len(paths)}")
    if num_printed < 0:
        raise UserError(f"--pairs={num_printed}: needs at least 0")
    sides = pairs.read_sides([pathlib.Path(path) for path in paths], step)
    paired = pairs.pair(*sides)
    print(pairs.to_text(paired, num_printed), flush=True)
    if html:
        write_atomically(pathlib.Path(html), pairs_page.to_html(paired).encode())
        print(f"all {len(paired.pairs)} pairs: {html}", flush=True)


def joined_arguments(arguments: Sequence[str]) -> list[str]:
    """`--trajectories A B` as `--trajectories=A --trajectories=B`: a flag of the parser takes one value."""
    out, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument not in ("--trajectories", "-trajectories"):
            out.append(argument)
            continue
        while rest and not rest[0].startswith("-"):
            out.append(f"--trajectories={rest.pop(0)}")
    return out


def main(_) -> None:
    """Compares as the flags say."""
    if _TRAJECTORIES.value:
        show_trajectories(_TRAJECTORIES.value, _STEP.value, _HTML.value, _PAIRS.value)
        return
    if not _OUT.value:
        raise UserError("--out=DIR is missing")
    command = shlex.join(["python", "-m", "turnppo_jax.compare", *sys.argv[1:]])
    run_and_compare(comparison_of_flags(), pathlib.Path(_OUT.value), command)


if __name__ == "__main__":
    sys.argv[1:] = joined_arguments(sys.argv[1:])
    command_line.run(main)
