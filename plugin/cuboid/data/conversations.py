"""The tokens of a conversation, as the tokenizer's chat template writes it, and which of them are the assistant's."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from cuboid.data.rows import Conversation
from cuboid.errors import CuboidError

#: Marks the assistant's part in a template, as transformers knows it.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_conversation(conversation: Conversation, tokenizer: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray]:
    """The ids of a whole conversation, and a mask of those that the assistant wrote, both ``[tokens]``.

    They are those that the template marks with ``{% generation %}``. Of a template without marks, they are what each
    message of the assistant's adds to the conversation before it, the turn's end included.

    Raises:
        CuboidError: the tokenizer has no chat template, the template refuses the conversation, or it changes earlier
            messages when one is added, so that it can't be seen whose a token is.
    """
    if not tokenizer.is_fast:
        raise CuboidError(
            f"--data: {conversation.place} is a conversation, and {type(tokenizer).__name__} can't say where in the "
            "text a token is; use the model's fast tokenizer"
        )
    try:
        template = tokenizer.get_chat_template(tools=conversation.tools)
    except ValueError:
        raise CuboidError(
            f"--data: {conversation.place} is a conversation, and the tokenizer has no chat template; save it with "
            "one (tokenizer.chat_template), or give rows of text"
        ) from None
    try:
        if _GENERATION.search(template):
            encoded = tokenizer.apply_chat_template(
                conversation.messages, conversation.tools, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = np.asarray(encoded["input_ids"]), np.asarray(encoded["assistant_masks"])
        else:
            ids, mask = _by_turns(conversation, tokenizer)
    except (TemplateError, TypeError, KeyError) as error:
        raise CuboidError(f"--data: {conversation.place}: the chat template refuses it: {error}") from error
    return ids.astype(np.int32), mask.astype(bool)


def _by_turns(conversation: Conversation, tokenizer: Any) -> tuple[npt.NDArray, npt.NDArray]:
    def written(count: int, **options: Any) -> str:
        messages = conversation.messages[:count]
        return str(tokenizer.apply_chat_template(messages, conversation.tools, tokenize=False, **options))

    text = written(len(conversation.messages))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, stops = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=bool)
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        # What the model will be given to answer, and the same with the answer.
        before, after = written(number, add_generation_prompt=True) if number else "", written(number + 1)
        if not (text.startswith(after) and after.startswith(before)):
            raise CuboidError(
                f"--data: {conversation.place}: the chat template writes the messages before number {number + 1} "
                "otherwise when it follows, so that the assistant's tokens can't be told from the others; mark them "
                "in the template with {% generation %} and {% endgeneration %}"
            )
        mask |= (starts >= len(before)) & (stops <= len(after)) & (stops > starts)
    return np.asarray(encoded["input_ids"]), mask
