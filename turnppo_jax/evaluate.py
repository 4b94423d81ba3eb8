"""Command: evaluates a policy on fixed held-out seeds, with n and 95 % intervals.

    python -m turnppo_jax.evaluate --config=configs/NAME.py [--workdir=DIR [--step=N]] [--config.evaluation.samples=8]

With --workdir it takes the newest checkpoint of that run (or step N), without one `config.model.name`.
--output=FILE also writes the numbers as JSON, --trajectories_output=FILE every episode as a line (`compare
--trajectories` shows two such files side by side). With several hosts it is started on each of them (see `host_flags`);
they divide the episodes, and the first prints and writes.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import flags

from turnppo_jax import command_line
from turnppo_jax.host_flags import joined_hosts
from turnppo_jax.parallel.agreement import together
from turnppo_jax.parallel.hosts import check_same, is_first, local_view
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.parallel.weight_sync import make_weight_sync
from turnppo_jax.policy import load_policy
from turnppo_jax.rollout.collector import Collector
from turnppo_jax.rollout.sampler import Sampler
from turnppo_jax.settings import run_settings
from turnppo_jax.training.checkpoint_reading import restore_actor_params
from turnppo_jax.training.evaluation import EvaluationResult, evaluate
from turnppo_jax.training.json_lines import write_atomically
from turnppo_jax.training.trajectory_log import write_played

_CONFIG = command_line.config_flag()
_WORKDIR = command_line.workdir_flag()
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of the run; default the newest.")
_OUTPUT = flags.DEFINE_string("output", None, "A JSON file for the numbers.")
_EPISODES = flags.DEFINE_string("trajectories_output", None, "A JSON-lines file for the episodes.")


def run(config: dict[str, Any], workdir: pathlib.Path | None, step: int | None) -> EvaluationResult:
    """Evaluates the model of the config, or of a run's checkpoint.

    Args:
      config: finalised, plain types.
      workdir: of a run, or None.
      step: of the run's checkpoint, None for the newest.

    Raises:
      UserError, ValueError: one line about the field that is wrong.
    """
    with together():
        settings = run_settings(config)
        if step is not None and workdir is None:
            raise command_line.UserError(f"--step={step} needs --workdir=DIR")
        mesh, rollout_mesh, sampling_mesh = settings.make_meshes()
    check_same("config", config)
    with together():
        start = workdir / "start" if workdir else None
        name = str(start) if start and start.is_dir() else settings.model.name
        model = dataclasses.asdict(settings.model) | {"name": name}
        policy = load_policy(**model, seed=settings.seed, mesh=mesh, weights=workdir is None)
    params, sizes = policy.params, policy.sizes
    if workdir is not None:
        params, sizes, _ = restore_actor_params(workdir, step, shardings=lambda shapes: shardings(mesh, shapes))
        if sizes != policy.sizes:
            raise command_line.UserError(
                f"the checkpoint in {workdir} holds another model than config.model.name={name}"
            )
    # From here on only the weights that sample are held.
    policy = dataclasses.replace(policy, params=None)
    params = make_weight_sync(sizes, mesh, rollout_mesh, settings.sampler.compute_dtype)(params)
    params = local_view(params, sampling_mesh)
    sampler = Sampler(sizes, sampling_mesh, settings.sampler, policy.chat.eos_ids)
    with Collector(
        sampler,
        policy.chat,
        settings.eval_env,
        settings.rollout.limits,
        stop_strings=settings.rollout.stop_strings,
        lockstep=settings.rollout.lockstep,
    ) as examinees:
        return evaluate(
            examinees,
            params,
            settings.evaluation,
            env_id=settings.eval_env.id,
            seed=settings.seed,
            policy_step=step or 0,
        )


def main(_) -> None:
    """Evaluates as the flags say."""
    workdir = pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None
    with joined_hosts():
        result = run(command_line.finalise(_CONFIG.value), workdir, _STEP.value)
        if not is_first():
            return
        for line in result.lines:
            print(line)
        if _OUTPUT.value:
            write_atomically(pathlib.Path(_OUTPUT.value), (json.dumps(result.metrics, indent=2) + "\n").encode())
        if _EPISODES.value:
            write_played(_EPISODES.value, _STEP.value or 0, result.trajectories)


if __name__ == "__main__":
    command_line.run(main)
