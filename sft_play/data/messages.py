"""The messages of a conversation: roles and order, and which messages are refused. Pure.

Texts are refused if nothing can be learned from them (blank questions and answers) or if no
tokenizer accepts them (half a surrogate pair). All others are unchanged.

An answer that a flag excludes from loss stays in the conversation, as context of later answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sft_play.data.row_formats import (
    JSON_START,
    ROW_FORMATS,
    RowFormat,
    is_turn,
    parse_message_list,
    parse_nested,
)
from sft_play.data.rows import (
    FORMS,
    InvalidRowError,
    Json,
    Message,
    Messages,
    Segment,
    check_encodable,
    is_given,
    parse_optional_text,
    parse_text,
    shorten,
)
from sft_play.data.turns import ROLES, THOUGHT_END, add_images, goes_on, join_answers, parse_turn

# Flag: the value that includes an answer in the loss; a weight may be any number from 0 up
LOSS_FLAGS = FORMS["flags"]
PARTS_OF_ANSWERS = ("train_detail", "training_detail")  # Axolotl's, by characters
MAX_WEIGHT = 1_000_000  # times the usual loss of a token; float32 sums are exact enough
FLAG_KEYS = frozenset((*LOSS_FLAGS, *PARTS_OF_ANSWERS))


def parse_weight(value: Any, name: str) -> float:
    """Return a weight in the loss; 1 for null. Raises InvalidRowError, which calls it `name`."""
    if value is None:
        return 1.0
    if isinstance(value, int | float) and 0 <= value <= MAX_WEIGHT:  # excludes NaN
        return float(value)  # True is 1
    raise InvalidRowError(
        f"{name} is {shorten(value)}; a weight is a number from 0 to {MAX_WEIGHT:,}, usually 1"
    )


def parse_segments(value: Any, name: str) -> tuple[Segment, ...]:
    """Return Axolotl's [{"label": true or false, "text": "..."}]. Raises InvalidRowError."""
    segments = []
    for number, record in enumerate(parse_message_list(value, name)):
        text = record.get("text")
        label = record.get("label")
        if not isinstance(text, str) or label not in (0, 1):
            raise InvalidRowError(
                f"{name}[{number}] is {shorten(record)}; "
                'a segment is {"label": true or false, "text": "..."}'
            )
        check_encodable(text, f"{name}[{number}].text")
        weight = parse_weight(record.get("weight"), f"{name}[{number}].weight")
        segments.append(Segment(text, label == 1 and weight > 0, weight))
    return tuple(segments)


def parse_conversation(lists: Mapping[str, Any], turn_keys: set[str]) -> Messages:
    """Return the messages of consecutive lists, given by the names of their columns.

    Keys of turns with more than a text are added to `turn_keys`. Raises InvalidRowError, which
    names the message.
    """
    answers: list[list[Message]] = []  # of one message each, except for answers in parts
    names: list[str] = []
    before: Json = {}  # the previous record
    has_calls_in_text = False  # ShareGPT's, which cannot be recognized
    for name, value in lists.items():
        for number, record in enumerate(parse_message_list(value, name)):
            where = f"{name}[{number}]"
            try:
                parsed = parse_turn(record)
                if len(record) > 2:
                    if is_given(record.get("images")):  # Ollama's
                        parsed = add_images(parsed, record["images"])
                    if not FLAG_KEYS.isdisjoint(record):
                        parsed = [apply_flags(message, record) for message in parsed]
                if len(record) > 2 or parsed[-1].tool_calls or parsed[-1].images:
                    turn_keys.update(record)
            except InvalidRowError as error:
                raise InvalidRowError(f"{where}{error}") from None
            has_calls_in_text = has_calls_in_text or "from" in record
            for message in parsed:
                last = answers[-1][-1] if answers else None
                if (
                    last is not None
                    and last.role == message.role == "assistant"
                    and goes_on(record, before)
                    and (last.is_trained, last.weight) == (message.is_trained, message.weight)
                ):
                    answers[-1].append(message)
                else:
                    answers.append([message])
                    names.append(where)
            before = record
    messages = [parts[0] if len(parts) == 1 else join_answers(parts) for parts in answers]
    _check_order(messages, names, has_calls_in_text)
    for index, message in enumerate(messages):
        if message.role == "user":
            break
        if message.role == "assistant":  # a greeting carries no loss
            messages[index] = replace(message, is_trained=False)
    return tuple(messages)


def _check_order(
    messages: Sequence[Message], names: Sequence[str], allows_calls_in_text: bool
) -> None:
    """Raise InvalidRowError unless the last message answers a question, and tools answer calls.

    The chat template checks any other order.
    """
    previous: Message | None = None
    is_asked = False
    for message, name in zip(messages, names, strict=True):
        role = previous.role if previous else ""
        calls = role == "tool" or (previous and previous.tool_calls)
        if message.role == "tool" and not (calls or (allows_calls_in_text and role == "assistant")):
            raise InvalidRowError(
                f"{name} is a tool's answer, and the turn before it calls no tool"
            )
        if message.role == "assistant":
            if not message.tool_calls and not message.content.strip():
                raise InvalidRowError(f"{name} has reasoning and no answer")
            if role == "assistant" and not is_asked:
                raise InvalidRowError(f"{name} is the second answer before the first question")
        is_asked = is_asked or message.role == "user"
        previous = message
    if previous is None or previous.role != "assistant":
        raise InvalidRowError(
            f"{names[-1]}, the last turn, is the {messages[-1].role}'s; "
            "a row ends with an answer of the assistant"
        )
    if not is_asked:
        raise InvalidRowError(f"{names[-1]} answers nothing: no turn is the user's")


def tools_of_turns(turns: Any) -> Any:
    """Return the functions in the first turn, as in OLMo 3's system message."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return (first.get("functions") or first.get("tools")) if isinstance(first, dict) else None


def parse_messages(record: Json, row_format: RowFormat) -> Messages:
    """Return the messages of a record in any format. Raises InvalidRowError."""
    kind, columns = row_format.kind, row_format.required
    if kind == "turns":
        messages = parse_conversation({columns[0]: record[columns[0]]}, row_format.turn_keys)
    elif kind == "calls":  # a question and the calls that answer it, as xLAM writes them
        query, _, answers = columns
        asked = {"role": "user", "content": record[query]}
        answer = {"role": "assistant", "tool_calls": record[answers]}
        messages = parse_conversation({answers: [asked, answer]}, row_format.turn_keys)
    else:
        messages = _parse_pair(record, row_format)
    thoughts = row_format.columns["reasoning"]
    return _add_reasoning(messages, record[thoughts], thoughts) if thoughts in record else messages


def _parse_pair(record: Json, row_format: RowFormat) -> Messages:
    """Return the messages of a question and its answer, and of the previous turns."""
    question_column, answer_column = row_format.required
    history_column = row_format.columns["history"]
    history = record.get(history_column)
    turns = _find_turns(record[question_column])
    answers = _find_turns(record[answer_column], needs_answer=turns is None)
    if turns is None and answers is None and not is_given(history):
        question = Message("user", _parse_question(record, row_format))
        return question, Message("assistant", parse_text(record[answer_column], answer_column))
    if turns is None:
        turns = [{"role": "user", "content": _parse_question(record, row_format)}]
    if answers is None:
        text = parse_text(record[answer_column], answer_column)
        answers = [{"role": "assistant", "content": text}]
    before = {history_column: history} if is_given(history) else {}
    lists = {**before, question_column: turns, answer_column: answers}
    return parse_conversation(lists, row_format.turn_keys)


def _find_turns(value: Any, needs_answer: bool = False) -> list[Json] | None:
    """Return the turns in a value, None for anything else; each may be a JSON text."""
    if isinstance(value, str) and not JSON_START.match(value):
        return None
    found = parse_nested(value)
    turns = list(map(parse_nested, found)) if isinstance(found, list) else [found]
    if not all(map(is_turn, turns)):
        return None
    speaker = turns[0].get("role", turns[0].get("from")) if turns else None
    if needs_answer and isinstance(value, str) and ROLES.get(speaker) != "assistant":
        return None  # an answer that is JSON
    return turns


def _parse_question(record: Json, row_format: RowFormat) -> str:
    column = row_format.required[0]
    question = parse_text(record[column], column)
    extra_field = ROW_FORMATS[row_format.name].extra
    if extra_field:
        extra_column = row_format.columns[extra_field]
        extra = parse_optional_text(record.get(extra_column), extra_column)
        if extra is not None:
            question = f"{question}\n\n{extra}"
    return question


def _add_reasoning(messages: Messages, value: Any, name: str) -> Messages:
    """Return messages whose last answer has the reasoning of a column."""
    if isinstance(value, list) and len(value) == 1:  # s1K
        (value,) = value
    reasoning = parse_optional_text(value, name)
    if reasoning is None:
        return messages
    *asked, answer = messages
    own = answer.reasoning or (answer.content if THOUGHT_END in answer.content else "")
    if reasoning.strip() in own:
        return messages
    if own:
        raise InvalidRowError(f"{name} next to an answer with other reasoning; keep one of them")
    return (*asked, replace(answer, reasoning=reasoning))


def apply_flags(message: Message, record: Json) -> Message:
    """Return a message with the flags of its record applied: without loss, or with another weight.

    Raises InvalidRowError, whose reason continues the name of the message. It is raised for values
    other than true and false (1 and 0; for a weight any number from 0 up), flags that contradict
    each other, and for a flag that includes a message in the loss that is not an answer.
    """
    if any(record.get(key) for key in PARTS_OF_ANSWERS):
        raise InvalidRowError(
            " asks for loss on a part of the answer, which is not done here; "
            "write such rows as segments: [{label: true or false, text: ...}]"
        )
    weight = parse_weight(record.get("weight"), ".weight")
    asked: dict[str, bool] = {}
    for name, trained_value in LOSS_FLAGS.items():
        value = record.get(name)
        if value is None:
            continue
        if name != "weight" and value not in (0, 1):  # True equals 1
            raise InvalidRowError(
                f".{name} is {shorten(value)}; an answer is trained or not: write 1 or 0"
            )
        asked[name] = weight > 0 if name == "weight" else value == trained_value
    if len(set(asked.values())) > 1:
        raise InvalidRowError(f": {' and '.join(asked)} contradict each other; keep one")
    if message.role == "assistant":
        if False in asked.values():
            return replace(message, is_trained=False)
        return replace(message, weight=weight)
    for name, is_trained in asked.items():
        if is_trained and "text" not in record:  # SWE agents write mask: false everywhere
            raise InvalidRowError(
                f".{name} asks for loss on a message of the {message.role}; "
                "only answers of the assistant carry loss"
            )
    return message
