"""Command: supervised training on demonstrations, written as a model directory.

    python -m turnppo_jax.sft --config=configs/NAME.py --workdir=DIR [--config.sft.steps=100 ...]

Fields of the config that are read: `seed`, `model`, `env`, `mesh` and `sft` (see
`training.warm_start.SFT_DEFAULTS`). DIR/model holds the result: a run with `--config.model.name=DIR/model` begins
from it. DIR/sft_metrics.jsonl holds what is printed. With several hosts it is started on each of them (see
`host_flags`).
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from turnppo_jax import command_line
from turnppo_jax.host_flags import joined_hosts
from turnppo_jax.parallel.agreement import together
from turnppo_jax.parallel.hosts import check_same, check_shared, is_first
from turnppo_jax.parallel.mesh import MeshSettings
from turnppo_jax.policy import Policy, load_policy, save_policy
from turnppo_jax.settings import ModelSettings
from turnppo_jax.training.json_lines import append_jsonl
from turnppo_jax.training.warm_start import progress_line, sft_settings, warm_start

_CONFIG = command_line.config_flag()
_WORKDIR = command_line.workdir_flag()


def warm_up(
    policy: Policy, sft: Mapping[str, Any], mesh: Mesh, *, env_id: str, env_kwargs: Mapping[str, Any], seed: int,
    workdir: pathlib.Path,
) -> Policy:  # fmt: skip
    """The policy after the supervised training that `sft` describes; prints it and logs it to `workdir`.

    Args:
      policy: to begin with.
      sft: `config.sft`, see `training.warm_start.SFT_DEFAULTS`.
      mesh: places the parameters.
      env_id: the environment that demonstrates.
      env_kwargs: its arguments.
      seed: of the run.
      workdir: gets sft_metrics.jsonl.

    Raises:
      ValueError: one line about the field that is wrong.
    """
    sft = sft_settings(sft)
    metrics_path = workdir / "sft_metrics.jsonl"
    with together():
        if is_first():
            workdir.mkdir(parents=True, exist_ok=True)
            metrics_path.unlink(missing_ok=True)  # a second run in the same directory begins anew

    def report(row):
        if is_first():
            print(progress_line(row, sft["steps"]), flush=True)
            append_jsonl(metrics_path, [row])

    params, history = warm_start(
        sft, policy.params, policy.sizes, policy.chat, mesh, env_id=env_id, env_kwargs=env_kwargs, seed=seed,
        report=report, say=lambda line: is_first() and print(f"sft: {line}", flush=True),
    )  # fmt: skip
    last = history[-1]
    if is_first():
        print(f"sft: {last['sft/demonstrations']} demonstrations, {last['sft/dropped']} longer than a row left out")
        if last["sft/retokenised"]:
            print(f"sft: {last['sft/retokenised']} conversations whose text encodes to other tokens than were sampled")
    return dataclasses.replace(policy, params=params)


def run(config: dict[str, Any], workdir: pathlib.Path) -> Policy:
    """Loads the model, trains it on the demonstrations, writes it to `workdir/model` and returns it.

    Args:
      config: finalised, plain types.
      workdir: made where it is missing.

    Raises:
      UserError, ValueError: one line about the field that is wrong.
    """
    with together():
        for name in ("seed", "model", "env"):
            if name not in config:
                raise command_line.UserError(f"field config.{name} is missing")
        model = command_line.build(ModelSettings, config["model"], "config.model")
        mesh = command_line.build(MeshSettings, config.get("mesh", {}), "config.mesh").make()
    check_same("config", config)
    check_shared(workdir)
    with together():
        policy = load_policy(**dataclasses.asdict(model), seed=config["seed"], mesh=mesh)
    env = config["env"]
    policy = warm_up(
        policy, config.get("sft", {}), mesh, env_id=env["id"], env_kwargs=env.get("kwargs", {}), seed=config["seed"],
        workdir=workdir,
    )  # fmt: skip
    save_policy(policy, workdir / "model")
    if is_first():
        print(f"sft: wrote {workdir / 'model'}")
    return policy


def main(_) -> None:
    """Trains as the flags say."""
    if not _WORKDIR.value:
        raise command_line.UserError("--workdir=DIR is missing")
    with joined_hosts():
        run(command_line.finalise(_CONFIG.value), pathlib.Path(_WORKDIR.value))


if __name__ == "__main__":
    command_line.run(main)
