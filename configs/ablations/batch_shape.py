"""How many rooms and how often each: turn-PPO on Sokoban with 128 to 1,024 trajectories a step, in groups of 1 to 16.

    python -m turnppo_jax.compare --spec=configs/ablations/batch_shape.py:model=qwen2.5-3b --out=DIR

B_R trajectories a step are B_R / G rooms played G times. The paper (arXiv 2512.17008) trains PPO with G = 1: a critic
needs no group, and more rooms are seen. RAGEN (arXiv 2504.20073) found little difference on Sokoban between 1 and 32.
The first arm is the paper's run. Not run.
"""

from typing import Any


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is that of configs/paper/sokoban.py without `algo`."""
    shapes = [(512, 1), (128, 1), (256, 1), (1024, 1), (512, 4), (512, 16)]
    return {
        "seeds": [0, 1, 2],
        "arms": {
            f"trajectories_{batch}-group_{group}": {
                "config": f"configs/paper/sokoban.py:algo=turn_ppo,{argument}".rstrip(","),
                "overrides": {"rollout.num_prompts": batch // group, "algorithm.group_size": group},
            }
            for batch, group in shapes
        },
    }
