"""Runs `turnppo_jax.train` and kills its own process with SIGKILL at a named point.

    python -m tests.killed_run PHASE:STEP [flags of train]

PHASE is rollout (half of the episodes played), update (after the first optimizer step of two) or save (while the
checkpoint of STEP is being written).
"""

import os
import signal
import sys

from turnppo_jax import command_line, train
from turnppo_jax.rollout import collector
from turnppo_jax.training import checkpoint, learner


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(phase: str, step: int) -> None:
    if phase == "rollout":
        play = collector.Collector.play

        def play_half(self, params, episodes, sampling, *, policy_step, on_round=None):
            def count(finished, total):
                if policy_step == step and finished >= total / 2 and sampling.temperature > 0:
                    kill()

            return play(self, params, episodes, sampling, policy_step=policy_step, on_round=count)

        collector.Collector.play = play_half
    elif phase == "update":
        whole = learner.Learner.step

        def step_half(self, *args, **kwargs):
            if kwargs["step"] == step - 1:
                update = self._programs["actor_update"]

                def update_then_kill(*inner):
                    update(*inner)
                    kill()

                self._programs["actor_update"] = update_then_kill
            return whole(self, *args, **kwargs)

        learner.Learner.step = step_half
    elif phase == "save":
        save = checkpoint.Checkpoints.save

        def save_then_kill(self, at, *args, **kwargs):
            started = save(self, at, *args, **kwargs)
            if at == step:
                kill()  # the write goes on in the background and is cut off
            return started

        checkpoint.Checkpoints.save = save_then_kill
    else:
        raise ValueError(phase)


if __name__ == "__main__":
    phase, step = sys.argv.pop(1).split(":")
    arm(phase, int(step))
    command_line.run(train.main)
