"""What might keep GRPO from collapsing on Sokoban: no standard deviation, no KL, more rooms, beside turn-PPO.

    python -m turnppo_jax.compare --spec=configs/ablations/grpo.py:model=qwen2.5-3b --out=DIR

In the paper (arXiv 2512.17008) GRPO with 32 rooms of 16 trajectories and a KL of .001 crashed with Qwen2.5-7B, and
taking the KL away did not help. More rooms are groups of 8 and of 4 at the same 512 trajectories. Runs stop where an
alarm of a collapse goes on; the table says when. Not run.
"""

from typing import Any


def get_spec(argument: str = "") -> dict[str, Any]:
    """The arms; `argument` is that of configs/paper/sokoban.py without `algo`."""

    def arm(algo: str, **changes: Any) -> dict[str, Any]:
        return {"config": f"configs/paper/sokoban.py:algo={algo},{argument}".rstrip(","), "overrides": changes}

    return {
        "seeds": [0, 1, 2],
        "overrides": {"collapse.stop_on_collapse": True},
        "arms": {
            "grpo": arm("grpo"),
            "without_std": arm("grpo", **{"algorithm.group_scale": "none"}),
            "without_kl": arm("grpo", **{"algorithm.kl_coef": 0.0}),
            "rooms_64": arm("grpo", **{"algorithm.group_size": 8, "rollout.num_prompts": 64}),
            "rooms_128": arm("grpo", **{"algorithm.group_size": 4, "rollout.num_prompts": 128}),
            "turn_ppo": arm("turn_ppo"),
        },
    }
