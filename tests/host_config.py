"""The run of tests/host_process.py: tests/tiny_config.py on four devices, with numbers that two hosts cannot halve."""

from tests import tiny_config


def get_config(argument=""):
    config = tiny_config.get_config(argument)
    config.env.id = "tests.failing_env:FailingEnv"
    config.env.kwargs = {"fail_seeds": []}
    config.env.num_workers = 1
    config.rollout.num_prompts = 7
    config.rows.micro_rows = 4
    config.mesh.data = config.mesh.fsdp = 2
    config.evaluation.num_seeds = 5
    config.evaluation.samples = 1
    config.evaluation.every = 0
    return config
