"""The table of a comparison is ratios of medians, other over ours, and leaves open what was not measured."""

from benchmarks.table import table

OURS = {"bench": "ours_sampler", "mode": "top_p=1", "median_s": 1.5}


def lines(*rows):
    return [" ".join(line.split()) for line in table(rows).splitlines()]


def test_ratios_of_medians_of_the_last_sitting():
    shown = lines(
        OURS | {"median_s": 99.0},
        OURS,
        {"bench": "ours_sampler", "mode": "top_p=.95", "median_s": 1.8},
        {"bench": "tunix_sampler", "mode": "top_p=1,logprobs", "median_s": 3.0},
        # Iterations: the first compiles and does not count; of 5, 1, 2 the median is 2.
        {"bench": "ours_ppo_iteration", "iter_s": [60.0, 5.0, 1.0, 2.0], "median_s": 2.0},
        {"bench": "tunix_ppo_iteration", "iter_s": [30.0, 9.0, 7.0, 8.0]},
        {"bench": "ours_turns", "turn_s": [9.0, 0.1], "programs": 2},
        {"bench": "ours_turns", "turn_s": [0.2, 0.2], "programs": 2},
        {"bench": "tunix_agentic_like_turns", "turns_sec_ntok_budget": [[4.0, 24, 1]]},
        {"bench": "tunix_agentic_like_turns", "turns_sec_ntok_budget": [[0.4, 24, 1], [0.6, 24, 1]]},
    )
    assert "sample 16 x (128 + 128), with log-probs 1.500s 3.000s 2.00" in shown
    assert "the same, top-p .95 1.800s - -" in shown
    assert "PPO iteration 16 x (128 + 128) 2.000s 8.000s 4.00" in shown
    assert "ours, top-p .95 over top-p 1: 1.200" in shown
    assert "ours, a turn of an episode: 0.200 s, programs 2 after the first episode and 2 after the last" in shown
    assert "tunix, a turn of an episode: 0.500 s" in shown


def test_ours_alone():
    assert lines(OURS)[1:] == ["sample 16 x (128 + 128), with log-probs 1.500s - -"]
