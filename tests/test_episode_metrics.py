"""Tokens of thinking and of the answer, counted in the sampled ids."""

import numpy as np

from turnppo_jax.training.episode_metrics import thinking_metrics
from turnppo_jax.types import StopReason, Trajectory, Turn

# One id may hold a part of the tag, or the tag with text around it.
PIECES = ["a", " b", "</thi", "nk>", "</think>", "x</think>y", "<answer>Up</answer>"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def trajectory(*responses):
    turns = [
        Turn(
            prompt_ids=np.zeros(2, np.int32), response_ids=np.asarray(ids, np.int32),
            behavior_logprobs=np.zeros(len(ids), np.float32), reward=0.0, stop=StopReason.EOS, policy_step=0,
            action=decode(ids),
        )
        for ids in responses
    ]  # fmt: skip
    return Trajectory(turns=turns, terminated=True, truncated=False, group=0, seed=0, episode=0)


def test_the_token_that_completes_the_first_tag_is_the_last_of_thinking():
    cases = [([0, 1, 4, 6], (3, 1)), ([0, 2, 3, 1, 6], (3, 2)), ([5], (1, 0)), ([0, 4, 0, 4, 1], (2, 3))]
    for ids, (thinking, answer) in cases:
        assert thinking_metrics([trajectory(ids)], decode) == {
            "episode/thinking_tokens_mean": thinking,
            "episode/answer_tokens_mean": answer,
            "episode/thinking_rate": 1.0,
        }


def test_means_are_over_the_turns_that_close_a_block():
    got = thinking_metrics([trajectory([0, 4, 6], [6]), trajectory([0, 1, 1, 4])], decode)
    assert got["episode/thinking_tokens_mean"] == 3.0 and got["episode/answer_tokens_mean"] == 0.5
    assert got["episode/thinking_rate"] == 2 / 3
    assert thinking_metrics([trajectory([6], [])], decode) == thinking_metrics([], decode) == {}
