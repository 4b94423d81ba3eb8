"""What runs on a TPU host: real processes started, asked, stopped; and the set-up of its environment."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from tests.cloud_stub import ROOT, Cloud, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stub workers are Linux hosts: /proc, setsid")

ARGUMENTS = ("7", "--config=configs/tiny.py", "--workdir=/mnt/x")


@pytest.fixture
def host(tmp_path):
    """A host whose environment is set up; call it with a command of host.sh."""
    cloud = Cloud(tmp_path)
    home = tmp_path / "turnppo"
    home.mkdir()
    (home / "code").symlink_to(cloud.repository)
    assert cloud("setup_host.sh").returncode == 0

    def call(*arguments: str, **variables: str):
        done = cloud("host.sh", *arguments, **variables)
        return done.stdout.strip() if done.returncode == 0 else done

    call.cloud, call.run = cloud, home / "run"
    yield call
    cloud.close()


def pid(host, name="pid"):
    return int((host.run / name).read_text())


def test_a_run_from_its_start_to_its_end(host):
    assert host("status") == "none"
    host.cloud.runs("hang", 0, 5)
    assert re.fullmatch(r"turnppo_jax: started \(pid \d+\), log in .*", host("start", *ARGUMENTS))
    assert host("status") == f"running 7 pid {pid(host)}"
    refused = host("start", *ARGUMENTS)
    assert refused.returncode == 1 and "a run is going here already (running 7" in refused.stderr
    assert host("unpack").stderr == (
        "error: a run is going here, and its environments start from this code; stop it first\n"
    )
    until(lambda: host.cloud.trainings)
    assert host("stop", "20") == "stopped 7"
    host("start", *ARGUMENTS)
    until(lambda: host("status") == "finished 7")
    host("start", "8", *ARGUMENTS[1:])
    until(lambda: host("status") == "failed 8 exit status 5")
    assert [training["argv"][1:] for training in host.cloud.trainings] == [["turnppo_jax.train", *ARGUMENTS[1:]]] * 3
    log = host("logs", "100")
    assert len(re.findall(r"^--- \S+Z ended with exit status (143|0|5)$", log, flags=re.MULTILINE)) == 3
    assert host("logs", "1").endswith("exit status 5")


def test_the_run_outlives_the_session_that_started_it(host):
    host.cloud.runs("hang")
    session = host.cloud.start("host.sh", "start", *ARGUMENTS)
    session.communicate(timeout=60)  # returns at once: the run holds none of the session's files
    until(lambda: host.cloud.trainings)
    os.kill(pid(host), 0)
    assert os.getsid(pid(host)) != session.pid
    os.kill(pid(host), signal.SIGHUP)  # what the end of a connection sends
    os.kill(pid(host, "supervisor"), signal.SIGHUP)
    assert host("status").startswith("running 7")
    assert host("stop", "20") == "stopped 7"


def test_when_the_machine_goes_down_python_gets_one_sigterm_and_saves(host):
    host.cloud.runs("hang")
    host("start", *ARGUMENTS)
    until(lambda: host.cloud.trainings)
    signals = host.cloud.repository / "signals"
    os.kill(pid(host), signal.SIGTERM)  # the system signals every process
    until(signals.exists)
    os.kill(pid(host, "supervisor"), signal.SIGTERM)
    until(lambda: host("status") == "stopped 7")
    assert signals.read_text() == "TERM\n"
    assert "saved" in host("logs", "10")


def test_a_run_that_does_not_end_is_killed(host):
    host.cloud.runs("deaf")
    host("start", *ARGUMENTS)
    until(lambda: host.cloud.trainings)
    said = host("stop", "1")
    assert "has not ended within 1 s of SIGTERM: killed" in said
    assert said.splitlines()[-1] == "failed 7 exit status 137"


def test_a_run_whose_supervisor_died_with_it_is_interrupted(host):
    host.cloud.runs("hang")
    host("start", *ARGUMENTS)
    until(lambda: host.cloud.trainings)
    os.kill(pid(host, "supervisor"), signal.SIGKILL)
    assert host("status").startswith("running 7")  # python itself goes on
    os.kill(pid(host), signal.SIGKILL)
    until(lambda: host("status") == "interrupted 7")
    # After a reboot another process may have the number.
    other = subprocess.Popen(["sleep", "60"])
    (host.run / "pid").write_text(f"{other.pid}\n")
    assert host("status") == "interrupted 7"
    assert host("stop", "1") == "interrupted 7" and other.poll() is None
    other.kill()
    other.wait()


HOLDER = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, {how}); file = open(sys.argv[1]); print(); time.sleep(60)"
)


def holder(device, how="signal.SIG_DFL"):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(how=how), str(device)], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()  # the file is open now
    process.stdout.close()
    return process


def test_stale_processes_that_hold_the_tpu_are_ended_and_no_others(host, tmp_path):
    devices = tmp_path / "devices"
    devices.mkdir()
    for name in ("accel0", "accel1"):
        (devices / name).write_text("")
    (tmp_path / "other").write_text("")
    (tmp_path / "libtpu_lockfile").write_text("")
    stale, deaf = holder(devices / "accel0"), holder(devices / "accel1", "signal.SIG_IGN")
    other = holder(tmp_path / "other")
    said = host("free_tpu")
    assert f"ending process {stale.pid}, which holds the TPU: " in said
    assert f"process {deaf.pid} ignores SIGTERM: killed" in said
    assert (stale.wait(10), deaf.wait(10), other.poll()) == (-signal.SIGTERM, -signal.SIGKILL, None)
    assert not (tmp_path / "libtpu_lockfile").exists()
    assert host("free_tpu") == ""
    other.kill()
    other.wait()
    # A start frees it, too; while a run is going it is left alone.
    stale = holder(devices / "accel0")
    host.cloud.runs("hang")
    host("start", *ARGUMENTS)
    assert stale.wait(10) == -signal.SIGTERM
    late = holder(devices / "accel0")
    assert host("free_tpu") == "turnppo_jax: a run is going here: what it holds is left alone"
    assert late.poll() is None
    late.kill()
    late.wait()


def test_a_bucket_is_mounted_for_the_workdir(host, tmp_path):
    mounts = tmp_path / "mounts"
    for name, text in {
        "gcsfuse": '#!/bin/bash\nprintf "%s\\n" "$@" >> "$HOME/mounts"\n[[ -z ${MOUNT_FAILS:-} ]]\n',
        "mountpoint": '#!/bin/bash\n[[ -s $HOME/mounts ]]\n',
    }.items():  # fmt: skip
        (host.cloud.tools / name).write_text(text)
        (host.cloud.tools / name).chmod(0o755)
    refused = host("start", "7", "--workdir=gs://my-bucket/runs/a b", MOUNT_FAILS="1")
    assert "gcsfuse could not mount gs://my-bucket; its message is above" in refused.stderr
    assert host.cloud.trainings == []
    mounts.unlink()
    for _ in range(2):
        host("start", "7", "--workdir=gs://my-bucket/runs/a b", "--config=x")
        until(lambda: host("status") == "finished 7")
    folder = str(tmp_path / "turnppo" / "gcs" / "my-bucket")
    assert host.cloud.trainings[0]["argv"][2:] == [f"--workdir={folder}/runs/a b", "--config=x"]
    words = mounts.read_text().splitlines()
    assert words[-2:] == ["my-bucket", folder]  # once
    # Hosts must see what others write at once, and checkpoints are moved as folders.
    assert {"--metadata-cache-ttl-secs=0", "--rename-dir-limit=200000", "--implicit-dirs"} <= set(words)


def test_what_is_missing_is_said(host):
    for folder, line in (("venv", "venv; run setup first"), ("code", "code; run setup first")):
        path = host.run.parent / folder
        path.rename(path.with_name("away"))
        assert host("start", *ARGUMENTS).stderr.endswith(line + "\n")
        path.with_name("away").rename(path)
    assert host("logs", "5").stderr == "error: no log yet\n"
    wrong = host("begin")
    assert (wrong.returncode, wrong.stderr) == (
        2, "error: 'begin' is no command; known: unpack, start, status, logs, stop, free_tpu\n"
    )  # fmt: skip


def uv_calls(cloud):
    path = cloud.stub / "uv_calls"
    calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return calls


def test_setup_makes_the_environment_once(tmp_path):
    cloud = Cloud(tmp_path)
    venv = f"{tmp_path}/turnppo/venv"
    (line,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("jax>")]
    bounds = Requirement(line).specifier
    done = cloud("setup_host.sh")
    assert done.returncode == 0, done.stderr
    make, install = uv_calls(cloud)
    assert make == ["venv", "--quiet", "--python", "3.12", venv]
    assert install[:-1] == ["pip", "install", "--quiet", "--python", f"{venv}/bin/python"] + [
        "--requirement", "requirements.txt"
    ]  # fmt: skip
    jax = Requirement(install[-1])
    assert (jax.name, jax.extras, jax.specifier) == ("jax", {"tpu"}, bounds)
    again = cloud("setup_host.sh")
    assert uv_calls(cloud) == [] and f"using {venv}" in again.stdout
    with open(cloud.repository / "requirements.txt", "a") as file:
        file.write("another\n")
    cloud("setup_host.sh")
    assert [call[0] for call in uv_calls(cloud)] == ["pip"]


def test_setup_goes_on_where_it_was_interrupted(tmp_path):
    cloud = Cloud(tmp_path)
    python = tmp_path / "turnppo" / "venv" / "bin" / "python"
    (cloud.stub / "uv_fails").write_text("")
    done = cloud("setup_host.sh")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"error: uv could not make {python.parents[1]}; its message is above"
    (cloud.stub / "uv_fails").unlink()
    python.write_text("half")
    uv_calls(cloud)
    assert cloud("setup_host.sh").returncode == 0
    assert [call[0] for call in uv_calls(cloud)] == ["venv", "pip"]
    python.unlink()  # a part of it is gone
    assert cloud("setup_host.sh").returncode == 0
    assert [call[0] for call in uv_calls(cloud)] == ["venv", "pip"]


# The machine's own, without pip until apt-get has brought it.
PYTHON3 = r"""#!/bin/bash
echo "$*" >> "$HOME/python_calls"
case "$*" in
    "-m pip --version") [[ -e $HOME/has_pip ]] ;;
    "-m pip install "*" --target $HOME/turnppo/tools --upgrade uv")
        mkdir -p "$HOME/turnppo/tools/bin"
        cp "$HOME/uv" "$HOME/turnppo/tools/bin/uv"
        ;;
    *) exit 9 ;;
esac
"""
APT_GET = r"""#!/bin/bash
echo "$*" >> "$HOME/apt_calls"
[[ $1 == update ]] || : > "$HOME/has_pip"
"""


def test_setup_brings_uv_where_there_is_none(tmp_path):
    cloud = Cloud(tmp_path)
    (cloud.tools / "uv").rename(cloud.folder / "uv")
    (cloud.tools / "python3").write_text(PYTHON3)
    (cloud.tools / "apt-get").write_text(APT_GET)
    for name in ("python3", "apt-get"):
        (cloud.tools / name).chmod(0o755)
    (cloud.tools / "sudo").write_text('#!/bin/bash\n[[ $1 == -n ]] && shift\nexec "$@"\n')
    done = cloud("setup_host.sh")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert (tmp_path / "apt_calls").read_text() == "update -q\ninstall -y -q python3-pip\n"
    assert [call[0] for call in uv_calls(cloud)] == ["venv", "pip"]
    assert cloud("setup_host.sh").returncode == 0  # nothing left to do
    assert (tmp_path / "python_calls").read_text().count("--target") == 1
