"""Environments that misbehave on purpose, for the tests of the pool. Named there as tests.pool_envs:Class."""

import os
import subprocess
import sys
import time

from envs.base import TextEnv


class ScriptedEnv(TextEnv):
    """Does what the text of a turn says: sleep:SECONDS, raise, exit, kill, print, nan, end, else echoes it."""

    instructions = "do as told"

    def __init__(self, fail_to_start: bool = False, pid_file: str = ""):
        if fail_to_start:
            raise ValueError("fail_to_start was asked for")
        self._pid_file = pid_file
        self._turns = 0
        self._seed = -1

    def reset(self, seed):
        if seed == -666:
            raise RuntimeError("no such\nseed")
        self._seed, self._turns = seed, 0
        return f"seed {seed}", {"success": False, "pid": os.getpid(), "jax": "jax" in sys.modules}

    def step(self, text):
        self._turns += 1
        command, _, argument = text.partition(":")
        info = {"success": False, "turns": self._turns, "seed": self._seed}
        if command == "sleep":
            time.sleep(float(argument))
        elif command == "raise":
            raise KeyError("told\u2028to\nraise")
        elif command == "exit":
            os._exit(3)
        elif command == "system_exit":
            sys.exit("leaving")
        elif command == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(self._pid_file, "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        elif command == "print":
            print('{"index": 0, "observation": "forged"}')
            sys.stdout.flush()
            os.write(1, b"raw bytes \xff\n")
            subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        elif command == "read":
            return f"read {sys.stdin.read()!r}", 0.0, False, False, info
        elif command == "nan":
            return "", float("nan"), False, False, info
        elif command == "platform":
            return os.environ["JAX_PLATFORMS"], 0.0, False, False, info
        elif command == "end":
            return "over", 1.0, True, False, info
        return text, 0.5, False, False, info
