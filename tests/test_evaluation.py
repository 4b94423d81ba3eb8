"""What an evaluation says of the episodes that it has played."""

import numpy as np
import pytest

from turnppo_jax.training.evaluation import EvaluationSettings, evaluate
from turnppo_jax.types import StopReason, Trajectory, Turn


class Played:
    """A collector that returns made-up episodes: the last info of each, by its index."""

    def __init__(self, infos):
        self._infos = infos

    def play(self, params, episodes, sampling, *, policy_step, on_round):
        assert [episode.index for episode in episodes] == list(range(len(episodes)))
        turn = {"prompt_ids": np.zeros(2, np.int32), "response_ids": np.zeros(1, np.int32), "policy_step": 0}
        turn |= {"behavior_logprobs": np.zeros(1, np.float32), "stop": StopReason.EOS}
        trajectories = [
            Trajectory(
                turns=[Turn(**turn, reward=-0.1, info={"score": 0.0}), Turn(**turn, reward=info["score"], info=info)],
                terminated=True, truncated=False, group=0, seed=0, episode=index,
            )
            for index, info in self._infos.items()
        ]  # fmt: skip
        return trajectories, {"dropped_episodes": len(episodes) - len(trajectories)}


def test_the_score_of_an_episode_is_its_last_and_a_missing_episode_has_none():
    infos = {0: {"score": 1.0, "success": True}, 1: {"score": 0.5, "success": False}, 3: {"score": 0.25}}
    settings = EvaluationSettings(num_seeds=2, samples=2, greedy=False)
    result = evaluate(Played(infos), None, settings, env_id="shop", seed=0, policy_step=3)
    # Two rooms with means .75 and .125: t(.975, 1 degree) = 12.7062, s / sqrt(2) = .3125.
    expected = {"": 0.4375, "_low": 0.4375 - 12.7062 * 0.3125, "_high": 0.4375 + 12.7062 * 0.3125}
    for end, value in expected.items():
        assert result.metrics[f"eval/shop/score_mean{end}"] == pytest.approx(value, rel=1e-5)
    assert result.metrics["eval/shop/return_mean"] == pytest.approx(0.4375 - 0.1 * 3 / 4)
    assert result.metrics["eval/shop/success_rate"] == 0.25
    assert "score 0.438 [-3.533, 4.408]" in result.lines[0]


def test_an_environment_without_scores_has_no_such_metric(monkeypatch):
    monkeypatch.setattr(Trajectory, "score", None)
    infos = {index: {"score": 1.0, "success": True} for index in range(4)}
    settings = EvaluationSettings(num_seeds=2, samples=2, greedy=False)
    result = evaluate(Played(infos), None, settings, env_id="shop", seed=0, policy_step=3)
    assert not [name for name in result.metrics if "score" in name] and "score" not in result.lines[0]
