"""Chat messages to tokens and back, by appending: what is in the context stays as it is.

The chat template of the tokenizer is rendered once, on marker words, to learn its pieces; after that
every prompt is made of those pieces and the ids of a conversation only ever grow. Sampled ids are never
decoded and encoded again, and the template is never applied to the past (Qwen3's would remove old
thinking, Qwen2.5's would insert its default system prompt in the middle of the conversation).
"""

import json
import pathlib
from collections.abc import Sequence

import jinja2
import numpy as np

from turnppo_jax.rollout import chat_pieces, plain_encoder

# For tokenizers that bring no chat template, by choice of the user only. "plain" asks nothing of the
# vocabulary but an end-of-text token: its role headers are ordinary text.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}


class Chat:
    """Prompts, responses and whole conversations of one tokenizer as token ids.

    Text from outside never becomes a control token, whatever it spells. Token ids of a conversation are

        first_prompt(obs_1, system) + response_1 + next_prompt(obs_2, ended=...) + response_2 + ...

    which equals the tokenizer's full chat template wherever that template is append-only.

    Args:
      tokenizer: a transformers tokenizer with a `tokenizers` backend and a chat template.
      thinking: False asks the template for its non-thinking generation prompt (Qwen3: an empty think
        block); templates that know no thinking ignore it.
      generation_eos_ids: further ids that end a response; default: `eos_token_id` of the
        `generation_config.json` beside the tokenizer's files, if there is one. Nothing else of that file
        is read: sampling is neutral unless the run's own config says otherwise.

    Attributes:
      eos_ids: ids that end a response; the template's own end-of-turn id comes first.
      end_id: the template's end-of-turn id.
      pad_id: the padding id (the end-of-turn id where the tokenizer has none).
      num_token_ids: one more than the largest id that a token has.

    Raises:
      TemplateError: the template cannot be rendered by appending, or there is none.
      ValueError: the tokenizer has no `tokenizers` backend.
    """

    def __init__(self, tokenizer, *, thinking: bool = True, generation_eos_ids: Sequence[int] | None = None):
        if not tokenizer.chat_template:
            raise chat_pieces.TemplateError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; put a chat_template.jinja beside it, "
                f"or name one of the templates here: {', '.join(sorted(TEMPLATES))}"
            )
        self._encoder = plain_encoder.PlainEncoder(tokenizer)
        self._backend = tokenizer.backend_tokenizer

        def render(messages):
            try:
                return tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
                )
            except jinja2.TemplateError as error:
                raise chat_pieces.TemplateError(f"the chat template refuses a conversation: {error}") from error

        self.pieces = chat_pieces.derive_pieces(render)
        split = self._encoder.split
        self._default_head = split(self.pieces.default_head)
        self._system_head = None if self.pieces.system_head is None else split(self.pieces.system_head)
        self._after_system = split(self.pieces.after_system)
        self._generation = split(self.pieces.generation)
        end, *self._separator = split(self.pieces.separator) or [""]
        if not isinstance(end, int):
            raise chat_pieces.TemplateError(
                f"the chat template must end a response with a control token, not with {self.pieces.separator!r}"
            )
        self.end_id = end
        if generation_eos_ids is None:
            generation_eos_ids = _generation_eos_ids(tokenizer.name_or_path)
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids = tuple(dict.fromkeys([self.end_id, *own, *map(int, generation_eos_ids)]))
        self.pad_id = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.num_token_ids = max(tokenizer.get_vocab().values()) + 1
        self._check_against(tokenizer)

    def first_prompt(self, observation: str, system: str = "") -> np.ndarray:
        """System prompt, first user message and generation prompt.

        Args:
          observation: the first user message.
          system: the system prompt; "" means what the template writes when it gets none.

        Returns:
          [P] int32.

        Raises:
          TemplateError: a system prompt is given and the template takes none.
        """
        if not system:
            head = self._default_head
        elif self._system_head is None:
            raise chat_pieces.TemplateError("the chat template takes no system message; give the environment none")
        else:
            head = [*self._system_head, system, *self._after_system]
        return self._ids([*head, observation, *self._generation])

    def next_prompt(self, observation: str, *, ended: bool) -> np.ndarray:
        """What comes between a response and the next one: separator, user message, generation prompt.

        Args:
          observation: the user message.
          ended: whether the response before it ends with a sampled end-of-turn id; if not, that id comes first.

        Returns:
          [P] int32.
        """
        end = [] if ended else [self.end_id]
        return self._ids([*end, *self._separator, observation, *self._generation], continues=True)

    def encode_text(self, text: str) -> np.ndarray:
        """Ids [P] int32 of text inside a conversation; no id of an added token among them."""
        return np.asarray(self._encoder.encode(text), np.int32)

    def encode_response(self, text: str) -> np.ndarray:
        """Ids [R] int32 of a response written by someone else, its end-of-turn id not included.

        Tags that are one token for the model (`<think>` of Qwen3) become that token; control tokens never.
        """
        return np.asarray(self._encoder.encode_natural(text), np.int32)

    def encode_messages(self, messages: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        """A whole conversation, exactly as a rollout would have built it.

        Args:
          messages: {"role": ..., "content": ...}: perhaps a system message, then user and assistant in
            turns, an assistant message last.

        Returns:
          ids [T] int32 and action_mask [T] bool, True on the responses and their end-of-turn ids.

        Raises:
          ValueError: roles or contents are not as above; the message names the index.
        """
        system, turns = check_messages(messages)
        ids, mask = [], []
        for index, (observation, response) in enumerate(turns):
            prompt = self.next_prompt(observation, ended=True) if index else self.first_prompt(observation, system)
            answer = np.append(self.encode_response(response), np.int32(self.end_id))
            ids += [prompt, answer]
            mask += [np.zeros(len(prompt), bool), np.ones(len(answer), bool)]
        return np.concatenate(ids), np.concatenate(mask)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, for environments and logs only.

        Ids of `eos_ids` at the end are left out; everything else is kept, tags and control tokens in
        the middle included. Bytes that are no whole character become U+FFFD.
        """
        ids = [int(i) for i in ids]
        while ids and ids[-1] in self.eos_ids:
            ids.pop()
        return self._backend.decode(ids, skip_special_tokens=False)

    def _ids(self, parts: list[int | str], continues: bool = False) -> np.ndarray:
        # A prompt that continues a conversation has an end-of-turn id before it, even where it is not part of it.
        ids = self._encoder.encode_parts([self.end_id, *parts] if continues else parts)
        return np.asarray(ids[1:] if continues else ids, np.int32)

    def _check_against(self, tokenizer) -> None:
        """Compares the ids of both kinds of prompt with the tokenizer's own on the same text."""
        user, pieces = "markeruserone", self.pieces
        cases = [
            (pieces.default_head + user + pieces.generation, self.first_prompt(user)),
            (pieces.separator + user + pieces.generation, self.next_prompt(user, ended=False)),
        ]
        for text, ids in cases:
            whole = tokenizer(text, add_special_tokens=False)["input_ids"]
            if whole != ids.tolist():
                raise chat_pieces.TemplateError(
                    f"the tokenizer encodes {text!r} as {whole}, but its pieces as {ids.tolist()}; control tokens that "
                    "swallow the space beside them (lstrip, rstrip) are not supported"
                )


def load_tokenizer(directory: str | pathlib.Path, *, template: str = ""):
    """Loads the tokenizer of a model directory, without network.

    Args:
      directory: holds tokenizer.json, or tokenizer.model (SentencePiece), or vocab.json and merges.txt.
      template: chat template to use in place of the directory's own: a name in `TEMPLATES`, or the path of
        a .jinja file; "" keeps the directory's own.

    Returns:
      A transformers tokenizer.

    Raises:
      ValueError: there is no such directory, no tokenizer that can be read in it, or no such template.
    """
    import transformers  # two seconds of import, which commands that need no tokenizer do not pay

    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ValueError(f"tokenizer directory {str(directory)!r} does not exist")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(
            f"no tokenizer in {str(directory)!r}; expected tokenizer.json, tokenizer.model, or vocab.json + merges.txt"
        )
    try:
        # A tokenizer.json says everything. The class that transformers would choose by the model's type may
        # replace parts of it (a SmolLM2 tokenizer beside a config of type qwen2 would split text as Qwen does).
        whole = (directory / "tokenizer.json").is_file()
        loader = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the Rust reader raises Exception itself for files that it cannot parse
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the tokenizer in {str(directory)!r} cannot be loaded: {reason}") from error
    if template:
        tokenizer.chat_template = _read_template(template)
    return tokenizer


def _read_template(template: str) -> str:
    if template in TEMPLATES:
        return TEMPLATES[template]
    path = pathlib.Path(template)
    if not path.is_file():
        raise ValueError(f"chat template {template!r} is neither a file nor one of {', '.join(sorted(TEMPLATES))}")
    return path.read_text(encoding="utf-8")


def _generation_eos_ids(directory: str) -> list[int]:
    """`eos_token_id` of generation_config.json as a list; empty where there is no directory, file or field."""
    path = pathlib.Path(directory) / "generation_config.json"
    if not directory or not path.is_file():
        return []
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id of {path.name} is {ids}; expected an id or a list of ids")
    return ids


def check_messages(messages: Sequence[dict]) -> tuple[str, list[tuple[str, str]]]:
    """The system prompt ("" for none) and the (observation, response) pairs of a conversation.

    Raises:
      ValueError: anything but a system message at most, then user and assistant in turns, an assistant
        message last, all with text as content; the message names the index.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {index} needs a 'role' and a 'content' of text, but is {message!r:.80}")
    system = messages[0]["content"] if messages and messages[0].get("role") == "system" else ""
    offset = 1 if messages and messages[0].get("role") == "system" else 0
    for index in range(offset, len(messages)):
        expected = ("user", "assistant")[(index - offset) % 2]
        if messages[index].get("role") != expected:
            raise ValueError(f"message {index} has role {messages[index].get('role')!r}; expected {expected!r}")
    if len(messages) == offset or (len(messages) - offset) % 2:
        raise ValueError("a conversation must end with an assistant message")
    contents = [message["content"] for message in messages[offset:]]
    return system, list(zip(contents[::2], contents[1::2], strict=True))
