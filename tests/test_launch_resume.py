"""`resume`: until the run has finished, whatever is taken away or fails on the way; and flags that are wrong."""

import sys

import pytest

from tests.cloud_stub import Cloud, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stub workers are Linux hosts: /proc, setsid")

PLACE = ("--name=pod", "--project=my-project", "--zone=us-west4-a")
PAIR = (*PLACE, "--topology=v4:2x2x2")
ONE = (*PLACE, "--topology=v5e:2x4")
TRAIN = ("--", "--config=configs/tiny.py", "--workdir=/mnt/runs/x")
ACTIVE = {"queued-resources list": ["pod\tACTIVE"], "tpu-vm list": ["pod\tREADY"]}


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


def verbs(cloud):
    """create, delete and the starts of the training, in order."""
    found = []
    for call in cloud.calls:
        if "create" in call or "delete" in call:
            found.append(call[4])
        elif " start " in call[-1]:
            found.append(f"start {call[-1].split('start ')[1].split()[0]}")
    return found


@pytest.mark.parametrize("how", ["node", "request"])
def test_preempted_machines_are_made_again_and_the_same_command_started(cloud, how):
    cloud.runs("hang", "hang", 0)
    nodes = ["pod\tREADY"] * 3 + (["pod\tPREEMPTED"] if how == "node" else []) + ["pod\tREADY"]
    requests = ["", *["pod\tACTIVE"] * 3, "pod\tACTIVE" if how == "node" else "pod\tSUSPENDED", "pod\tACTIVE"]
    gone = {"forget": True}
    cloud.answers({"queued-resources list": requests, "tpu-vm list": nodes, "delete": [gone], "create": [""]})
    done = cloud("queued.sh", "resume", *PAIR, "--spot", *TRAIN)
    assert done.returncode == 0, (done.stdout, done.stderr)
    calls = verbs(cloud)
    start = calls[1]
    assert calls == ["create", start, start, "delete", "create", start, start]
    created = [call for call in cloud.calls if "create" in call]
    assert created[0] == created[1] and "--spot" in created[0]
    arguments = [training["argv"] for training in cloud.trainings]
    assert arguments == [["-m", "turnppo_jax.train", *TRAIN[1:], "--multihost"]] * 4
    lost = "PREEMPTED" if how == "node" else "SUSPENDED"
    assert f"{lost}): it is made again" in done.stdout
    assert done.stdout.splitlines()[-1] == "turnppo_jax: the run has finished; stop removes the machines"


def test_a_stopped_compute_engine_slice_is_deleted_piece_by_piece_and_made_again(cloud):
    place = ("--name=pod", "--project=my-project", "--zone=us-east5-a", "--topology=v6e:4x4")
    running = "\n".join(f"pod-{index}\tRUNNING" for index in range(4))
    cloud.answers({
        "list-instances": [running.replace("RUNNING", "TERMINATED", 1), running], "managed list ": ["pod"],
        " list ": ["pod"], "delete": [{"forget": True}], "create|resize": [""],
    })  # fmt: skip
    done = cloud("gce.sh", "resume", *place, "--spot", *TRAIN)
    assert done.returncode == 0, (done.stdout, done.stderr)
    pieces = [call[2:5] for call in cloud.calls if {"create", "delete", "resize"} & set(call)]
    assert pieces == [
        ["instance-groups", "managed", "delete"], ["instance-templates", "delete", "pod"],
        ["resource-policies", "delete", "pod"], ["resource-policies", "create", "workload-policy"],
        ["instance-templates", "create", "pod"], ["instance-groups", "managed", "create"],
        ["instance-groups", "managed", "resize"],
    ]  # fmt: skip
    assert len(cloud.trainings) == 4


def test_a_run_that_is_going_is_only_watched(cloud):
    cloud.runs("hang")
    cloud.answers(ACTIVE)
    assert cloud("queued.sh", "setup", *ONE).returncode == 0
    assert cloud("queued.sh", "run", *ONE, *TRAIN).returncode == 0
    watching = cloud.start("queued.sh", "resume", *ONE, *TRAIN)
    until(lambda: sum(" status" in call[-1] for call in cloud.calls) > 2)
    assert watching.poll() is None and len(cloud.trainings) == 1
    # Another one, with other arguments, is not what was asked for.
    other = cloud("queued.sh", "run", *ONE, *TRAIN, "--config.seed=2")
    assert other.returncode == 1 and "a run is going here" in other.stdout
    watching.terminate()
    watching.communicate(timeout=60)
    assert len(cloud.trainings) == 1  # the run goes on


def test_machines_that_cannot_be_had_again_yet_are_tried_for_again(cloud):
    cloud.runs("hang", 0)
    short = {"error": "ERROR: no more capacity in the zone", "status": 1}
    answers = {
        "queued-resources list": ["", "pod\tACTIVE", "pod\tACTIVE", "pod\tFAILED", "pod\tFAILED", "", "pod\tACTIVE"]
    }
    cloud.answers(answers, ACTIVE, {"delete": [{"forget": True}], "create": ["", short, ""]})
    done = cloud("queued.sh", "resume", *ONE, "--spot", *TRAIN)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert [verb for verb in verbs(cloud) if "start" not in verb] == ["create", "delete", "create", "create"]
    assert "turnppo_jax: tried again in 10 min" in done.stdout
    # The first time it is not: quota and rights are better said at once.
    cloud.answers({"list": [""], "create": [short]})
    done = cloud("queued.sh", "resume", *ONE, *TRAIN)
    assert (done.returncode, verbs(cloud)) == (1, ["create"])


def test_stop_ends_a_resume_that_would_undo_it(cloud):
    cloud.runs("hang")
    cloud.answers({"delete": [{"forget": True}], "create": [""]}, ACTIVE)
    watching = cloud.start("queued.sh", "resume", *ONE, *TRAIN)
    until(lambda: cloud.trainings)
    assert cloud("queued.sh", "stop", *ONE, "--yes").returncode == 0
    output, _ = watching.communicate(timeout=60)
    assert watching.returncode == 1 and output.endswith("error: ended by stop\n")
    assert verbs(cloud)[-1] == "delete" and len(cloud.trainings) == 1


def test_a_failed_run_is_started_again_on_all_workers(cloud):
    cloud.runs(1, "hang", 0)
    cloud.answers(ACTIVE)
    done = cloud("queued.sh", "resume", *PAIR, *TRAIN)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert len(cloud.trainings) == 4
    assert "failure 1, of which 5 are borne" in done.stdout


def test_failures_without_end_are_not_borne(cloud):
    cloud.runs(1)
    cloud.answers(ACTIVE)
    done = cloud("queued.sh", "resume", *ONE, "--max_failures=2", *TRAIN)
    assert done.returncode == 1
    assert len(cloud.trainings) == 3
    assert done.stderr.endswith(
        "error: the run has failed 3 times (--max_failures=2); the ends of its logs are above\n"
    )
    assert "[worker 0] exit 1" in done.stdout


def test_a_wrong_command_is_not_tried_twice(cloud):
    cloud.runs(2)
    cloud.answers(ACTIVE)
    done = cloud("queued.sh", "resume", *ONE, *TRAIN)
    assert (done.returncode, done.stderr) == (1, "error: the command is wrong; its message is above\n")
    assert len(cloud.trainings) == 1
    # Mended since, so a new call begins afresh.
    cloud.runs(0)
    assert cloud("queued.sh", "resume", *ONE, *TRAIN).returncode == 0


def test_a_silent_machine_is_asked_again(cloud):
    silent = {"error": "timed out", "status": 255}
    cloud.answers({"--command=if": [silent, silent, silent, None]}, ACTIVE)
    done = cloud("queued.sh", "resume", *ONE, *TRAIN)
    assert (done.returncode, len(cloud.trainings)) == (0, 1), (done.stdout, done.stderr)
    cloud.answers({"--command=if": [silent]}, ACTIVE)
    done = cloud("queued.sh", "resume", *ONE, *TRAIN)
    assert done.returncode == 1
    assert "error: pod is there but gives no answer: [worker 0] timed out" in done.stderr


TOPOLOGY = "a colon and the slice, such as v5e:4x4 or v5p:2x2x4"
FLAT = "v6e: and one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
CUBE = "v5p: and one of 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x16, 8x16x16"
SHARED = "gs://BUCKET/PATH, or an absolute path on a disk that outlives the machines and that all of them share"
DURATION = "a duration, such as 4h or 1h30m"
# What is given to `gce.sh create`, and what is said of it.
FLAGS = [
    ("pod", "unexpected argument 'pod'; options are written --name=value"),
    ("--zone", "--zone is without a value; allowed: --zone=VALUE"),
    ("--spot=yes", "--spot='yes'; allowed: --spot without a value"),
    ("--name=Pod", "--name='Pod'; allowed: 1 to 40 of a-z, 0-9 and -, the first a letter, the last no -"),
    ("--zone=us-east5", "--zone='us-east5'; allowed: a zone, such as us-east5-b"),
    ("--project=My", "--project='My'; allowed: a project id, such as my-project-123"),
    ("--topology=v6e:3x3", f"--topology='v6e:3x3'; allowed: {FLAT}"),
    ("--topology=v6e", f"--topology='v6e'; allowed: {FLAT}"),
    ("--topology=v5p:4x4", f"--topology='v5p:4x4'; allowed: {CUBE}"),
    ("--topology=v7x:2x2x1", f"--topology='v7x:2x2x1'; allowed: v4, v5e, v5p or v6e, {TOPOLOGY}"),
    ("--flex_start=4", f"--flex_start='4'; allowed: {DURATION}"),
    ("--disk_gb=0", "--disk_gb='0'; allowed: 1 to 99999"),
    ("--ssh=vpn", "--ssh='vpn'; allowed: external, internal, iap"),
    (
        "--create_flag=network",
        "--create_flag='network'; allowed: a flag of the command that creates, such as --create_flag=--network=NAME",
    ),
    ("--", "nothing can follow '--' here"),
]
CALLS = [
    (["gce.sh", "creat"], "'creat' is no command; known: create, setup, sync, run, logs, status, resume, stop, help"),
    (["gce.sh", "create"], "--name is missing"),
    (["gce.sh", "create", *PLACE], "--topology is missing"),
    (
        ["gce.sh", "status", "--spot"],
        "unknown flag --spot; known here: --name --zone --project --topology --ssh --dry_run",
    ),
    (
        ["gce.sh", "create", *PLACE, "--topology=v5e:4x4"],
        "--topology='v5e:4x4'; allowed: v5p or v6e here, v4 and v5e with launch/queued.sh",
    ),
    (
        ["gce.sh", "create", *PLACE, "--topology=v6e:4x4", "--spot", "--flex_start=1h"],
        "--spot, --flex_start and --reservation; allowed: one of them",
    ),
    (["queued.sh", "create", *PAIR, "--spot", "--reserved"], "--spot and --reserved; allowed: one of them"),
    (
        ["gce.sh", "setup", "--secret=A B"],
        "--secret='A B'; allowed: names of environment variables, separated by commas, such as HF_TOKEN",
    ),
    (["queued.sh", "logs", *PAIR, "--worker=2"], "--worker='2'; allowed: all, or 0 to 1"),
    (["queued.sh", "run", *PAIR], "--config=FILE.py is missing after '--'"),
    (["queued.sh", "run", *PAIR, "--", "--config=configs/tiny.py"], "--workdir=DIR is missing after '--'"),
    (
        ["queued.sh", "run", *PAIR, "--", "--config=configs/no.py:x", "--workdir=/x"],
        "--config='configs/no.py:x'; allowed: a config file of this repository, its path from the repository's folder",
    ),
    (["queued.sh", "run", *PAIR, *TRAIN[:2], "--workdir=runs/x"], f"--workdir='runs/x'; allowed: {SHARED}"),
    (["queued.sh", "resume", *ONE, *TRAIN[:2], "--workdir=runs/x"], f"--workdir='runs/x'; allowed: {SHARED}"),
    (["queued.sh", "run", *ONE, *TRAIN[:2], "--workdir=gs://UP/x"], "--workdir='gs://UP/x'; allowed: gs://BUCKET/PATH"),
    (["queued.sh", "resume", *ONE, "--max_failures=many", *TRAIN], "--max_failures='many'; allowed: 0 to 9999"),
    (["gke.sh", "run", "--tool=xpk"], "--tool='xpk'; allowed: gcluster, kubectl"),
    (["gke.sh", "run", "--grace_period=2"], f"--grace_period='2'; allowed: {DURATION}"),
    (["gke.sh", "run", "--location=us"], "--location='us'; allowed: a region or zone, such as us-east5 or us-east5-b"),
    (["sky.sh", "run", "--name=pod"], "--topology is missing"),
]


def test_a_wrong_call_is_one_line_that_names_it(cloud):
    for (script, *arguments), line in [(["gce.sh", "create", flag], line) for flag, line in FLAGS] + CALLS:
        done = cloud(script, *arguments, clouds=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n"), arguments


@pytest.mark.parametrize("script", ["gce.sh", "queued.sh", "gke.sh", "sky.sh"])
def test_help_is_the_head_of_the_script(cloud, script):
    done = cloud(script, clouds=False)
    assert done.returncode == 0
    assert done.stdout == cloud(script, "help", clouds=False).stdout
    assert f"bash launch/{script} run" in done.stdout and "set -e" not in done.stdout


HOSTS = {
    "v4:2x2x1": 1, "v4:2x2x4": 4, "v5e:1x1": 1, "v5e:2x4": 1, "v5e:4x4": 4, "v5p:2x2x1": 1, "v5p:2x2x4": 4,
    "v5p:8x16x16": 512, "v6e:2x2": 1, "v6e:2x4": 1, "v6e:4x8": 8, "v6e:16x16": 64,
}  # fmt: skip
TYPES = {
    "v4:2x2x1": "v4-8", "v4:2x2x4": "v4-32", "v5e:1x1": "v5litepod-1", "v5e:4x4": "v5litepod-16",
    "v5p:2x2x1": "v5p-8", "v5p:2x2x4": "v5p-32", "v6e:2x4": "v6e-8", "v6e:8x8": "v6e-64",
}  # fmt: skip


def test_topologies_have_the_names_and_hosts_of_googles_tables(cloud):
    names, hosts = {}, {}
    for topology in {*HOSTS, *TYPES}:
        done = cloud("queued.sh", "create", *PLACE, f"--topology={topology}", "--dry_run", clouds=False)
        names[topology] = done.stdout.split("--accelerator-type=")[1].split()[0]
        hosts[topology] = int(done.stdout.split("chips, ")[1].split()[0])
    assert {topology: names[topology] for topology in TYPES} == TYPES
    assert {topology: hosts[topology] for topology in HOSTS} == HOSTS
