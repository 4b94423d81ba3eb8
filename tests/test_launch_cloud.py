"""Machines reached by ssh: the exact commands, what arrives on the workers, and what happens when something fails."""

import os
import re
import stat
import subprocess
import sys

import pytest

from tests.cloud_stub import Cloud, shown, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stub workers are Linux hosts: /proc, setsid")

GCE = ("--name=pod", "--project=my-project", "--zone=us-east5-a", "--topology=v6e:2x4")
SLICE = (*GCE[:3], "--topology=v5p:2x2x2")
QUEUED = ("--name=pod", "--project=my-project", "--zone=us-west4-a", "--topology=v5e:4x4")
PLACE = ["--project=my-project", "--zone=us-east5-a"]
TRAIN = ("--", "--config=configs/tiny.py", "--workdir=/mnt/runs/x")
# Words that a shell would change where they are not quoted at every step.
NASTY = (
    "--a=two words", "--b=it's", '--c="x" and \\', "--d=$HOME `id` $(id) $$", "--e=a,b;c&d|e>f", "--f=*", "--g=", "{}",
    "!!", "~", "", "--h=line\nbreak\ttab", "--i=ü €",
)  # fmt: skip

ACTIVE = {"queued-resources list": ["pod\tACTIVE"], "tpu-vm list": ["pod\tREADY"]}
MACHINE = [
    "--machine-type=ct5p-hightpu-4t", "--image-project=ubuntu-os-accelerator-images",
    "--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e", "--maintenance-policy=TERMINATE",
    "--boot-disk-size=200GB", "--scopes=cloud-platform",
]  # fmt: skip
POLICY = ["gcloud", "compute", "resource-policies"]
TEMPLATES = ["gcloud", "compute", "instance-templates"]
GROUPS = ["gcloud", "compute", "instance-groups", "managed"]
QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


def changes(cloud):
    """The calls that are no questions."""
    return [call for call in cloud.calls if "list" not in call and "list-instances" not in call]


def test_a_queued_resource_is_made_and_waited_for(cloud):
    cloud.answers({
        "queued-resources list": ["", "pod2\tACTIVE\npod\tACCEPTED", "pod\tWAITING_FOR_RESOURCES", "pod\tACTIVE"],
        "tpu-vm list": ["pod\tCREATING", "pod\tREADY"],
        "create": [""],
    })  # fmt: skip
    done = cloud("queued.sh", "create", *QUEUED, "--spot", "--create_flag=--network=my net")
    assert done.returncode == 0, done.stderr
    assert changes(cloud) == [
        [*QUEUE, "create", "pod", "--node-id=pod", "--project=my-project", "--zone=us-west4-a"]
        + ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot", "--network=my net"]
    ]
    assert [line.split(": ", 1)[1] for line in done.stdout.splitlines()] == [
        "waiting: pod is ACCEPTED",
        "waiting: pod is WAITING_FOR_RESOURCES",
        "waiting: pod is ACTIVE, its node CREATING",
        "pod is ready: 16 chips, 4 host(s)",
    ]


def test_a_single_host_is_an_instance(cloud):
    cloud.answers({"instances list": ["", "PENDING", "RUNNING"], "create": [""]})
    done = cloud("gce.sh", "create", *GCE, "--flex_start=4h", "--disk_gb=100")
    assert done.returncode == 0, done.stderr
    machine = ["--machine-type=ct6e-standard-8t", *MACHINE[1:4], "--boot-disk-size=100GB", MACHINE[5]]
    flex = ["--provisioning-model=FLEX_START", "--max-run-duration=4h", "--instance-termination-action=DELETE"]
    assert changes(cloud) == [
        ["gcloud", "compute", "instances", "create", "pod", *PLACE, *machine, *flex, "--request-valid-for-duration=2h"]
    ]


def test_several_hosts_are_a_managed_instance_group_with_a_workload_policy(cloud):
    cloud.answers({
        "managed list ": ["", "pod"],
        "list-instances": ["", "pod-b\tSTAGING\npod-a\tRUNNING", "pod-b\tRUNNING\npod-a\tRUNNING"],
        "managed describe": ["False"],
        "create|resize": [""],
    })  # fmt: skip
    done = cloud("gce.sh", "create", *SLICE, "--spot")
    assert done.returncode == 0, done.stderr
    made = [call for call in changes(cloud) if "describe" not in call]
    spot = ["--provisioning-model=SPOT", "--instance-termination-action=STOP"]
    assert made == [
        [*POLICY, "create", "workload-policy", "pod", "--project=my-project", "--region=us-east5"]
        + ["--type=HIGH_THROUGHPUT", "--accelerator-topology=2x2x2", "--accelerator-topology-mode=AUTO_CONNECT"],
        [*TEMPLATES, "create", "pod", "--project=my-project", *MACHINE, *spot],
        [*GROUPS, "create", "pod", *PLACE, "--size=0", "--template=pod", "--target-size-policy-mode=bulk"]
        + ["--default-action-on-vm-failure=do-nothing"]
        + ["--workload-policy=projects/my-project/regions/us-east5/resourcePolicies/pod"],
        [*GROUPS, "resize", "pod", *PLACE, "--size=2"],
    ]
    assert "waiting: pod is 1 of 2 hosts RUNNING" in done.stdout


def test_what_is_there_is_not_made_again(cloud):
    cloud.answers(ACTIVE)
    assert "pod is there already" in cloud("queued.sh", "create", *QUEUED).stdout
    cloud.answers({"instances list": ["TERMINATED"]})
    done = cloud("gce.sh", "create", *GCE)
    assert (done.returncode, done.stderr) == (
        1, "error: pod is lost (TERMINATED); allowed now: resume, or stop and then create\n"
    )  # fmt: skip
    cloud.answers({"managed list ": ["pod"], "list-instances": ["pod-a\tRUNNING"], "managed describe": ["True"]})
    assert "pod is lost (1 of 2 hosts RUNNING)" in cloud("gce.sh", "create", *SLICE).stderr
    assert not any("create" in call for call in cloud.calls)


def test_creation_that_fails_halfway_is_said_and_stop_removes_what_is_there(cloud):
    cloud.answers({"templates create": [{"error": "ERROR: quota", "status": 1}], "create": [""], "list": [""]})
    done = cloud("gce.sh", "create", *SLICE)
    assert done.returncode == 1
    assert done.stderr == (
        "ERROR: quota\nerror: pod was not made, the message is above; stop removes what is there already\n"
    )
    assert [call[2] for call in changes(cloud)] == ["resource-policies", "instance-templates"]
    cloud.answers({"resource-policies list": ["pod"], "list": [""], "delete": [""]})
    done = cloud("gce.sh", "stop", *SLICE, "--yes")
    assert done.returncode == 0, done.stderr
    assert changes(cloud) == [
        [*POLICY, "delete", "pod", "--project=my-project", "--region=us-east5", "--quiet"],
    ]


def test_stop_goes_on_when_one_piece_resists_and_says_so(cloud):
    cloud.answers({
        "list-instances": ["pod-a\tSTAGING"], "managed describe": ["False"], " list ": ["pod"],
        "managed delete": [{"error": "ERROR: in use", "status": 1}], "delete": [""],
    })  # fmt: skip
    done = cloud("gce.sh", "stop", *SLICE, "--yes")
    assert done.returncode == 1
    assert "ERROR: in use\nerror: not all of pod was deleted" in done.stderr
    assert [call[2] for call in changes(cloud) if "delete" in call] == [
        "instance-groups", "instance-templates", "resource-policies"
    ]  # fmt: skip


@pytest.mark.parametrize(("said", "deleted"), [("", False), ("n\n", False), ("y\n", True)])
def test_stop_asks_before_it_deletes(cloud, said, deleted):
    cloud.answers({"queued-resources list": ["pod\tSUSPENDED"], "delete": [""]})
    done = cloud("queued.sh", "stop", *QUEUED, said=said)
    assert done.returncode == (0 if deleted else 1)
    assert "delete pod in us-west4-a of project my-project? [y/N]" in done.stderr
    assert changes(cloud) == deleted * [
        [*QUEUE, "delete", "pod", "--project=my-project", "--zone=us-west4-a", "--force", "--quiet"]
    ]


def test_the_message_of_gcloud_comes_through(cloud):
    cloud.answers({"list": [{"error": "ERROR: (gcloud) no active account", "status": 1}]})
    for command in ("create", "status", "stop"):
        done = cloud("queued.sh", command, *QUEUED)
        assert done.returncode == 1
        assert done.stderr == (
            "ERROR: (gcloud) no active account\nerror: gcloud could not tell what there is; its message is above\n"
        )


PAIR = (*QUEUED[:3], "--topology=v4:2x2x2")
SCRIPTS = [("gce.sh", GCE, "v6e"), ("gce.sh", SLICE, "slice"), ("queued.sh", PAIR, "queued")]


def ready(kind):
    """What the stub says of machines that are there."""
    return {
        "v6e": {"instances list .*status": ["RUNNING"], "instances list .*name": ["pod"]},
        "slice": {"list-instances": ["pod-worker0\tRUNNING\npod-worker1\tRUNNING"], " list ": ["pod"]},
        "queued": ACTIVE,
    }[kind]


def absent_then_ready(kind):
    """What it says when they are made in the meantime."""
    if kind == "queued":
        return ACTIVE | {"queued-resources list": ["", "pod\tACTIVE"]}
    name = {"v6e": "instances list .*status", "slice": "managed list "}[kind]
    return {name: ["", *ready(kind).get(name, ["pod"])]} | {key: ready(kind)[key] for key in ready(kind) if key != name}


@pytest.mark.parametrize(("script", "place", "kind"), SCRIPTS)
def test_a_dry_run_shows_what_would_be_run(cloud, script, place, kind):
    commands = {
        "create": absent_then_ready(kind), "setup": ready(kind), "sync": ready(kind), "run": ready(kind),
        "logs": ready(kind), "status": ready(kind), "stop": ready(kind), "resume": absent_then_ready(kind),
    }  # fmt: skip
    for command, answers in commands.items():
        more = {"run": (*TRAIN, *NASTY[:11]), "resume": TRAIN}.get(command, ())
        cloud.answers(answers, {"create|resize|delete": [""]})
        done = cloud(script, command, *place, *(["--yes"] if command == "stop" else []), *more)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        dry = cloud(script, command, *place, "--dry_run", *more, clouds=False)
        assert (dry.returncode, dry.stderr) == (0, ""), command
        # Workers are served at the same time, so their order is not fixed.
        assert sorted(shown(dry.stdout)) == sorted(cloud.calls), command


def test_dry_runs_change_nothing(cloud):
    before = sorted(path for path in cloud.repository.rglob("*") if ".git/" not in str(path))
    for script, place, _ in SCRIPTS:
        cloud(script, "resume", *place, "--dry_run", "--secret=HF_TOKEN", *TRAIN, clouds=False, HF_TOKEN="s3cret")
    assert sorted(path for path in cloud.repository.rglob("*") if ".git/" not in str(path)) == before
    assert cloud.calls == []


@pytest.mark.parametrize(("script", "place", "kind"), SCRIPTS)
def test_arguments_arrive_as_they_were_given(cloud, script, place, kind):
    cloud.answers(ready(kind))
    assert cloud(script, "setup", *place).returncode == 0
    done = cloud(script, "run", *place, *TRAIN, *NASTY)
    assert done.returncode == 0, done.stderr
    homes = {"v6e": ["pod"], "slice": ["pod-worker0", "pod-worker1"], "queued": ["0", "1"]}[kind]
    until(lambda: len(cloud.trainings) == len(homes))
    given = ["-m", "turnppo_jax.train", *TRAIN[1:], *NASTY]
    added = {
        "v6e": [[]],
        "slice": [
            ["--coordinator=pod-worker0:8476", "--num_processes=2", f"--process_id={index}"] for index in range(2)
        ],
        "queued": [["--multihost"]] * 2,
    }[kind]
    assert sorted(training["argv"] for training in cloud.trainings) == sorted(given + more for more in added)
    folders = [str(cloud.workers / home / "turnppo" / "code") for home in homes]
    assert sorted(training["folder"] for training in cloud.trainings) == folders


def test_the_code_is_what_git_sees(cloud):
    repository = cloud.repository
    (repository / "kept file.py").write_text("kept")
    (repository / "-dash").write_text("dash")
    (repository / "gone.py").write_text("gone")
    for command in (["add", "."], ["add", "-f", "gone.py"]):
        subprocess.run(["git", "-C", str(repository), *command], check=True)
    (repository / "gone.py").unlink()
    (repository / "new.py").write_text("untracked")
    (repository / "__pycache__").mkdir()
    (repository / "__pycache__" / "x.pyc").write_text("ignored")
    for size in ("small", "all"):
        (repository / "data" / "webshop" / size).mkdir(parents=True)
        (repository / "data" / "webshop" / size / "items_shuffle.json").write_text("[]")
    cloud.answers(ready("v6e"))
    code = cloud.workers / "pod" / "turnppo" / "code"
    assert cloud("gce.sh", "setup", *GCE).returncode == 0
    assert (code / "kept file.py").read_text() == "kept" and (code / "-dash").read_text() == "dash"
    assert (code / "new.py").read_text() == "untracked" and (code / "launch" / "host.sh").exists()
    assert (code / "data" / "webshop" / "small" / "items_shuffle.json").exists()
    for name in ("gone.py", "__pycache__", "runs", ".git", "data/webshop/all"):
        assert not (code / name).exists(), name
    (repository / "new.py").unlink()
    assert cloud("gce.sh", "sync", *GCE).returncode == 0
    assert not (code / "new.py").exists()  # what is no longer here does not stay there


def test_secrets_go_in_a_file_and_nowhere_else(cloud):
    cloud.answers(ready("v6e"))
    token = "hf_it's $ecret"
    variables = {"HF_TOKEN": token, "WANDB_API_KEY": "key"}
    assert cloud("gce.sh", "setup", *GCE).returncode == 0
    done = cloud("gce.sh", "run", *GCE, "--secret=HF_TOKEN,WANDB_API_KEY", *TRAIN, **variables)
    dry = cloud("gce.sh", "run", *GCE, "--secret=HF_TOKEN", "--dry_run", *TRAIN, clouds=False, **variables)
    assert done.returncode == dry.returncode == 0, done.stderr
    until(lambda: cloud.trainings)
    assert cloud.trainings[0]["environment"] == {**variables, "PYTHONUNBUFFERED": "1"}
    everything = done.stdout + done.stderr + dry.stdout + dry.stderr + (cloud.stub / "calls").read_text()
    assert "hf_it" not in everything
    sent = cloud.workers / "pod" / "turnppo" / "secrets.env"
    assert stat.S_IMODE(sent.stat().st_mode) == 0o600
    assert not list(cloud.repository.rglob("secrets.env"))
    done = cloud("gce.sh", "run", *GCE, "--secret=HF_TOKEN", *TRAIN)
    assert (done.returncode, done.stderr) == (
        2, "error: --secret=HF_TOKEN; allowed: names of environment variables that are set\n"
    )  # fmt: skip


def test_a_worker_that_fails_is_named(cloud):
    failing = {"worker=2 .*setup_host": [{"error": "no space left", "status": 3}]}
    dead = {"worker=1 .*mkdir": [{"error": "timed out", "status": 255}]}
    cloud.answers(failing, ACTIVE)
    done = cloud("queued.sh", "setup", *QUEUED)
    assert done.returncode == 1
    assert done.stderr == "error: setting up failed on worker 2 (exit status 3)\n"
    assert "[worker 2] no space left\n" in done.stdout
    assert done.stdout.count("] turnppo_jax: ready") == 3  # the others went on
    cloud.answers(dead, ACTIVE)
    done = cloud("queued.sh", "setup", *QUEUED)
    assert done.stderr == "error: connecting failed on worker 1 (exit status 1)\n"
    assert sum("--worker=1" in call for call in cloud.calls) == 20  # machines take a while before they answer
    assert not any("scp" in call for call in cloud.calls)


def test_logs_of_all_workers_are_followed_to_the_end_of_the_run(cloud):
    cloud.answers(ready("slice"))
    cloud.runs("hang")
    assert cloud("gce.sh", "setup", *SLICE).returncode == 0
    assert cloud("gce.sh", "run", *SLICE, *TRAIN).returncode == 0
    follower = cloud.start("gce.sh", "logs", *SLICE, "--follow")
    until(lambda: len(cloud.trainings) == 2)
    status = cloud("gce.sh", "status", *SLICE)
    assert status.stdout.count("] running ") == 2
    done = cloud("gce.sh", "stop", *SLICE, "--keep")
    assert (done.returncode, done.stdout.count("] stopped ")) == (0, 2)
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0
    for worker in ("pod-worker0", "pod-worker1"):
        assert f"[{worker}] training\n" in output and f"[{worker}] saved\n" in output
    assert not any("delete" in call for call in cloud.calls)
    one = cloud("gce.sh", "logs", *SLICE, "--worker=1", "--lines=3")
    assert one.stdout.splitlines()[0] == "[pod-worker1] saved" and "worker0" not in one.stdout


def test_interrupting_leaves_no_connection_behind(cloud):
    cloud.answers(ready("v6e"))
    cloud.runs("hang")
    cloud("gce.sh", "setup", *GCE)
    cloud("gce.sh", "run", *GCE, *TRAIN)
    follower = cloud.start("gce.sh", "logs", *GCE, "--follow")
    until(lambda: any("follow" in call[-1] for call in cloud.calls))
    follower.terminate()
    follower.communicate(timeout=60)
    assert follower.returncode == 143
    home = str(cloud.workers / "pod")

    def tails():
        found = []
        for path in os.listdir("/proc"):
            try:
                with open(f"/proc/{path}/cmdline") as file:
                    words = file.read().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            found += [words] if words[0] == "tail" and home in " ".join(words) else []
        return found

    until(lambda: not tails())


def test_the_commands_of_the_readme_can_be_called(cloud):
    (cloud.repository / "configs" / "sokoban.py").write_text("")
    text = (cloud.repository / "launch" / "README.md").read_text()
    block = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    commands = re.findall(r"^bash launch/\w+\.sh \w+", block, flags=re.MULTILINE)
    script = "set -e\n" + re.sub(r"^(bash launch/\w+\.sh \w+)", r"\1 --dry_run", block, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cloud.repository,
        env=cloud.environment(clouds=False),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(commands) > 10 and len(shown(done.stdout)) > len(commands)
