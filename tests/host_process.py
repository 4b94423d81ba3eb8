"""A host of the tests: runs what a list of phases says and writes down how each ended. Run as a program:

    python -m tests.host_process PHASES.json OUTPUT_DIR [PORT NUM_PROCESSES PROCESS_ID]

A phase is {"name", "command", "workdir", "step", "changes", "faults"}; commands: see `run_phase`.
`changes` are fields of tests/host_config.py by their path, `faults` are what `armed` takes. OUTPUT_DIR/NAME.INDEX.npz
holds the sampled ids and log-probs, and the models after the last step; OUTPUT_DIR/NAME.INDEX.json how it ended.
Episodes that something happens to are named by their index in the rollout, so one process plays them like several.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.host_config import get_config
from turnppo_jax import command_line, evaluate, train
from turnppo_jax.models.critic import init_critic
from turnppo_jax.parallel import hosts
from turnppo_jax.parallel.agreement import failing_fast
from turnppo_jax.parallel.exchange import exchange
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.parallel.sharding import place
from turnppo_jax.policy import load_policy
from turnppo_jax.rollout import collector
from turnppo_jax.settings import run_settings
from turnppo_jax.training.checkpoint_reading import restore_onto
from turnppo_jax.training.learner import Learner


class Recorder:
    """What the learner and the evaluation see: sampled ids, log-probs, and the states after each step."""

    def __init__(self):
        self.arrays = {}
        self._gather = None

    def trajectories(self, prefix, trajectories):
        for trajectory in trajectories:
            name = f"{prefix}/{trajectory.episode}"
            self.arrays[f"ids/{name}"] = np.concatenate(
                [np.zeros(0, np.int32)] + [ids for turn in trajectory.turns for ids in (turn.response_ids, [-1])]
            )
            self.arrays[f"logprobs/{name}"] = np.concatenate(
                [np.zeros(0, np.float32)] + [turn.behavior_logprobs for turn in trajectory.turns]
            )

    def states(self, states):
        if self._gather is None:
            whole = NamedSharding(jax.tree.leaves(states)[0].sharding.mesh, PartitionSpec())
            self._gather = jax.jit(lambda tree: tree, out_shardings=whole)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(self._gather(states))):
            self.arrays["state/" + jax.tree_util.keystr(path, simple=True, separator=".")] = leaf


@contextlib.contextmanager
def recording(recorder):
    whole_step = Learner.step

    def step(self, actor, critic, trajectories, **kwargs):
        recorder.trajectories(f"step{kwargs['step'] + 1}", trajectories)
        actor, critic, result = whole_step(self, actor, critic, trajectories, **kwargs)
        recorder.states({"actor": actor, "critic": critic})
        return actor, critic, result

    with mock.patch.object(Learner, "step", step):
        yield


@contextlib.contextmanager
def armed(faults):
    """Makes things go wrong: {"nan": [step, episode], "raise": [step, host], "sigterm": [step, host]}."""
    whole_play = collector.play_episodes

    def play(episodes, *args, policy_step, on_round=None, **kwargs):
        here = [policy_step, jax.process_index()]
        if faults.get("raise") == here:
            raise RuntimeError("the rollout broke")
        if faults.get("sigterm") == here:
            os.kill(os.getpid(), signal.SIGTERM)
        played, counts = whole_play(episodes, *args, policy_step=policy_step, on_round=on_round, **kwargs)
        for trajectory in played:
            if faults.get("nan") == [policy_step, trajectory.episode]:
                trajectory.turns[0].reward = float("nan")
        return played, counts

    with mock.patch.object(collector, "play_episodes", play):
        yield


def restore(config, workdir, step, recorder):
    """The whole state of a checkpoint on the mesh of the config, with nothing computed."""
    settings = run_settings(config)
    mesh = settings.mesh.make()
    policy = load_policy(settings.model.name, seed=1, mesh=mesh)
    learner = Learner(policy.sizes, mesh, settings.learner, settings.actor_optimizer, settings.critic_optimizer)
    actor, critic = learner.init_states(
        policy.params, init_critic(policy.sizes, jax.random.key(1), backbone=policy.params)
    )
    target = {"actor": actor, "critic": critic}
    states = restore_onto(workdir.absolute() / "checkpoints", step, target, cast=False)
    assert jax.tree.map(lambda x: x.sharding, states) == jax.tree.map(lambda x: x.sharding, target)
    recorder.states(states)


def check_views():
    """A host's view of weights that are split over its devices: its own buffers, not copies."""
    mesh = make_mesh(data=2, tensor=2)
    own = hosts.host_mesh(mesh, lockstep=False)
    assert dict(own.shape) == {"data": 1, "fsdp": 1, "tensor": 2, "sequence": 1}
    assert own.devices.flatten().tolist() == jax.local_devices()
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    whole = {"split": place(values, NamedSharding(mesh, PartitionSpec(None, "tensor")))}
    view = hosts.local_view(whole, own)
    np.testing.assert_array_equal(view["split"], values)
    assert view["split"].sharding == NamedSharding(own, PartitionSpec(None, "tensor"))
    pointers = [
        {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        for array in (whole["split"], view["split"])
    ]
    assert pointers[0] == pointers[1] and len(pointers[0]) == 2
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(view["split"]), values + 1)
    assert hosts.local_view(whole, mesh)["split"] is whole["split"]
    apart = place(values, NamedSharding(mesh, PartitionSpec("data")))
    for refuse in (lambda: hosts.local_view(apart, own), lambda: hosts.host_mesh(make_mesh(tensor=4), lockstep=False)):
        try:
            refuse()
        except ValueError as error:
            print(error)
        else:
            raise AssertionError("what is not whole on a host was not refused")


def run_phase(phase, recorder):
    config = get_config()
    with config.unlocked():
        config.update_from_flattened_dict(phase.get("changes", {}))
    config = command_line.finalise(config)
    workdir = pathlib.Path(phase.get("workdir", "."))
    with recording(recorder), armed(phase.get("faults", {})):
        if phase["command"] == "train":
            train.train(config, workdir)
            return None
        if phase["command"] == "alone":
            if not hosts.is_first():
                raise RuntimeError("only here")
            exchange(b"")  # the other one never comes
        if phase["command"] == "views":
            check_views()
            return None
        if phase["command"] == "restore":
            restore(config, workdir, phase["step"], recorder)
            return None
        result = evaluate.run(config, workdir, phase.get("step"))
        for number, played in enumerate(result.trajectories.values()):
            recorder.trajectories(f"eval{number}", played)
        return result.metrics


def main(phases, output, port=None, num_processes=None, process_id=None):
    if port is not None:
        hosts.start(coordinator=f"localhost:{port}", num_processes=int(num_processes), process_id=int(process_id))
    for phase in json.loads(pathlib.Path(phases).read_text()):
        recorder, metrics = Recorder(), None
        try:
            with failing_fast():
                metrics = run_phase(phase, recorder)
            ended = "finished"
        except (Exception, SystemExit) as error:
            ended = f"{type(error).__name__}: {error}"
        path = pathlib.Path(output) / f"{phase['name']}.{jax.process_index()}"
        path.with_suffix(path.suffix + ".json").write_text(json.dumps({"ended": ended, "metrics": metrics}))
        np.savez(path.with_suffix(path.suffix + ".npz"), **recorder.arrays)
        print(f"phase {phase['name']}: {ended} ({time.process_time():.0f} s of processor time so far)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
