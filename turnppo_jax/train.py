"""Command: trains an agent with turn-level PPO, or another algorithm of the same parts.

    python -m turnppo_jax.train --config=configs/NAME.py[:algo=...] --workdir=DIR [--config.a.b=value ...]

The same command continues a run that was stopped. What a run writes: see README, "What a run leaves". With several
hosts it is started on each of them (see `host_flags`), with a workdir that all share; all write checkpoints, the
first host writes everything else.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from turnppo_jax import command_line
from turnppo_jax.host_flags import joined_hosts
from turnppo_jax.models.critic import init_critic
from turnppo_jax.parallel.agreement import agree, failing_fast, together
from turnppo_jax.parallel.exchange import exchange_json
from turnppo_jax.parallel.hosts import check_same, check_shared, is_first, local_view
from turnppo_jax.parallel.weight_sync import make_weight_sync
from turnppo_jax.policy import Policy, load_policy, save_policy
from turnppo_jax.recipe_notes import recipe_notes
from turnppo_jax.rollout.chat import Chat
from turnppo_jax.rollout.collector import Collector, training_episodes
from turnppo_jax.rollout.extra_rollouts import branch_values, greedy_scores
from turnppo_jax.rollout.sampler import Sampler
from turnppo_jax.settings import RunSettings, run_settings
from turnppo_jax.sft import warm_up
from turnppo_jax.training.checkpoint import Checkpoints, cut_back
from turnppo_jax.training.checkpoint_reading import placed_shapes
from turnppo_jax.training.collapse import CollapseWatch, read_history
from turnppo_jax.training.episode_metrics import episode_metrics, thinking_metrics
from turnppo_jax.training.evaluation import EvaluationResult, evaluate
from turnppo_jax.training.json_lines import append_jsonl, write_atomically
from turnppo_jax.training.learner import Learner
from turnppo_jax.training.metrics import MetricWriter, make_writer
from turnppo_jax.training.reward_terms import apply_terms, turn_rewards
from turnppo_jax.training.stopping import StopRequested, StopSignal
from turnppo_jax.training.trajectory_log import write_trajectories
from turnppo_jax.types import Trajectory

_CONFIG = command_line.config_flag()
_ROLLOUT_COUNTS = (
    "env_errors", "env_timeouts", "dropped_episodes", "context_overflows", "prefill_tokens", "sampled_tokens",
    "discarded_tokens",
)  # fmt: skip
_WORKDIR = command_line.workdir_flag()


def train(config: dict[str, Any], workdir: pathlib.Path) -> None:
    """Trains to the end of the config's steps, from where the run in `workdir` stands.

    Args:
      config: finalised, plain types.
      workdir: of the run.

    Raises:
      UserError, ValueError: one line about the field that is wrong.
    """
    with together():
        settings = run_settings(config)
        mesh, rollout_mesh, sampling_mesh = settings.make_meshes()
    check_same("config", config)
    check_shared(workdir)
    if is_first():
        for line in (*settings.learner.algorithm.warnings(), *settings.reward.notes(), *recipe_notes(settings)):
            print(f"note: {line}", flush=True)
    with contextlib.ExitStack() as stack:
        # The policy that the run begins from, and the models. Before it stands there is nothing to save on SIGTERM.
        policy = starting_policy(settings, mesh, workdir)
        stop = stack.enter_context(StopSignal())
        learner = Learner(
            policy.sizes,
            mesh,
            settings.learner,
            settings.actor_optimizer,
            settings.critic_optimizer,
            seed=settings.seed,
        )
        critic_params = None
        if settings.learner.algorithm.has_critic:
            critic_params = init_critic(policy.sizes, jax.random.key(settings.seed), backbone=policy.params)
        actor, critic = learner.init_states(policy.params, critic_params)
        ref_params = policy.params if learner.needs_reference else None
        # The states hold copies; without a reference the first parameters have done their part.
        policy = dataclasses.replace(policy, params=None)
        del critic_params

        # Where the run stands.
        checkpoints = stack.enter_context(
            Checkpoints(
                workdir,
                config=config,
                sizes=policy.sizes,
                score=f"eval/{settings.eval_env.id}/success_rate",
                **dataclasses.asdict(settings.checkpoint),
            )
        )
        finished = -1
        if checkpoints.latest_step() is not None:
            # Only their shapes and places are kept: fresh states and saved ones may not fit beside each other.
            fresh = placed_shapes({"actor": actor, "critic": critic})
            del actor, critic
            finished, state = checkpoints.restore_latest(fresh)
            actor, critic = state["actor"], state["critic"]
            del state
        success = f"eval/{settings.eval_env.id}/{'' if settings.evaluation.samples else 'greedy_'}success_rate"
        with together():
            writer, history = MetricWriter(), []
            if is_first():
                if finished >= 0:
                    print(f"continuing {workdir} after step {finished}", flush=True)
                cut_back(workdir, finished)
                write_atomically(workdir / "config.json", (json.dumps(config, indent=2) + "\n").encode())
                (workdir / "crashed.json").unlink(missing_ok=True)  # below, if it did, it is written anew
                history = read_history(workdir, success)
                writer = make_writer(
                    settings.writers, workdir, config=config, total_steps=settings.steps,
                    first_step=finished if finished >= 0 else None,
                )  # fmt: skip
            stack.callback(writer.close)
        watch = CollapseWatch(settings.collapse, success, history)
        # Only the first host has a history: what it says counts.
        crash = exchange_json(watch.crash())[0]
        if crash:
            _keep_crash(workdir, crash)
            return

        # Those who play.
        rollout_weights = make_weight_sync(policy.sizes, mesh, rollout_mesh, settings.sampler.compute_dtype)
        with together():
            sampler = Sampler(policy.sizes, sampling_mesh, settings.sampler, policy.chat.eos_ids)
            play = {
                "limits": settings.rollout.limits,
                "stop_strings": settings.rollout.stop_strings,
                "lockstep": settings.rollout.lockstep,
            }
            players = stack.enter_context(Collector(sampler, policy.chat, settings.env, **play))
            examinees = stack.enter_context(Collector(sampler, policy.chat, settings.eval_env, **play))
        stack.enter_context(failing_fast())  # entered last, so that it comes before what waits for other hosts

        def evaluate_after(step: int, weights: Any) -> dict[str, float]:
            started = time.perf_counter()
            result = evaluate(
                examinees, weights, settings.evaluation, env_id=settings.eval_env.id, seed=settings.seed,
                policy_step=step, on_round=stop.raise_if_requested,
            )  # fmt: skip
            with together():
                if is_first():
                    _keep_evaluation(workdir, step, result)
            return result.metrics | {"time/eval_s": time.perf_counter() - started}

        held = finished  # the step after which the states in hand are
        weights = local_view(rollout_weights(actor.params), sampling_mesh)
        try:
            if finished < 0:
                metrics = evaluate_after(0, weights)
                watch.add(0, metrics)
                with together():
                    writer.log(0, metrics)
                checkpoints.save(0, {"actor": actor, "critic": critic}, metrics, force=True)
                finished = held = 0
            for step in range(finished + 1, settings.steps + 1):
                started = time.perf_counter()
                episodes = training_episodes(
                    settings.seed, step, settings.rollout.num_prompts, settings.learner.algorithm.group_size
                )
                trajectories, counts = players.play(
                    weights, episodes, settings.rollout.sampling, policy_step=step,
                    on_round=stop.raise_if_requested,
                )  # fmt: skip
                with together():
                    rewarded = apply_terms(trajectories, settings.reward)
                asked, more = _ask_further(
                    players, weights, trajectories, settings, step=step, on_round=stop.raise_if_requested
                )
                metrics = _rollout_metrics(trajectories, counts, policy.chat) | rewarded.metrics | more
                # The memory of rollout weights and cache is free for the update.
                weights = None
                sampler.release()
                actor, critic, result = learner.step(
                    actor, critic, rewarded.trajectories, step=step - 1, temperature=settings.rollout.temperature,
                    ref_params=ref_params, **asked,
                )  # fmt: skip
                held = step
                weights = local_view(rollout_weights(actor.params), sampling_mesh)
                metrics |= result.metrics | {
                    "compile/learner": sum(learner.compile_counts().values()),
                    "compile/sampler": sampler.num_programs,
                    "time/step_s": time.perf_counter() - started,
                    "host/peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                }
                due = settings.evaluation.due(step, settings.steps)
                if due:
                    metrics |= evaluate_after(step, weights)
                metrics |= watch.add(step, metrics)
                crash = exchange_json(watch.crash())[0] if settings.collapse.stop_on_collapse else None
                if crash and not due:
                    # A comparison counts a crashed run with its last evaluation: that of the policy that crashed.
                    metrics |= evaluate_after(step, weights)
                    metrics |= watch.add(step, metrics)
                    crash = exchange_json(watch.crash())[0]
                with together():
                    if is_first():
                        write_trajectories(
                            workdir, step, trajectories, result.turn_values, result.turn_advantages, rewarded.terms
                        )
                        writer.log(step, metrics)
                finished = step
                last = step == settings.steps or crash is not None
                checkpoints.save(step, {"actor": actor, "critic": critic}, metrics, force=last)
                if crash:
                    _keep_crash(workdir, crash)
                    break
                agree(stop=stop.requested)
        except StopRequested:
            if held == finished >= 0:
                checkpoints.save(finished, {"actor": actor, "critic": critic}, force=True)
            if is_first():
                saved = checkpoints.latest_step()
                print(f"stopped after step {finished}; saved: step {saved}; the same command continues", flush=True)
            sys.exit(143)


def starting_policy(settings: RunSettings, mesh: Mesh, workdir: pathlib.Path) -> Policy:
    """The model of the config after its warm start; kept in `workdir/start`, so that it is made once a run."""
    kept, model = workdir / "start", settings.model

    def load(name: str) -> Policy:
        with together():
            return load_policy(**dataclasses.asdict(model) | {"name": name}, seed=settings.seed, mesh=mesh)

    if not exchange_json(kept.is_dir())[0]:
        policy = load(model.name)
        if not settings.sft["steps"]:
            return policy
        policy = warm_up(
            policy, settings.sft, mesh, env_id=settings.env.id, env_kwargs=dict(settings.env.kwargs),
            seed=settings.seed, workdir=workdir,
        )  # fmt: skip
        unfinished = workdir / "start.unfinished"
        with together():
            if is_first():
                shutil.rmtree(unfinished, ignore_errors=True)
        save_policy(policy, unfinished)
        with together():
            if is_first():
                unfinished.rename(kept)
        del policy
    # Read back also where it was just made, so that a continued run begins from the same bytes.
    return load(str(kept))


def _ask_further(
    players: Collector,
    weights: Any,
    trajectories: Sequence[Trajectory],
    settings: RunSettings,
    *,
    step: int,
    on_round: Callable[[int, int], None],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What the estimator wants to know beside the trajectories, as arguments of `Learner.step`; and metrics."""
    cfg = settings.learner.algorithm
    given = {
        "seed": settings.seed,
        "step": step,
        "rewards": functools.partial(turn_rewards, settings=settings.reward),
        "on_round": on_round,
    }
    if cfg.needs == "greedy_scores":
        scores, metrics = greedy_scores(players, weights, trajectories, **given)
        return {"greedy_scores": scores}, metrics
    if cfg.needs == "branch_values":
        values, metrics = branch_values(
            players, weights, trajectories, num_branches=cfg.num_branches, gamma=cfg.gamma,
            sampling=settings.rollout.sampling, **given,
        )  # fmt: skip
        return {"branch_values": values}, metrics
    return {}, {}


def _rollout_metrics(trajectories, counts, chat: Chat) -> dict[str, float]:
    metrics = episode_metrics(trajectories, num_dropped=counts["dropped_episodes"])
    metrics |= thinking_metrics(trajectories, chat.decode)
    seconds = counts["rollout_s"]
    # Calls to the device are left out: how many there are depends on the timing of the environments.
    metrics |= {f"rollout/{name}": float(counts.get(name, 0)) for name in _ROLLOUT_COUNTS}
    return metrics | {
        "time/rollout_s": seconds,
        "time/exchange_s": counts["exchange_s"],
        "sampler/tokens_per_s": counts.get("sampled_tokens", 0) / max(seconds, 1e-9),
    }


def _keep_crash(workdir: pathlib.Path, crash: dict[str, Any]) -> None:
    """Says why the run ends, and keeps it in crashed.json."""
    with together():
        if is_first():
            write_atomically(workdir / "crashed.json", (json.dumps(crash, indent=2) + "\n").encode())
            print(f"crashed at step {crash['step']}: {crash['why']}", flush=True)
            print("the same command goes on with --config.collapse.stop_on_collapse=False", flush=True)


def _keep_evaluation(workdir: pathlib.Path, step: int, result: EvaluationResult) -> None:
    """Prints the lines and adds the numbers to eval.json, where the newest evaluation of a step counts.

    What each room had goes to eval_rooms.jsonl, so that runs can be compared room by room.
    """
    for line in result.lines:
        print(f"step {step}  {line}", flush=True)
    path = workdir / "eval.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[str(step)] = result.metrics
    write_atomically(path, (json.dumps(known, indent=2) + "\n").encode())
    append_jsonl(workdir / "eval_rooms.jsonl", [{"step": step} | result.rooms])


def main(_) -> None:
    """Trains as the flags say."""
    if not _WORKDIR.value:
        raise command_line.UserError("--workdir=DIR is missing")
    with joined_hosts():
        train(command_line.finalise(_CONFIG.value), pathlib.Path(_WORKDIR.value))


if __name__ == "__main__":
    command_line.run(main)
