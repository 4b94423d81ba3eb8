"""Two runs' episodes side by side: who is paired with whom, what is shown, and what a hostile text cannot do."""

import html.parser
import json
import pathlib

import numpy as np
import pytest

from tests import quick_runs
from turnppo_jax.command_line import UserError
from turnppo_jax.comparison import pairs, pairs_page
from turnppo_jax.training.trajectory_log import read_trajectories, trajectory_path, write_played, write_trajectories
from turnppo_jax.types import StopReason, Trajectory, Turn


def episode(seed, *turns, success=False, group=0, index=0):
    """Turns are (observation, action, reward)."""
    made = [
        Turn(
            np.zeros(2, np.int32), np.zeros(3, np.int32), np.zeros(3, np.float32), reward, StopReason.EOS, 1,
            observation=observation, action=action, info={"success": success},
        )
        for observation, action, reward in turns
    ]  # fmt: skip
    return Trajectory(made, terminated=True, truncated=False, group=group, seed=seed, episode=index)


def side(path, trajectories, values=None, step=3):
    write_trajectories(path, step, trajectories, turn_values=values)
    return path


@pytest.fixture
def two(tmp_path):
    """Seeds 5, 5, 7, 9 on the left and 7, 5, 8 on the right: pairs 5 and 7, two alone on the left, one on the right."""
    left = side(
        tmp_path / "a",
        [
            episode(5, ("room A", "Up", -0.1), ("room B", "Down", 10.9), success=True),
            episode(5, ("room A", "Left", -0.1)),
            episode(7, ("room C", "Right", 0.0)),
            episode(9, ("room D", "Right", 0.0)),
        ],
        values=[[1.25, 2.5], [0.0], [0.0], [0.0]],
    )
    right = side(
        tmp_path / "b",
        [
            episode(7, ("room C", "Up", -1.0)),
            episode(5, ("room A", "Push", -0.2), ("room X", "Push", -0.2), ("room Y", "Pull", -0.2)),
            episode(8, ("room E", "Up", 0.0)),
        ],
    )
    return left, right


def test_episodes_are_paired_by_seed_in_order_and_the_rest_is_counted(two):
    paired = pairs.pair(*pairs.read_sides(two, None))
    assert [(left["seed"], right["seed"]) for left, right in paired.pairs] == [(5, 5), (7, 7)]
    assert paired.pairs[0][0]["turns"][0]["action"] == "Up", "the first of the seed with the first of it"
    assert (paired.alone_left, paired.alone_right) == (2, 1)
    line = pairs.summary_line(paired)
    # Returns on the pairs: (10.8 + 0) / 2 and (-.6 - 1) / 2.
    assert line == (
        "2 pairs; without a partner: 2 left, 1 right. On the pairs: return 5.400 and -0.800, success 0.500 and 0.000"
    )


def test_turns_stand_side_by_side_with_rewards_and_values(two):
    text = pairs.to_text(pairs.pair(*pairs.read_sides(two, 3)), 1, width=100)
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    actions = next(line for line in lines if line.startswith("Up"))
    assert actions.split("|")[1].strip() == "Push"
    rewards = [line for line in lines if line.startswith("reward -0.100")]
    assert rewards[0].startswith("reward -0.100, value +1.250, 3 tokens") and "| reward -0.200, 3 tokens" in rewards[0]
    assert lines.count("room A") == 1, "what both see is said once"
    assert any(line.startswith("room B") and line.endswith("| room X") for line in lines)
    assert any(line.startswith("(the episode is over)") for line in lines)
    assert "seed 7" not in text, "one pair was asked for"


def test_long_and_wide_text_is_cut_to_its_column_and_control_characters_are_shown(tmp_path):
    action = "\x1b[2J\u202e推箱子 is to push" + "x" * 70 + "推" * 30
    left = side(tmp_path / "a", [episode(1, ("see", action, 0.0))])
    right = side(tmp_path / "b", [episode(1, ("see", "short", 0.0))])
    text = pairs.to_text(pairs.pair(*pairs.read_sides([left, right], None)), 1, width=80)
    assert "\x1b" not in text and "\u202e" not in text and "\ufffd[2J\ufffd推箱子 is to" in text
    column = {
        line.index("|") + sum(c == "推" or c in "箱子" for c in line.split("|")[0])
        for line in text.splitlines()
        if "|" in line
    }
    assert column == {39}, "the bar stands in one column"


class Reader(html.parser.HTMLParser):
    """Text and tags of a page; what is left open at the end."""

    def __init__(self):
        super().__init__()
        self.text, self.tags, self.open = "", [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_has_every_pair_needs_nothing_else_and_escapes_what_it_shows(two, tmp_path):
    hostile = '<script>alert(1)</script> & "quotes"'
    left = side(tmp_path / "c", [episode(5, (hostile, hostile, 0.5)), episode(6, ("a", "b", -1.0))])
    paired = pairs.pair(*pairs.read_sides([left, side(tmp_path / "d", [episode(5, ("o", "p", 0.0))])], None))
    reader = Reader()
    reader.feed(pairs_page.to_html(paired))
    assert reader.open == [] and reader.text.count(hostile) == 2
    assert "script" not in [tag for tag, _ in reader.tags]
    assert not [
        value
        for _, attributes in reader.tags
        for name, value in attributes.items()
        if name in ("src", "href") and not value.startswith("#")
    ]
    page = pairs_page.to_html(pairs.pair(*pairs.read_sides(two, None)))
    assert page.count("<h2 ") == 2 and 'href="#pair2"' in page and 'id="pair2"' in page
    assert "the episode is over" in page and "value +2.500" in page and "2 left, 1 right" in page


def test_files_and_steps_that_are_missing_are_named(two, tmp_path):
    left, right = two
    for paths, step, message in (
        ((left, tmp_path / "nowhere"), None, "no trajectories at .*nowhere: neither a file nor a run directory"),
        ((left, right), 4, "a has no trajectories of step 4; it has 1 steps from 3 to 3"),
        ((left, side(tmp_path / "e", [episode(1)], step=8)), None, "have no step of trajectories in common"),
        ((left, side(tmp_path / "f", [episode(77)])), None, "have no seed in common"),
    ):
        with pytest.raises(UserError, match=message):
            pairs.pair(*pairs.read_sides(list(paths), step))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="is no file of trajectories"):
        pairs.read_sides([tmp_path / "metrics.jsonl", trajectory_path(left, 3)], None)


def test_evaluated_episodes_pair_within_their_way_of_sampling(tmp_path):
    sampled, greedy = [episode(5, ("o", "sampled", 0.0))], [episode(5, ("o", "greedy", 0.0))]
    write_played(tmp_path / "a.jsonl", 7, {"temperature 1": sampled, "greedy": greedy})
    write_played(tmp_path / "b.jsonl", 7, {"greedy": greedy})
    assert [record["sampling"] for record in read_trajectories(tmp_path / "a.jsonl")] == ["temperature 1", "greedy"]
    paired = pairs.pair(*pairs.read_sides([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], None))
    ((left, right),) = paired.pairs
    assert left["turns"][0]["action"] == right["turns"][0]["action"] == "greedy" and paired.alone_left == 1


def test_the_command_takes_two_paths_after_one_flag(two, tmp_path):
    page = tmp_path / "page.html"
    done = quick_runs.run(tmp_path, "turnppo_jax.compare", "--pairs=1", "--trajectories", *two, f"--html={page}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 pairs; without a partner: 2 left, 1 right") and page.exists()
    wrong = quick_runs.run(tmp_path, "turnppo_jax.compare", "--trajectories", two[0])
    assert wrong.returncode == 2, wrong.stderr
    assert "--trajectories needs two files or run directories, got 1" in wrong.stderr


def test_records_of_a_run_pair_as_json(two):
    """The page and the text read nothing but the file: what a run wrote long ago can be shown."""
    lines = [json.loads(line) for line in pathlib.Path(trajectory_path(two[0], 3)).read_text().splitlines()]
    assert lines == list(pairs.read_sides(two, 3)[0].records)
