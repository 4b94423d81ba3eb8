"""An environment whose answers take a random time, named in the tests as tests.delayed_env:DelayedEnv."""

import os
import time

from envs.small import EchoEnv


class DelayedEnv(EchoEnv):
    """EchoEnv with waits drawn from the operating system: no two runs are timed alike."""

    def __init__(self, longest_s: float = 0.02, num_turns: int = 3):
        super().__init__(num_turns=num_turns)
        self._longest_s = longest_s

    def _wait(self):
        time.sleep(self._longest_s * os.urandom(1)[0] / 255)

    def reset(self, seed):
        self._wait()
        return super().reset(seed)

    def step(self, text):
        self._wait()
        return super().step(text)
