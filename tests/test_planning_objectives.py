"""`plan` makes the learner's programs with the arguments that each objective needs."""

import jax
import pytest

from tests.tiny_config import get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.planning.learner_programs import learner_programs
from turnppo_jax.planning.states import make_states
from turnppo_jax.planning.workload import PlanSettings, expected_workload
from turnppo_jax.settings import run_settings


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"kl_coef": 0.1, "kl_placement": "reward", "imitation_coef": 0.1, "num_minibatches": 1},
            ["actor score", "reference score", "advantages", "actor update"],
        ),
        (
            {"kl_coef": 0.1, "imitation_coef": 0.1, "importance_level": "sequence", "num_minibatches": 1},
            ["actor score", "reference score", "advantages", "actor update"],
        ),
        ({"kl_coef": 0.0, "objective": "cispo", "num_minibatches": 1}, ["advantages", "actor update"]),
    ],
)
def test_programs_lower_from_their_arguments(changes, names):
    config = finalise(get_config("algo=grpo"))
    config["algorithm"] |= changes
    config["sampler"]["num_slots"] = 4
    settings = run_settings(config)
    mesh, sizes = make_mesh(devices=jax.devices()[:1]), SIZES["tiny-qwen3-narrow"]
    plan = PlanSettings(turns=2, first_prompt_tokens=8, next_prompt_tokens=4, response_tokens=4)
    workload = expected_workload(
        plan, settings.learner.shape, settings.learner.algorithm, max_turn_tokens=6, context_length=64
    )
    states = make_states(settings, sizes, mesh, mesh)
    programs = learner_programs(settings, sizes, None, mesh, states, workload)
    assert [program.name for program in programs] == names
    for program in programs:
        # A missing argument would not trace.
        lowered = program.function.lower(*program.arguments)
        assert "while" in lowered.as_text() or program.name == "advantages"
