"""An environment that breaks for some seeds, named in the tests as tests.failing_env:FailingEnv."""

import os
import time

from envs.small import ParityEnv


class FailingEnv(ParityEnv):
    """ParityEnv that raises in the second turn of the episodes with these seeds; its answers take random times."""

    def __init__(self, fail_seeds: tuple = (), num_turns: int = 3):
        super().__init__(num_turns=num_turns)
        self._fail_seeds = fail_seeds
        self._breaks = False

    def reset(self, seed):
        self._breaks = seed in self._fail_seeds
        return super().reset(seed)

    def step(self, text):
        time.sleep(0.01 * os.urandom(1)[0] / 255)
        if self._breaks and self._turn == 1:
            raise RuntimeError("the environment broke")
        return super().step(text)
