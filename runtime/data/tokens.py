"""From a record to token ids, and which of them the loss counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.config import DataConfig
from runtime.refusal import Refused

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Conversations for one token a byte, which has no template of its own."""
ASSISTANTS = ("assistant", "model", "gpt")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One record as tokens."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    """[length]"""
    trained: np.ndarray[Any, np.dtype[np.bool_]]
    """[length]; whether the loss counts the prediction *of* this token."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def useful(self) -> bool:
        """Whether there is anything to predict: the first token has nothing before it."""
        return bool(self.trained[1:].any())


class Tokenizer(Protocol):
    """What the encoder needs of a tokenizer."""

    end: int | None
    """Id that ends a plain document."""

    def encode(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """Ids, and for each the place of its first character in ``text``."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        """A conversation as text; ``ask`` adds what opens the assistant's turn."""
        ...


class ByteTokenizer:
    """One token a byte; ``end`` is the model's own end token."""

    def __init__(self, end: int | None, template: str | None = None) -> None:
        self.end = end
        self._template = _compile(template or PLAIN_TEMPLATE)

    def encode(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """UTF-8 bytes and the characters that they belong to."""
        ids: list[int] = []
        places: list[int] = []
        for place, character in enumerate(text):
            encoded = character.encode("utf-8", "replace")
            ids += encoded
            places += [place] * len(encoded)
        return ids, places

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        """By the template."""
        return str(self._template.render(messages=messages, add_generation_prompt=ask))


class ModelTokenizer:
    """The tokenizer of a definition's folder.

    Raises:
        Refused: ``tokenizer-missing``, ``template-missing`` (only when a conversation is met).
    """

    def __init__(self, folder: Path, template: str | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, use_fast=True)
        except (OSError, ValueError, KeyError) as error:
            advice = "put tokenizer.json there, or set data.tokenizer: bytes for a twin"
            raise Refused("tokenizer-missing", f"no tokenizer in {folder}", f"{advice} ({error})") from None
        if template is not None:
            self._inner.chat_template = template
        self.end: int | None = self._inner.eos_token_id

    def encode(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """By the tokenizer, with the offsets of its fast form."""
        coded = self._inner(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        return list(coded["input_ids"]), [begin for begin, _ in coded["offset_mapping"]]

    def render(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        """By the tokenizer's chat template."""
        if not self._inner.chat_template:
            advice = "set data.chat_template to a file with a Jinja template"
            raise Refused("template-missing", "the tokenizer has no chat template", advice)
        return str(self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask))


class Encoder:
    """Records to documents: conversations, questions with answers, or plain text, by the fields that they have."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.config, self.tokenizer, self.vocabulary = config, tokenizer, vocabulary

    def __call__(self, record: Mapping[str, Any], where: str) -> Document:
        """Encode one record.

        Args:
            record: the fields.
            where: file and number, for messages.

        Raises:
            Refused: ``data-field``, ``data-conversation``, ``data-vocabulary``.
        """
        config = self.config
        prompt, completion = config.prompt_fields
        if config.messages_field in record:
            document = self._conversation(record[config.messages_field], where)
        elif prompt in record and completion in record:
            document = self._answer(str(record[prompt]), str(record[completion]))
        elif isinstance(record.get(config.text_field), str):
            document = self._plain(record[config.text_field])
        else:
            wanted = f"{config.messages_field!r}, {prompt!r} and {completion!r}, or {config.text_field!r}"
            detail = f"it has {', '.join(map(repr, record)) or 'nothing'}; {wanted} is wanted (data.*_field says which)"
            raise Refused("data-field", f"{where} has no field to train on", detail)
        if len(document) and int(document.ids.max()) >= self.vocabulary:
            detail = (
                f"token {int(document.ids.max())}, but the model knows {self.vocabulary}; is it this model's tokenizer?"
            )
            raise Refused("data-vocabulary", f"{where} has tokens outside the model's vocabulary", detail)
        return document

    def _plain(self, text: str) -> Document:
        ids, _ = self.tokenizer.encode(text, special=True)
        return _document(self._ended(ids), None)

    def _answer(self, prompt: str, completion: str) -> Document:
        asked, _ = self.tokenizer.encode(prompt, special=True)
        if asked and asked[-1] == self.tokenizer.end:
            asked.pop()
        answered, _ = self.tokenizer.encode(completion, special=False)
        ids = self._ended(asked + answered)
        everything = self.config.train_on == "everything"
        return _document(ids, None if everything else [i >= len(asked) for i in range(len(ids))])

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.end
        return ids if end is None or (ids and ids[-1] == end) else [*ids, end]

    def _conversation(self, messages: Any, where: str) -> Document:
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            detail = 'a list of {"role": ..., "content": ...} is wanted'
            raise Refused("data-conversation", f"{where}: {self.config.messages_field!r} is no conversation", detail)
        text = self.tokenizer.render(messages, ask=False)
        ids, places = self.tokenizer.encode(text, special=False)
        if self.config.train_on == "everything":
            return _document(ids, None)
        spans = [self._span(messages, i, text, where) for i, m in enumerate(messages) if m["role"] in ASSISTANTS]
        return _document(ids, [any(begin <= p < end for begin, end in spans) for p in places])

    def _span(self, messages: list[Any], index: int, text: str, where: str) -> tuple[int, int]:
        """Characters of one assistant turn: what the template adds to the conversation before it."""
        before = self.tokenizer.render(messages[:index], ask=True)
        after = self.tokenizer.render(messages[: index + 1], ask=False)
        if not (text.startswith(before) and text.startswith(after)):
            detail = (
                "the chat template writes earlier turns differently once later ones follow, so the answers cannot be "
                "told apart; set data.train_on: everything, or give data.chat_template a plainer template"
            )
            raise Refused("template-not-stable", f"{where}: answers cannot be found in the rendered text", detail)
        return len(before), len(after)


def open_tokenizer(config: DataConfig, definition: Path, end: int | None) -> Tokenizer:
    """The tokenizer that a config asks for.

    Args:
        config: says which.
        definition: folder of the model's definition.
        end: the model's end token, for one token a byte.
    """
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text()
        except OSError as error:
            advice = error.strerror or str(error)
            raise Refused(
                "template-missing", f"cannot read data.chat_template {config.chat_template}", advice
            ) from None
    return ByteTokenizer(end, template) if config.tokenizer == "bytes" else ModelTokenizer(definition, template)


def _document(ids: list[int], trained: list[bool] | None) -> Document:
    flags = np.ones(len(ids), dtype=np.bool_) if trained is None else np.array(trained, dtype=np.bool_)
    return Document(ids=np.array(ids, dtype=np.int64), trained=flags)


def _compile(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
