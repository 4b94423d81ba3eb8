"""Command: supervised training on demonstrations, written as a model directory.

    python -m turnppo_jax.sft --config=configs/NAME.py --workdir=DIR [--config.sft.steps=100 ...]

Fields of the config that are read: `seed`, `model` (name, thinking, chat_template), `env` (id, kwargs) and `sft`
(see `training.warm_start.SFT_DEFAULTS`). DIR/model holds the result: `--config.model.name=DIR/model` begins a run
from it. DIR/sft_metrics.jsonl holds what is printed.
"""

import dataclasses
import pathlib
import sys

from absl import app, flags
from ml_collections import config_flags

from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.policy import Policy, load_policy, save_policy
from turnppo_jax.training import warm_start
from turnppo_jax.training.json_lines import append_jsonl

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for the model and the metrics.")


def run(config, workdir: pathlib.Path) -> Policy:
    """Loads the model, trains it on the demonstrations, writes it to `workdir/model` and returns it."""
    for name in ("seed", "model", "env"):
        if name not in config:
            raise ValueError(f"the config has no field {name!r}")
    sft = warm_start.sft_settings(config.get("sft", {}))
    model = config.model
    mesh = make_mesh()
    policy = load_policy(
        model.get("path") or model.name,
        seed=config.seed,
        mesh=mesh,
        thinking=model.get("thinking", True),
        chat_template=model.get("chat_template", ""),
    )
    workdir.mkdir(parents=True, exist_ok=True)
    metrics_path = workdir / "sft_metrics.jsonl"
    metrics_path.unlink(missing_ok=True)  # a second run in the same directory begins anew

    def report(row):
        print(warm_start.progress_line(row, sft["steps"]), flush=True)
        append_jsonl(metrics_path, [row])

    params, history = warm_start.warm_start(
        sft, policy.params, policy.sizes, policy.chat, mesh,
        env_id=config.env.id, env_kwargs=config.env.get("kwargs", {}), seed=config.seed, report=report,
    )  # fmt: skip
    policy = dataclasses.replace(policy, params=params)
    save_policy(policy, workdir / "model")
    last = history[-1]
    print(f"sft: {last['sft/demonstrations']} demonstrations, {last['sft/dropped']} longer than a row left out")
    print(f"sft: wrote {workdir / 'model'}")
    return policy


def main(argv: list[str]) -> None:
    """Checks the flags and runs; what is wrong with the input ends in one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        for flag in (_CONFIG, _WORKDIR):
            if flag.value is None:
                raise ValueError(f"flag --{flag.name} is missing")
        run(_CONFIG.value, pathlib.Path(_WORKDIR.value))
    except (ValueError, OSError) as error:
        sys.exit(f"sft: {error}")


def parse_flags(argv: list[str]) -> list[str]:
    """Flags of the command line; a config file or field that is wrong ends in one line, as a wrong flag does."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        sys.exit("sft: --config: " + " ".join(str(error).split()))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
