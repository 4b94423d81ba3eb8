"""GKE and SkyPilot: the exact commands, the JobSet, and the words that reach the training command inside."""

import json
import re
import shlex
import subprocess

import pytest
import yaml

from tests.cloud_stub import ROOT, Cloud, shown
from tests.test_launch_cloud import NASTY

GKE = ("--name=sokoban", "--project=my-project", "--cluster=pods", "--location=us-east5-b", "--topology=v6e:4x4")
PLACE = ["--project=my-project", "--cluster=pods", "--location=us-east5-b"]
IMAGE = "registry.example/my-project/turnppo:1"
TRAIN = ("--", "--config=configs/tiny.py", "--workdir=gs://my-bucket/runs/x")
PYTHON = ["/turnppo/venv/bin/python", "-m", "turnppo_jax.train", TRAIN[1], "--workdir=/gcs/my-bucket/runs/x"]
# Kubernetes takes no control characters in a manifest.
WORDS = [word for word in NASTY if word.isprintable()]
OPTIONS = (
    "implicit-dirs,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
    ",file-system:kernel-list-cache-ttl-secs:0,file-system:rename-dir-limit:200000"
)
KUBECTL = ("--tool=kubectl", f"--image={IMAGE}")


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


def expand(word):
    """What Kubernetes makes of a word of a command: $(NAME) of unknown names stays, $$ becomes $."""
    return word.replace("$$", "$")


def arguments_of(command, folder):
    """What a program gets that a shell command calls: its words, printed by a stub in place of python."""
    stub = folder / "python"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    command = command.replace("/turnppo/venv/bin/python", shlex.quote(str(stub))).replace("cd /turnppo/code", "cd .")
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_cluster_toolkit_submits_the_run(cloud, tmp_path):
    done = cloud("gke.sh", "run", *GKE, f"--image={IMAGE}", "--queue=tpus", "--restarts=3", *TRAIN, *WORDS)
    assert done.returncode == 0, done.stderr
    (call,) = cloud.calls
    command = next(word for word in call if word.startswith("--command="))
    assert [word for word in call if word != command] == [
        "gcluster", "job", "submit", "--name=sokoban", *PLACE, "--compute-type=ct6e-standard-4t", "--topology=4x4",
        f"--image={IMAGE}", f"--mount=gs://my-bucket;/gcs/my-bucket;rw;options={OPTIONS}", "--restarts=3",
        "--grace-period=2m", "--queue=tpus",
    ]  # fmt: skip
    inside = expand(command.removeprefix("--command="))
    assert inside.startswith("cd /turnppo/code && PYTHONUNBUFFERED=1 exec /turnppo/venv/bin/python ")
    assert arguments_of(inside, tmp_path) == [*PYTHON[1:], *WORDS, "--multihost"]


def test_code_goes_over_a_base_image_where_the_image_has_it(cloud):
    (cloud.repository / "new.py").write_text("new")
    wrong = cloud("gke.sh", "run", *GKE, "--base_image=base:1", *TRAIN)
    assert "GCLUSTER_IMAGE_REPO is not set" in wrong.stderr and wrong.returncode == 2
    done = cloud("gke.sh", "run", *GKE, "--base_image=base:1", *TRAIN, GCLUSTER_IMAGE_REPO="images")
    assert done.returncode == 0, done.stderr
    (call,) = cloud.calls
    assert {"--base-image=base:1", "--build-context=runs/launch/sokoban/context"} <= set(call)
    # The files of the context lie in the image as they lie in the context.
    assert (cloud.repository / "runs/launch/sokoban/context/turnppo/code/new.py").read_text() == "new"


def test_the_image_is_built_from_what_git_sees(cloud):
    done = cloud("gke.sh", "image", *GKE, f"--image={IMAGE}")
    assert done.returncode == 0, done.stderr
    context = "runs/launch/sokoban/context"
    assert cloud.calls == [["gcloud", "builds", "submit", context, "--project=my-project", f"--tag={IMAGE}"]]
    assert (cloud.repository / context / "Dockerfile").read_text() == (ROOT / "launch/Dockerfile").read_text()
    assert (cloud.repository / context / "configs/tiny.py").exists()
    assert not (cloud.repository / context / "runs").exists()


def test_the_cluster_is_made_from_a_blueprint_and_deleted(cloud):
    more = ("--zone=us-east5-b", "--blueprint=tpu.yaml", "--create_flag=--vars=reservation=mine", "--yes")
    assert cloud("gke.sh", "create", *GKE, *more).returncode == 0
    values = "project_id=my-project,deployment_name=pods,region=us-east5,zone=us-east5-b,num_slices=1"
    values += ",machine_type=ct6e-standard-4t,tpu_topology=4x4"
    assert cloud.calls == [
        ["gcluster", "deploy", "tpu.yaml", "--vars", values, "--vars=reservation=mine", "--auto-approve"]
    ]
    listed = {"job list": ["NAME STATUS CREATION_TIME\nsokoban-2 Failed x\nsokoban Running x"]}
    cloud.answers(listed)
    assert cloud("gke.sh", "stop", *GKE, "--delete_cluster", said="y\nn\n").returncode == 1
    assert cloud.calls[1:] == [["gcluster", "job", "cancel", "sokoban", *PLACE]]
    cloud.answers(listed)
    assert cloud("gke.sh", "stop", *GKE, "--delete_cluster", "--yes").returncode == 0
    assert cloud.calls[2:] == [["gcluster", "destroy", "pods", "--auto-approve"]]


def jobset(cloud):
    return yaml.safe_load((cloud.repository / "runs/launch/sokoban/jobset.yaml").read_text())


def test_the_jobset_says_what_was_asked(cloud):
    more = ("--spot", "--queue=tpus", "--service_account=trainer", "--grace_period=1m30s", "--restarts=7")
    done = cloud("gke.sh", "run", *GKE, *KUBECTL, *more, *TRAIN, *WORDS)
    assert done.returncode == 0, done.stderr
    credentials = ["gcloud", "container", "clusters", "get-credentials", "pods", *PLACE[:1], *PLACE[2:]]
    assert cloud.calls == [credentials, ["kubectl", "apply", "-f", "runs/launch/sokoban/jobset.yaml"]]
    made = jobset(cloud)
    assert made["metadata"]["name"] == "sokoban"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 7
    (job,) = made["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (4, 4, 0)
    # A mistake in the command ends the whole set; anything else starts all hosts again.
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert (pod["terminationGracePeriodSeconds"], pod["serviceAccountName"]) == (90, "trainer")
    (container,) = pod["containers"]
    assert [expand(word) for word in container["command"]] == [*PYTHON, *WORDS, "--multihost"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["image"] == IMAGE and "envFrom" not in container
    (volume,) = pod["volumes"]
    assert volume["csi"]["volumeAttributes"] == {"bucketName": "my-bucket", "mountOptions": OPTIONS}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/gcs/my-bucket"}]


def test_a_small_jobset_leaves_out_what_was_not_asked(cloud):
    done = cloud("gke.sh", "run", *GKE[:4], "--topology=v5e:2x4", *KUBECTL, *TRAIN)
    assert done.returncode == 0, done.stderr
    spec = jobset(cloud)["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    assert (spec["parallelism"], pod["containers"][0]["resources"]["limits"]["google.com/tpu"]) == (1, 8)
    assert [expand(word) for word in pod["containers"][0]["command"]] == PYTHON  # one host: none to meet
    assert "serviceAccountName" not in pod and "cloud.google.com/gke-spot" not in pod["nodeSelector"]
    assert "kueue.x-k8s.io/queue-name" not in jobset(cloud)["metadata"]["labels"]
    text = (cloud.repository / "runs/launch/sokoban/jobset.yaml").read_text()
    assert not re.search(r"@[A-Z_]+@", text)


def test_secrets_of_a_jobset_are_a_kubernetes_secret(cloud):
    # The stub keeps what it was given to read, as the cluster would.
    kept = cloud.folder / "kept"
    (cloud.bin / "kubectl").rename(cloud.bin / "kubectl-stub")
    (cloud.bin / "kubectl").write_text(
        "#!/usr/bin/env bash\n"
        'for word in "$@"; do [[ $word != --from-env-file=* ]] || cp -p "${word#*=}" "$HOME/kept"; done\n'
        'exec "$0-stub" "$@"\n'
    )
    (cloud.bin / "kubectl").chmod(0o755)
    token = "hf_it's $ecret=#"
    done = cloud("gke.sh", "run", *GKE, *KUBECTL, "--secret=HF_TOKEN", *TRAIN, HF_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert kept.read_text() == f"HF_TOKEN={token}\n" and kept.stat().st_mode & 0o77 == 0
    assert [call[1:4] for call in cloud.calls[1:]] == [
        ["delete", "secret", "sokoban"], ["create", "secret", "generic"], ["apply", "-f", cloud.calls[3][3]]
    ]  # fmt: skip
    pod = jobset(cloud)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "sokoban"}}]
    dry = cloud("gke.sh", "run", *GKE, *KUBECTL, "--secret=HF_TOKEN", "--dry_run", *TRAIN, clouds=False, HF_TOKEN=token)
    everything = done.stdout + done.stderr + dry.stdout + dry.stderr + (cloud.stub / "calls").read_text()
    assert "hf_it" not in everything + (cloud.repository / "runs/launch/sokoban/jobset.yaml").read_text()
    assert not list(cloud.repository.rglob("secrets.env"))
    refused = cloud("gke.sh", "run", *GKE, f"--image={IMAGE}", "--secret=HF_TOKEN", *TRAIN, HF_TOKEN=token)
    assert refused.stderr == "error: --secret=HF_TOKEN; allowed with --tool=kubectl: gcluster would show it\n"


GCLUSTER_STATES = {"Succeeded": [], "Running": [], "Failed": ["cancel", "submit"], None: ["submit"]}


@pytest.mark.parametrize("state", GCLUSTER_STATES)
def test_resume_submits_again_what_has_failed(cloud, state):
    line = f"\nsokoban   {state}   2026" if state else ""
    cloud.answers({"job list": [f"NAME STATUS CREATION_TIME\nsokoban-old Running 2026{line}"]})
    done = cloud("gke.sh", "resume", *GKE, f"--image={IMAGE}", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert [call[2] for call in cloud.calls] == ["list", *GCLUSTER_STATES[state]]
    kubernetes = {"Succeeded": "Completed|sokoban", "Running": "|sokoban", "Failed": "Failed|sokoban", None: ""}[state]
    cloud.answers({"get jobset": [kubernetes]})
    done = cloud("gke.sh", "resume", *GKE, *KUBECTL, *TRAIN)
    assert done.returncode == 0, done.stderr
    verbs = [call[1] for call in cloud.calls if call[0] == "kubectl"]
    assert verbs == ["get"] + {"Failed": ["delete", "delete", "apply"], None: ["apply"]}.get(state, [])


def test_logs_status_and_dry_runs_of_gke(cloud):
    cloud.answers({"job list": ["NAME STATUS\nsokoban Running"], "get jobset": ["|sokoban"]})
    for tool in ((), ("--tool=kubectl",)):
        for command, more in {"logs": ("--follow",), "status": (), "stop": ()}.items():
            (cloud.stub / "calls").write_text("")
            done = cloud("gke.sh", command, *GKE, *tool, *more, *(["--yes"] if command == "stop" else []))
            assert done.returncode == 0, done.stderr
            dry = cloud("gke.sh", command, *GKE, *tool, *more, "--dry_run", clouds=False)
            assert shown(dry.stdout) == cloud.calls and cloud.calls, (command, tool)
            assert command != "status" or done.stdout == "turnppo_jax: sokoban is Running\n"
    # What a dry run prints is a script: run, it does the same.
    done = cloud("gke.sh", "run", *GKE, *KUBECTL, *TRAIN, *WORDS)
    expected = jobset(cloud)
    (cloud.stub / "calls").write_text("")
    dry = cloud("gke.sh", "run", *GKE, *KUBECTL, "--dry_run", *TRAIN, *WORDS, clouds=False)
    (cloud.repository / "runs/launch/sokoban/jobset.yaml").unlink()
    subprocess.run(["bash", "-c", dry.stdout], cwd=cloud.repository, env=cloud.environment(), check=True)
    assert jobset(cloud) == expected
    assert [call[0] for call in cloud.calls] == ["gcloud", "kubectl"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (TRAIN, "--image is missing (or --base_image)"),
        ((f"--image={IMAGE}", "--base_image=x", *TRAIN), "--image and --base_image; allowed: one of them"),
        (
            (f"--image={IMAGE}", "--spot", *TRAIN),
            "--spot; allowed with --tool=kubectl (with gcluster the node pool decides)",
        ),
        (("--tool=kubectl", "--base_image=x", *TRAIN), "--base_image; allowed with --tool=gcluster"),
        ((*KUBECTL, *TRAIN, "a\nb"), "'a\nb'; allowed on GKE: arguments without control characters"),
        ((f"--image={IMAGE}", *TRAIN[:2], "--workdir=/x"), "--workdir='/x'; allowed on GKE: gs://BUCKET/PATH"),
        (("--name=" + "a" * 29, *TRAIN), "--name='" + "a" * 29 + "'; allowed: at most 28 characters on GKE"),
    ],
)  # fmt: skip
def test_a_wrong_run_on_gke_is_one_line(cloud, more, line):
    done = cloud("gke.sh", "run", *GKE, *more)
    assert (done.returncode, done.stderr) == (2, f"error: {line}\n")
    assert not any(call[0] == "kubectl" and call[1] == "apply" for call in cloud.calls)


def test_skypilot_gets_task_chips_and_words(cloud, tmp_path):
    common = [
        "launch/sky.yaml",
        "--infra=gcp/us-east5/us-east5-b",
        "--gpus=tpu-v6e-16",
        "--env=TURNPPO_BUCKET=my-bucket",
    ]
    pod = ("--name=pod", "--topology=v6e:4x4")
    done = cloud(
        "sky.sh", "resume", *pod, "--zone=us-east5-b", "--spot", "--secret=HF_TOKEN", *TRAIN, *NASTY, HF_TOKEN="s3cret"
    )
    assert done.returncode == 0, done.stderr
    assert cloud("sky.sh", "run", *pod, "--zone=us-east5-b", *TRAIN, *NASTY).returncode == 0
    managed, cluster = cloud.calls
    words = managed[8].removeprefix("--env=TURNPPO_ARGUMENTS=")
    assert managed == [
        "sky", "jobs", "launch", "--name=pod", *common, f"--env=TURNPPO_ARGUMENTS={words}",
        "--use-spot", "--secret=HF_TOKEN", "--detach-run", "--yes",
    ]  # fmt: skip
    assert cluster == [
        "sky", "launch", "--cluster=pod", *common, f"--env=TURNPPO_ARGUMENTS={words}", "--detach-run", "--yes"
    ]  # fmt: skip
    # What its run section makes of the variable, with stubs for what it calls.
    task = yaml.safe_load((ROOT / "launch/sky.yaml").read_text())
    home = tmp_path / "home"
    (home / "turnppo/venv/bin").mkdir(parents=True)
    (home / "launch").mkdir()
    (home / "launch/host.sh").write_text("exit 0\n")
    python = home / "turnppo/venv/bin/python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    environment = cloud.environment() | {"HOME": str(home), "TURNPPO_ARGUMENTS": words}
    inside = subprocess.run(
        ["bash", "-c", task["run"]], cwd=home, env=environment, capture_output=True, text=True, check=True
    )
    assert inside.stdout.split("\0")[:-1] == [
        "-m", "turnppo_jax.train", TRAIN[1], "--workdir=/gcs/runs/x", *NASTY, "--multihost"
    ]  # fmt: skip
    assert set(task["envs"]) == {"TURNPPO_ARGUMENTS", "TURNPPO_BUCKET"}
    assert task["file_mounts"]["/gcs"] == {"source": "gs://${TURNPPO_BUCKET}", "mode": "MOUNT"}


def test_skypilot_is_followed_and_stopped(cloud):
    pod = ("--name=pod", "--topology=v5e:2x4")
    expected = {
        ("logs",): [["sky", "logs", "pod", "--tail=50", "--no-follow"]],
        ("logs", "--managed", "--follow"): [["sky", "jobs", "logs", "--name=pod", "--tail=50", "--follow"]],
        ("status",): [["sky", "status", "pod"], ["sky", "jobs", "queue"]],
        ("stop", "--yes"): [["sky", "jobs", "cancel", "--name=pod", "--yes"], ["sky", "down", "pod", "--yes"]],
    }
    for (command, *more), calls in expected.items():
        (cloud.stub / "calls").write_text("")
        assert cloud("sky.sh", command, *pod, *more).returncode == 0
        assert cloud.calls == calls
        dry = cloud("sky.sh", command, *pod, *more, "--dry_run", clouds=False)
        assert shown(dry.stdout) == calls
    cloud.answers({"down": [{"error": "no such cluster", "status": 1}]})
    done = cloud("sky.sh", "stop", *pod, said="y\n")
    assert done.returncode == 1 and "no such cluster" in done.stderr and len(cloud.calls) == 2
    assert cloud("sky.sh", "stop", *pod).returncode == 1 and len(cloud.calls) == 2
    assert json.loads((cloud.stub / "calls").read_text().splitlines()[0])[0] == "sky"
