"""A machine with a stub gcloud for the launch scripts: it records what it is asked and plays scripted answers.

`gcloud ... ssh --command=C` runs C with bash in a home folder of the worker's own, as sshd would, and `scp` copies into
it; so what arrives on a worker is what a worker would get. The stub's training command is scripted, too.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = [
    "awk", "bash", "cat", "cksum", "chmod", "cp", "cut", "date", "dirname", "env", "find", "git", "grep", "gzip",
    "mkdir", "mktemp", "mv", "nohup", "readlink", "rm", "sed", "setsid", "sort", "tail", "tar", "tr",
]  # fmt: skip

# Plays gcloud, gcluster, kubectl and sky. $STUB/answers.json: [[pattern, [answer, ...]], ...]; the first pattern that
# is found in a call answers it, with its next answer, the last one again and again. An answer is what is printed; or
# {"out": ..., "error": ..., "status": ..., "forget": true}, where forget takes the workers away with all that runs on
# them; or null, and the call is played as it is without answers.
CLOUD = """#!{python} -IS
import fcntl, glob, json, os, re, shutil, subprocess, sys
stub = os.environ["STUB"]
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
line = " ".join(words)
with open(stub + "/lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(stub + "/calls", "a") as calls:
        calls.write(json.dumps(words) + "\\n")
    if words[0] == "gcloud" and "--project=my-project" not in words:
        sys.exit("stub: in which project? " + line)
    answer = None
    with open(stub + "/answers.json") as file:
        answers = json.load(file)
    for pattern, queue in answers:
        if re.search(pattern, line):
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            break
    with open(stub + "/answers.json", "w") as file:
        json.dump(answers, file)
if answer is not None:
    if isinstance(answer, str):
        answer = {{"out": answer}}
    if answer.get("out"):
        print(answer["out"])
    if answer.get("error"):
        print(answer["error"], file=sys.stderr)
    if answer.get("forget"):
        for path in glob.glob(stub + "/workers/*/turnppo/run/*"):
            if path.endswith(("/pid", "/supervisor")):
                try:
                    os.kill(int(open(path).read()), 9)
                except (ValueError, ProcessLookupError):
                    pass
        shutil.rmtree(stub + "/workers")
        os.mkdir(stub + "/workers")
    sys.exit(answer.get("status", 0))
options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
plain = [word for word in words[1:] if not word.startswith("--")]
if "ssh" in plain or "scp" in plain:
    name = plain[plain.index("ssh") + 1] if "ssh" in plain else plain[-1].split(":")[0]
    home = stub + "/workers/" + options.get("worker", name)
    os.makedirs(home, exist_ok=True)
    if "ssh" in plain:
        environment = os.environ | {{"HOME": home}}
        sys.exit(subprocess.run(["bash", "-c", options["command"]], cwd=home, env=environment).returncode)
    for source in plain[plain.index("scp") + 1 : -1]:
        shutil.copy(source, home + "/turnppo/")
"""

# Plays uv: the python of the environment that it makes records how it is called. $STUB/runs.json scripts what each
# start of the training does, the last one again and again: an exit status; "hang": until SIGTERM, then status 143; or
# "deaf": not even then.
UV = """#!{python} -IS
import json, os, sys
words = sys.argv[1:]
with open(os.environ["STUB"] + "/uv_calls", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "venv":
    os.makedirs(words[-1] + "/bin")
    python = words[-1] + "/bin/python"
    with open(python, "w") as file:
        file.write({venv_python!r})
    os.chmod(python, 0o755)
if os.path.exists(os.environ["STUB"] + "/uv_fails"):
    sys.exit("uv: no such package")
"""

VENV_PYTHON = """#!{python} -IS
import fcntl, json, os, signal, sys, time
stub = os.environ["STUB"]
if sys.argv[1] == "-c":
    if "importlib.metadata" in sys.argv[2]:
        print("turnppo_jax: ready: jax 0 libtpu 0")
    sys.exit(0)
signals = []
def on_term(*_):
    signals.append("TERM")
    with open("signals", "a") as file:
        file.write("TERM\\n")
signal.signal(signal.SIGTERM, on_term)
environment = {{name: os.environ.get(name) for name in ("HF_TOKEN", "WANDB_API_KEY", "PYTHONUNBUFFERED")}}
record = {{"argv": sys.argv[1:], "folder": os.getcwd(), "environment": environment}}
with open(stub + "/lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(stub + "/trainings", "a") as file:
        file.write(json.dumps(record) + "\\n")
    with open(stub + "/runs.json") as file:
        runs = json.load(file)
    run = runs.pop(0) if len(runs) > 1 else runs[0]
    with open(stub + "/runs.json", "w") as file:
        json.dump(runs, file)
print("training", flush=True)
if run in ("hang", "deaf"):
    end = time.time() + 60
    while time.time() < end and (run == "deaf" or not signals):
        time.sleep(0.02)
    end = time.time() + 0.3  # a second SIGTERM would be seen
    while time.time() < end:
        time.sleep(0.02)
    print("saved", flush=True)
    run = 143
print("exit", run, flush=True)
sys.exit(run)
"""

SLEEP = """#!{bash}
case $1 in 0.*) exec {sleep} "$1" ;; *) exec {sleep} 0.05 ;; esac
"""


class Cloud:
    """The machine that the scripts run on, with a repository of its own, and the workers behind its stub gcloud."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.repository = folder / "a repository"  # a space in the path is no trouble
        self.stub = folder / "stub"
        self.bin = folder / "bin"
        self.tools = folder / "tools"
        self.workers = self.stub / "workers"
        for path in (self.repository / "configs", self.workers, self.bin, self.tools):
            path.mkdir(parents=True)
        shutil.copytree(ROOT / "launch", self.repository / "launch")
        for name in ("requirements.txt", ".gitignore"):
            shutil.copy(ROOT / name, self.repository / name)
        (self.repository / "configs" / "tiny.py").write_text("")
        subprocess.run(["git", "init", "-q"], cwd=self.repository, check=True)
        for name in TOOLS:
            if path := shutil.which(name):
                (self.tools / name).symlink_to(path)
        python, bash = sys.executable, shutil.which("bash")
        venv_python = VENV_PYTHON.format(python=python)
        scripts = dict.fromkeys(("gcloud", "gcluster", "kubectl", "sky"), CLOUD.format(python=python))
        scripts["uv"] = UV.format(python=python, venv_python=venv_python)
        scripts["sleep"] = SLEEP.format(bash=bash, sleep=shutil.which("sleep"))
        scripts["sudo"] = f"#!{bash}\nexit 1\n"
        for name, text in scripts.items():
            folder = self.bin if name in ("gcloud", "gcluster", "kubectl", "sky") else self.tools
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.answers({})
        self.runs(0)

    def answers(self, *patterns: dict[str, list]) -> None:
        """What the stub answers to calls, by pattern, the first that fits; forgets the calls so far."""
        pairs = [pair for group in patterns for pair in group.items()]
        (self.stub / "answers.json").write_text(json.dumps(pairs))
        (self.stub / "calls").write_text("")

    def runs(self, *what: int | str) -> None:
        """What the starts of the training do; forgets the earlier ones."""
        (self.stub / "runs.json").write_text(json.dumps(what))
        (self.stub / "trainings").write_text("")

    def environment(self, *, clouds: bool = True, **variables: str) -> dict[str, str]:
        path = f"{self.bin}:{self.tools}" if clouds else str(self.tools)
        devices = f"{self.folder}/devices/*"
        fixed = {"PATH": path, "STUB": str(self.stub), "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        return fixed | {"TURNPPO_TPU_DEVICES": devices, "TURNPPO_TERM_SECONDS": "1"} | variables

    def __call__(self, script: str, *arguments: str, said: str = "", clouds: bool = True, **variables: str):
        """Runs a script of launch/ to its end."""
        return subprocess.run(
            ["bash", f"launch/{script}", *arguments],
            cwd=self.repository,
            env=self.environment(clouds=clouds, **variables),
            input=said,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, script: str, *arguments: str) -> subprocess.Popen:
        """Starts a script of launch/ in a session of its own."""
        return subprocess.Popen(
            ["bash", f"launch/{script}", *arguments], cwd=self.repository, env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def calls(self) -> list[list[str]]:
        """What the cloud's commands were called with."""
        return [json.loads(line) for line in (self.stub / "calls").read_text().splitlines()]

    @property
    def trainings(self) -> list[dict]:
        """How the training was started: argv, folder, environment."""
        return [json.loads(line) for line in (self.stub / "trainings").read_text().splitlines()]

    def close(self) -> None:
        """Ends what the workers still run."""
        for path in self.folder.rglob("run/*"):
            if path.name in ("pid", "supervisor"):
                try:
                    os.kill(int(path.read_text()), signal.SIGKILL)
                except (ValueError, ProcessLookupError):
                    continue


def shown(output: str) -> list[list[str]]:
    """The commands that a dry run prints, as words; its remarks left out."""
    return [shlex.split(line) for line in output.splitlines() if line and not line.startswith("#")]


def until(condition, seconds: float = 60.0) -> None:
    """Returns when the condition holds.

    Raises:
      AssertionError: it does not within that time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
