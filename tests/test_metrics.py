"""Metric writers, the trajectory log, and JSON lines that survive kill -9 and any text."""

import io
import json
import sys
import types
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from turnppo_jax.training import json_lines, metrics, trajectory_log
from turnppo_jax.types import StopReason, Trajectory, Turn

NASTY = 'brick \U0001f9f1 half \ud83e line\u2028next\u0085\x00 "quoted"\\ \n end'


def strict(line: str):
    """Parses as a reader that knows only the standard would."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_metrics_file_has_one_standard_json_line_a_log(tmp_path):
    writer = metrics.make_writer(["jsonl"], tmp_path / "new")
    writer.log(0, {"eval/sokoban/success_rate": 0.25, "episode/count": np.int64(3)})
    writer.log(1, {"policy/loss": jnp.float32(0.1), "policy/approx_kl": float("nan"), "optim/grad_norm": np.inf})
    data = (tmp_path / "new" / "metrics.jsonl").read_text()  # already there: the writer is still open
    writer.close()
    first, second = [strict(line) for line in data.splitlines()]
    assert first == {"step": 0, "eval/sokoban/success_rate": 0.25, "episode/count": 3}
    assert second == {
        "step": 1,
        "policy/loss": float(np.float32(0.1)),  # the float32 as it is: runs are compared bit for bit
        "policy/approx_kl": None,
        "optim/grad_norm": None,
        "non_finite": {"policy/approx_kl": "nan", "optim/grad_norm": "inf"},
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (jnp.bfloat16(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (jnp.ones((1, 2), jnp.bfloat16), [[1.0, 1.0]]),
        ({1: (2, None), "a": {True}}, {"1": [2, None], "a": [True]}),
        (StopReason.EOS, "eos"),
        (b"\xf0\x9f\xa7", "\ufffd"),
        ("\ud83e", "\ufffd"),
        (NASTY, NASTY.replace("\ud83e", "\ufffd")),
        ([float("nan"), np.float64("-inf"), 1.5], [None, None, 1.5]),
        (ValueError("x"), "x"),
    ],
)
def test_any_value_becomes_standard_json(value, expected):
    line = json_lines.dumps(value)
    assert line.isascii() and "\n" not in line
    assert strict(line) == expected


def test_an_unfinished_last_line_is_dropped_and_later_steps_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    json_lines.append_jsonl(path, [{"step": step, "text": NASTY} for step in (0, 1, 1, 2, 3)])
    whole = path.read_bytes()
    with open(path, "ab") as file:
        file.write(b'{"step": 4, "text": "bri')
    assert [row["step"] for row in json_lines.read_jsonl(path)] == [0, 1, 1, 2, 3]
    assert json_lines.truncate_jsonl(path, 9) == 1
    assert path.read_bytes() == whole
    assert json_lines.truncate_jsonl(path, 1) == 2
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    assert json_lines.truncate_jsonl(path, 1) == 0
    assert json_lines.truncate_jsonl(path, -1) == 3
    assert path.read_bytes() == b""
    assert json_lines.truncate_jsonl(tmp_path / "absent.jsonl", 1) == 0
    assert list(tmp_path.iterdir()) == [path]  # no temporary file is left


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [row["step"] for row in json_lines.read_jsonl(path)] == [1, 2]
    json_lines.truncate_jsonl(path, 5)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'  # the next row starts on its own line


def test_damage_elsewhere_is_named_not_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not JSON"):
        json_lines.truncate_jsonl(path, 1)
    path.write_bytes(b'{"step": 1}\n{"other": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: a row needs an integer 'step'"):
        json_lines.truncate_jsonl(path, 1)


def events(directory):
    """(step, name, value) of every scalar in the event files of a directory, and the steps hidden by a restart."""
    scalars, restarts = [], []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.HasField("session_log"):
                restarts.append(event.step)
    return scalars, restarts


def test_tensorboard_events(tmp_path):
    writer = metrics.make_writer(["tensorboard"], tmp_path, first_step=4)
    writer.log(5, {"policy/loss": 0.5, "episode/seeds": [1, 2], "value/loss": jnp.float32(2.0)})
    writer.close()
    scalars, restarts = events(tmp_path / "tensorboard")
    assert scalars == [(5, "policy/loss", 0.5), (5, "value/loss", 2.0)]
    assert restarts == [5]  # what an interrupted run wrote from step 5 on is hidden


def test_line_for_a_person():
    line = metrics.format_line(
        12,
        {
            "episode/return_mean": 3.25,
            "episode/success_rate": 0.4062,
            "policy/loss": -0.00123,
            "policy/approx_kl": float("nan"),
            "time/rollout_s": 3.14,
            "sampler/tokens_per_s": 1234.5,
            "eval/sokoban/success_rate": 0.41,
            "policy/other": 7.0,
        },
        total_steps=200,
    )
    assert " ".join(line.split()) == (
        "step 12/200 return 3.250 success 40.6% loss -0.00123 kl nan rollout 3.1s tok/s 1234 eval/sokoban 41.0%"
    )
    assert metrics.format_line(1, {"sft/loss": 0.123456, "text": "x"}) == "step 1  sft/loss 0.12346"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_console_prints_lines_and_on_a_terminal_a_bar_with_the_time_left(monkeypatch):
    plain = io.StringIO()
    writer = metrics.ConsoleWriter(total_steps=3, file=plain)
    writer.log(1, {"policy/loss": 0.5})
    writer.close()
    assert plain.getvalue() == "step 1/3  loss   0.50000\n"
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    writer = metrics.ConsoleWriter(total_steps=3, first_step=1, file=terminal)
    writer.log(2, {"episode/return_mean": 0.5, "eval/[red]/success_rate": 0.5})
    writer.close()
    writer.close()
    assert "step 2/3  return   0.500  eval/[red] 50.0%" in terminal.getvalue()  # not read as markup
    assert "left" in terminal.getvalue() and "2/3" in terminal.getvalue()


def test_weights_and_biases_continues_the_same_run(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("finished")
    )
    wandb = types.SimpleNamespace(init=lambda **arguments: calls.append(arguments) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for step in (1, 2):
        writer = metrics.make_writer(["wandb"], tmp_path / "run7", config={"seed": 1})
        writer.log(step, {"policy/loss": jnp.float32(0.5), "text": "x"})
        writer.close()
    first, log, finished, second, *_ = calls
    assert first["id"] == second["id"] and len(first["id"]) == 16
    assert first["name"] == "run7" and first["project"] == "mine" and first["config"] == {"seed": 1}
    assert log == (1, {"policy/loss": 0.5})
    assert finished == "finished"


def test_a_writer_that_is_not_installed_or_not_known_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match="pip install wandb"):
        metrics.make_writer(["wandb"], tmp_path)
    with pytest.raises(ValueError, match=r"unknown metric writer 'tensorbord'; known: \['console', 'jsonl'"):
        metrics.make_writer(["jsonl", "tensorbord"], tmp_path)


def make_trajectory(episode: int, rewards: list[float]) -> Trajectory:
    turns = [
        Turn(
            prompt_ids=np.arange(5 - k, dtype=np.int32),
            response_ids=np.arange(k + 2, dtype=np.int32),
            behavior_logprobs=np.zeros(k + 2, np.float32),
            reward=reward,
            stop=StopReason.EOS if k + 1 < len(rewards) else StopReason.TURN_LIMIT,
            policy_step=11,
            observation=NASTY,
            action=f"go {k}",
            info={"success": k + 1 == len(rewards), "boxes": np.int32(k)},
        )
        for k, reward in enumerate(rewards)
    ]
    return Trajectory(turns, terminated=True, truncated=False, group=2, seed=77, episode=episode, info={"room": 1})


def test_trajectories_of_a_step(tmp_path):
    trajectories = [make_trajectory(0, [0.25, -0.7]), make_trajectory(1, [])]
    path = trajectory_log.write_trajectories(
        tmp_path, 12, trajectories, np.array([[1.0, 2.0], [0.0, 0.0]], np.float32), [[0.5, float("nan")], []],
        [[{"environment": 0.25, "total": 0.5}, {"environment": -0.7, "total": -1.4}], []],
    )  # fmt: skip
    assert path == tmp_path / "trajectories" / "step_000012.jsonl"
    assert len(path.read_text().splitlines()) == 2
    first, second = trajectory_log.read_trajectories(path)
    turns = first.pop("turns")
    np.testing.assert_allclose(first.pop("return"), -0.45, rtol=1e-12)  # fractions stay fractions
    assert first == {
        "step": 12,
        "episode": 0,
        "seed": 77,
        "group": 2,
        "terminated": True,
        "truncated": False,
        "success": True,
        "info": {"room": 1},
        "instructions": "",
        "final_observation": None,
        # Prompt 0 1 2 3 4, response 0 1; prompt 0 1 2 3, response 0 1 2.
        "tokens_crc32": zlib.crc32(np.asarray([0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 0, 1, 2], "<i4").tobytes()),
    }
    assert turns[1] == {
        "observation": NASTY.replace("\ud83e", "\ufffd"),
        "action": "go 1",
        "reward": -0.7,
        "reward_terms": {"environment": -0.7, "total": -1.4},
        "value": 2.0,
        "advantage": None,
        "stop": "turn_limit",
        "num_prompt_tokens": 4,
        "num_tokens": 3,
        "policy_step": 11,
        "info": {"success": True, "boxes": 1},
    }
    assert second["turns"] == [] and second["return"] == 0 and second["success"] is False
    no_tables = trajectory_log.write_trajectories(tmp_path, 13, trajectories)
    assert trajectory_log.read_trajectories(no_tables)[0]["turns"][0]["value"] is None
    assert trajectory_log.read_trajectories(no_tables)[0]["turns"][0]["reward_terms"] is None


def test_tables_that_do_not_fit_the_trajectories_are_refused(tmp_path):
    trajectories = [make_trajectory(0, [1.0, 2.0])]
    with pytest.raises(ValueError, match="turn_values has 2 rows for 1 trajectories"):
        trajectory_log.write_trajectories(tmp_path, 1, trajectories, [[0, 0], [0, 0]])
    with pytest.raises(ValueError, match=r"turn_advantages\[0\] has 1 entries for 2 turns"):
        trajectory_log.write_trajectories(tmp_path, 1, trajectories, None, [[0]])
    assert not (tmp_path / "trajectories").exists()
