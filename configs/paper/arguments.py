"""What the paper's configs share: their argument `model=…,topology=…,…`, and the choices for each pair of these two."""

import dataclasses
from collections.abc import Mapping

MODELS = {
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """How one model runs on one slice; the paper's numbers do not depend on it.

    Attributes:
      fsdp, tensor: the learner's mesh.
      micro_rows: rows of a forward and backward pass.
      remat: of the learner.
      slots: conversations of a host at once.
      rollout_tensor: chips that share one copy of the weights in the rollout.
    """

    fsdp: int
    tensor: int
    micro_rows: int
    remat: str
    slots: int
    rollout_tensor: int


def parse(
    argument: str, known: Mapping[tuple[str, str], Hardware], **others: tuple[str, ...]
) -> tuple[str, Hardware, dict[str, str]]:
    """Reads an argument "model=NAME,topology=NAME,…"; what is left out is that of the first match.

    Args:
      argument: of `--config=FILE.py:ARGUMENT`.
      known: choices by (model, topology).
      **others: further options and their values, the default first.

    Returns:
      (model name, hardware, value of each further option).

    Raises:
      ValueError: another argument, or a pair that has no choices; the known ones are listed.
    """
    options = dict(part.partition("=")[::2] for part in argument.split(",") if part)
    chosen = {name: options.pop(name, values[0]) for name, values in others.items()}
    if set(options) <= {"model", "topology"} and all(chosen[name] in values for name, values in others.items()):
        for (model, topology), hardware in known.items():
            if options.get("model", model) == model and options.get("topology", topology) == topology:
                return MODELS[model], hardware, chosen
    pairs = "; ".join(f"model={model},topology={topology}" for model, topology in known)
    further = "".join(f"; with {name}={'|'.join(values)}" for name, values in others.items())
    raise ValueError(f"config argument {argument!r}; allowed: {pairs}{further}")
