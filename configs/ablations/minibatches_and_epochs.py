"""Updates from one rollout: more minibatches or more epochs, turn-PPO on Sokoban.

    python -m turnppo_jax.compare --spec=configs/ablations/minibatches_and_epochs.py:model=qwen2.5-3b --out=DIR

The paper (arXiv 2512.17008) takes four minibatches once; the same number of optimizer steps from one minibatch four
times reuses old samples, and RAGEN (arXiv 2504.20073) found fresh rollouts better. The first arm is the paper's run.
Not run.
"""

from typing import Any


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is that of configs/paper/sokoban.py without `algo`."""
    return {
        "seeds": [0, 1, 2],
        "arms": {
            f"minibatches_{minibatches}-epochs_{epochs}": {
                "config": f"configs/paper/sokoban.py:algo=turn_ppo,{argument}".rstrip(","),
                "overrides": {"algorithm.num_minibatches": minibatches, "algorithm.epochs": epochs},
            }
            for minibatches, epochs in ((4, 1), (1, 1), (2, 1), (8, 1), (1, 4), (2, 2), (4, 2))
        },
    }
