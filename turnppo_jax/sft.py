"""Command: supervised training on demonstrations, written as a model directory.

    python -m turnppo_jax.sft --config=configs/NAME.py --workdir=DIR [--config.sft.steps=100 ...]

Fields of the config that are read: `seed`, `model`, `env`, `mesh` and `sft` (see
`training.warm_start.SFT_DEFAULTS`). DIR/model holds the result: a run with `--config.model.name=DIR/model` begins
from it. DIR/sft_metrics.jsonl holds what is printed.
"""

import dataclasses
import pathlib
from typing import Any

from absl import flags

from turnppo_jax import command_line
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.policy import Policy, load_policy, save_policy
from turnppo_jax.settings import ModelSettings
from turnppo_jax.training.json_lines import append_jsonl
from turnppo_jax.training.warm_start import progress_line, sft_settings, warm_start

_CONFIG = command_line.config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for the model and the metrics.")


def run(config: dict[str, Any], workdir: pathlib.Path) -> Policy:
    """Loads the model, trains it on the demonstrations, writes it to `workdir/model` and returns it.

    Args:
      config: finalised, plain types.
      workdir: made where it is missing.

    Raises:
      UserError, ValueError: one line about the field that is wrong.
    """
    for name in ("seed", "model", "env"):
        if name not in config:
            raise command_line.UserError(f"field config.{name} is missing")
    sft = sft_settings(config.get("sft", {}))
    model = command_line.build(ModelSettings, config["model"], "config.model")
    mesh = make_mesh(**config.get("mesh", {}))
    policy = load_policy(
        model.name, seed=config["seed"], mesh=mesh, thinking=model.thinking, chat_template=model.chat_template
    )
    workdir.mkdir(parents=True, exist_ok=True)
    metrics_path = workdir / "sft_metrics.jsonl"
    metrics_path.unlink(missing_ok=True)  # a second run in the same directory begins anew

    def report(row):
        print(progress_line(row, sft["steps"]), flush=True)
        append_jsonl(metrics_path, [row])

    params, history = warm_start(
        sft, policy.params, policy.sizes, policy.chat, mesh,
        env_id=config["env"]["id"], env_kwargs=config["env"].get("kwargs", {}), seed=config["seed"], report=report,
    )  # fmt: skip
    policy = dataclasses.replace(policy, params=params)
    save_policy(policy, workdir / "model")
    last = history[-1]
    print(f"sft: {last['sft/demonstrations']} demonstrations, {last['sft/dropped']} longer than a row left out")
    print(f"sft: wrote {workdir / 'model'}")
    return policy


def main(_) -> None:
    """Trains as the flags say."""
    if not _WORKDIR.value:
        raise command_line.UserError("--workdir=DIR is missing")
    run(command_line.finalise(_CONFIG.value), pathlib.Path(_WORKDIR.value))


if __name__ == "__main__":
    command_line.run(main)
