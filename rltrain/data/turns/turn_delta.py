"""Tokens that the chat template writes between two turns of the policy.

Trajectories are append-only, so sampled tokens are never rendered again. After each turn, the template renders a stub
(a user message and a turn with a sentinel) followed by the new messages. The context is the text after the stop token
that follows the sentinel. So the result does not depend on how the template would render the policy's turn, and no
table of families is needed. `TurnDelta.problem` checks this for a template.

Texts of tools and users may contain the text of a special token, which must not end a turn or open a role. The template
sees a placeholder instead. In the tokenized text, another special token replaces it, whose id is then replaced by the
ids of the plain characters.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rltrain.agents.chat import without_log_fields
from rltrain.agents.content import texts_in, with_texts
from rltrain.common.errors import DataError
from rltrain.data.chat import ChatEncoder, Message
from rltrain.data.turns.calls import Call, CallFormat

ASK: Message = {"role": "user", "content": "What is 3 + 4?"}
_SENTINEL = "qzSENTINELzq"
# Variants of the stub, of which the first that works is used. Arguments are a dict or text. There is one call if the
# template supports only one per turn. The sentinel is in the content if the template drops calls.
_STUBS = (("dict", "all"), ("text", "all"), ("dict", "first"), ("text", "first"), ("dict", "dropped"), ("none", "none"))


@dataclass(frozen=True)
class _Context:
    text: str
    end: str
    """Token that precedes the context."""
    stops: bool
    """True if that token ends turns. If it does not, the template ends past turns differently than the policy."""


class TurnDelta:
    """Builder of the tokens that the chat template writes between two turns of the policy."""

    def __init__(self, encoder: ChatEncoder, schemas: Sequence[dict[str, Any]], call_format: CallFormat) -> None:
        self._encoder = encoder
        self._schemas = list(schemas)
        tokenizer = encoder.tokenizer
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._added = added
        stops = {*encoder.eos_token_ids, *(added[text] for text in call_format.stop_tokens if text in added)}
        self.stop_token_ids = sorted(stops)
        self._stop = _any_of(tokenizer.convert_ids_to_tokens(self.stop_token_ids))
        # Added tokens that are not special may also open a role, if the template writes them.
        template = str(tokenizer.chat_template)
        self._ids = {
            text: number
            for text, number in added.items()
            if tokenizer.added_tokens_decoder[number].special or (text.strip() and text in template)
        }
        self._mark = _any_of(self._ids)
        special = [text for text in self._ids if tokenizer.added_tokens_decoder[self._ids[text]].special]
        self._special = _any_of(special)
        whole = [text for text in special if not _takes_space(tokenizer.added_tokens_decoder[self._ids[text]])]
        self._barrier = next(iter([*whole, *special, *self._ids]), "")
        self._stub: dict[bool, int] = {}
        self.notes: list[str] = []
        """Harmless differences inside turns of the policy, set by `problem`."""

    def context(self, end_token: int | None, calls: Sequence[Call], messages: Sequence[Message]) -> list[int]:
        """Return the token ids between a turn and the next turn.

        end_token: the token that ended the turn, or None if it ended otherwise. messages: all new messages of tools and
        users, in order. Images (`content.without_files`) become the template's placeholder. Raises DataError if the
        template rejects the messages.
        """
        hidden, texts = self._hide_special(without_log_fields(messages))
        context = self._render(calls, hidden)
        ids = self._tokens(context, texts)
        end = self._added.get(context.end)
        if end is None or end_token == end or (end_token is not None and not context.stops):
            return ids
        return [end, *ids]

    def _hide_special(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Replace texts of special tokens in messages by placeholders. Returns messages, and texts by placeholder."""
        if not all(isinstance(message.get("content"), str | list) for message in messages):
            raise DataError(
                "a tool or user message between two turns must be a text, or a list of text and image parts."
            )
        contents = [text for message in messages for text in texts_in(message["content"])]
        joined = "\n".join([*contents, *(str(message.get("name")) for message in messages)])
        if not self._ids or not self._mark.search(joined):
            return list(messages), {}
        # Characters of Unicode's private use area, which texts and templates do not contain.
        border = next(chr(number) for number in range(0xE000, 0xF900) if chr(number) not in joined)
        texts: dict[str, str] = {}

        def hide(match: re.Match[str]) -> str:
            placeholder = f"{border}{len(texts)}{border}"
            texts[placeholder] = match.group()
            return placeholder

        names = [{"name": self._strip_special(message["name"])} if message.get("name") else {} for message in messages]
        hidden = [
            message | {"content": with_texts(message["content"], lambda text: self._mark.sub(hide, text))} | name
            for message, name in zip(messages, names, strict=True)
        ]
        return hidden, texts

    def _render(self, calls: Sequence[Call], messages: Sequence[Message]) -> _Context:
        """Return the context, from a render of the stub and the messages."""
        calls = self._calls_for_results(calls, messages)
        ids = [self._strip_special(call.id) or f"call{number:05d}" for number, call in enumerate(calls)]
        results = _with_ids(messages, ids)
        sentinel = _SENTINEL
        while any(sentinel in str(message.get("content")) for message in messages):
            sentinel += "q"
        problem = "it leaves out the policy's turn"
        known = self._stub.get(bool(calls))
        for number in range(len(_STUBS)) if known is None else [known, *range(len(_STUBS))]:
            turn = _turn(calls, ids, sentinel, number)
            if turn is None:
                continue
            try:
                text = self._encoder.render([ASK, turn, *results], tools=self._schemas)
            except DataError as error:
                problem = str(error)
                continue
            if context := self._context_after(text, sentinel):
                if len(calls) < 2:
                    self._stub[bool(calls)] = number
                return context
        raise DataError(f"the chat template cannot continue after a turn of the assistant: {problem}")

    def _calls_for_results(self, calls: Sequence[Call], messages: Sequence[Message]) -> list[Call]:
        """Return the calls, and one more per result without a call, because templates need a call before a result."""
        results = [message for message in messages if message["role"] == "tool"]
        names = [str(result.get("name") or self._tool_name()) for result in results[len(calls) :]]
        calls = [*calls, *(Call(name, {}) for name in names)]
        return [replace(call, name=self._strip_special(call.name) or self._tool_name()) for call in calls]

    def _strip_special(self, name: str) -> str:
        """Remove the texts of special tokens from a name that the policy wrote."""
        return self._mark.sub("", name)

    def _tool_name(self) -> str:
        names = [schema.get("function", schema).get("name") for schema in self._schemas]
        return str(next(iter(names), None) or "tool")

    def _context_after(self, text: str, sentinel: str) -> _Context | None:
        """Return the text after the turn that contains the sentinel, or None if the turn has no end."""
        place = text.rfind(sentinel)
        if place < 0:
            return None
        stop = self._stop.search(text, place)
        match = stop or (self._special.search(text, place) if self._ids else None)
        return _Context(text[match.end() :], match.group(), stop is not None) if match else None

    def _tokens(self, context: _Context, texts: dict[str, str]) -> list[int]:
        """Tokenize a context, whose text has placeholders for ``texts``."""
        text = context.text
        delimiters: list[str] = []
        if texts:
            pieces = re.split(f"({_any_of([*texts, self._barrier]).pattern})", text)
            delimiters = pieces[1::2]
            if missing := texts.keys() - set(delimiters):
                raise DataError(f"the chat template changes {texts[min(missing)]!r} of a message.")
            text = "".join(self._barrier if piece in texts else piece for piece in pieces)
        # The text is tokenized together with the token that ends the turn, as in the trajectory, because some
        # tokenizers treat the start of a text differently.
        ids = self._plain_ids(context.end + text)
        end = self._added.get(context.end)
        ids = ids[ids.index(end) + 1 :] if end in ids[:2] else ids
        if not texts:
            return ids
        barrier = self._added[self._barrier]
        if ids.count(barrier) != len(delimiters):
            raise DataError(f"the tokenizer merges {self._barrier} with its neighbours.")
        remaining = iter(delimiters)
        plain_ids = {placeholder: self._plain_ids_of_special(mark) for placeholder, mark in texts.items()}
        # A barrier token that the template writes is kept.
        return [
            plain
            for token in ids
            for plain in (plain_ids.get(next(remaining), [token]) if token == barrier else [token])
        ]

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._encoder.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _plain_ids_of_special(self, mark: str) -> list[int]:
        """Return token ids of a special token's text, without special tokens."""
        ids = self._plain_ids(mark[:1]) + self._plain_ids(mark[1:])
        if set(ids) & set(self._ids.values()):
            ids = [token for character in mark for token in self._plain_ids(character)]
        return ids

    def problem(self, roles: Sequence[str] = ("tool", "user"), *, images: bool = False) -> str:
        """Return the reason why the template cannot be continued token by token, with both texts around the difference,
        or "". This is checked with messages of these roles: after one and two results, after a user message, and twice
        in a row. The trajectory must equal the template's render of the whole conversation. images: check only messages
        with an image, for which the template must write one placeholder.
        """
        self.notes = []
        for name, exchanges in self._trials_with_image(roles) if images else self._trials(roles):
            try:
                if difference := self._difference(exchanges):
                    return f"after {name}, {difference}"
            except DataError as error:
                if name != "two results":
                    return f"after {name}: {error}"
                self.notes.append("the chat template supports one call per turn; further calls are not checked.")
        if self._drops_reasoning():
            self.notes.append("the chat template drops reasoning of earlier turns; a trajectory keeps it.")
        return ""

    def _trials(self, roles: Sequence[str]) -> Iterator[tuple[str, list[tuple[list[Call], list[Message]]]]]:
        tool = self._tool_name()
        call, other = Call(tool, {"text": "one"}), Call(tool, {"text": "two"})
        result = {"role": "tool", "name": tool, "content": "The result is 42."}
        second = {"role": "tool", "name": tool, "content": "It is\n7 > 3"}
        ask = {"role": "user", "content": "Check it once more."}
        if "tool" in roles and self._schemas:
            yield "a result", [([call], [result])]
            yield "two results", [([call, other], [result, second])]
            yield "results twice in a row", [([call], [result]), ([other], [second])]
        if "user" in roles:
            yield "a user's message", [([], [ask])]
            yield "users' messages twice in a row", [([], [ask]), ([], [ask])]
        if "tool" in roles and "user" in roles and self._schemas:
            yield "a result and a user's message", [([call], [result]), ([], [ask]), ([other], [second])]

    def _trials_with_image(self, roles: Sequence[str]) -> Iterator[tuple[str, list[tuple[list[Call], list[Message]]]]]:
        parts = [{"type": "image"}, {"type": "text", "text": "It is red."}]
        for role in roles:
            name, calls = ({"name": self._tool_name()}, [Call(self._tool_name(), {})]) if role == "tool" else ({}, [])
            messages: list[Message] = [{"role": role, "content": parts, **name}]
            trial = f"an image in a message of role {role}"
            number = self.context(None, calls, messages).count(self._encoder.processor.image_token_id)
            if number != 1:
                raise DataError(f"for {trial} it writes {number} placeholders; it must be 1.")
            yield trial, [(calls, messages), (calls, messages)]

    def _difference(self, exchanges: Sequence[tuple[list[Call], list[Message]]]) -> str:
        """Return the difference between a trajectory and the render of the whole conversation, or ""."""
        history = [ASK]
        opening = self._encoder.render(history, answered=True, tools=self._schemas)
        borders: list[tuple[str, _Context]] = []
        for number, (calls, messages) in enumerate(exchanges):
            sentinel = f"{_SENTINEL}{number}q"
            context = self._render(calls, messages)
            ids = [f"call{place:05d}" for place in range(len(calls))]
            stub = self._stub.get(bool(calls), 0)
            turn = _turn(calls, ids, sentinel, stub)
            history = [*history, *([turn] if turn else []), *_with_ids(messages, ids)]
            whole = self._encoder.render(history, tools=self._schemas)
            if not whole.startswith(opening):
                return _describe_difference(opening, whole[: len(opening) + 60])
            place = len(opening)
            for earlier, past in borders:
                rest = _text_after_turn(whole, earlier, past.end, place)
                if not rest.startswith(past.text):
                    return _describe_difference(past.text, rest[: len(past.text) + 60])
                place = len(whole) - len(rest) + len(past.text)
            rest = _text_after_turn(whole, sentinel, context.end, place)
            if rest != context.text:
                return _describe_difference(context.text, rest)
            if difference := self._token_difference(history, whole, context):
                return difference
            # Only the text before the opening of the next turn must stay the same, because the template may write that
            # opening differently once the next turn is part of the conversation.
            bare = self._encoder.render(history, answered=True, tools=self._schemas)
            length = shared(whole, bare) - (len(whole) - len(rest))
            borders.append((sentinel, replace(context, text=context.text[: max(0, length)])))
        return ""

    def _token_difference(self, history: Sequence[Message], whole: str, context: _Context) -> str:
        ids = self._tokens(context, {})
        # A history with images is not encoded as a whole, because the encoder requires the file of every image.
        has_images = any(not isinstance(message["content"], str) for message in history)
        expected = self._plain_ids(whole) if has_images else self._encoder.encode(history, tools=self._schemas)
        actual = self._plain_ids(whole[: len(whole) - len(context.text)]) + ids
        if actual == expected:
            return ""
        place = shared(actual, expected)
        texts = self._encoder.decode_batch([actual[place : place + 20], expected[place : place + 20]], special=True)
        return (
            f"the tokens differ: the trajectory has {actual[place : place + 5]} ({texts[0]!r}), the whole conversation "
            f"{expected[place : place + 5]} ({texts[1]!r})."
        )

    def _drops_reasoning(self) -> bool:
        thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _SENTINEL)
        turn: Message = {"role": "assistant", "content": "7", **thought}
        try:
            current = self._encoder.render([ASK, turn], answered=True, tools=self._schemas)
            later = self._encoder.render([ASK, turn, ASK], tools=self._schemas)
        except DataError:
            return False
        return _SENTINEL in current and _SENTINEL not in later


def _text_after_turn(whole: str, sentinel: str, end: str, start: int) -> str:
    """Return the text after the turn with a sentinel. Raises DataError if it is before ``start``."""
    place = whole.rfind(sentinel)
    place = whole.find(end, place) if place >= 0 else -1
    if place < start:
        raise DataError("the chat template omits a turn of the policy.")
    return whole[place + len(end) :]


def _any_of(texts: Any) -> re.Pattern[str]:
    """Return a pattern for any of the texts, the longest first. It matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _takes_space(token: Any) -> bool:
    return bool(token.lstrip or token.rstrip or token.single_word)


def _turn(calls: Sequence[Call], ids: Sequence[str], sentinel: str, stub: int) -> Message | None:
    """Return a turn with the sentinel, in a variant of `_STUBS`, or None if the variant does not apply."""
    arguments, which = _STUBS[stub]
    if not calls or which == "none":
        return {"role": "assistant", "content": sentinel} if not calls or which == "none" else None
    if which == "first" and len(calls) < 2:
        return None
    value: Any = {"text": sentinel} if arguments == "dict" else f'{{"text": "{sentinel}"}}'
    functions = [
        {"id": identity, "type": "function", "function": {"name": call.name, "arguments": value}}
        for call, identity in zip(calls, ids, strict=True)
    ]
    content = sentinel if which == "dropped" else ""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": functions[:1] if which == "first" else functions,
    }


def _with_ids(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    """Add the ids of the calls to their results."""
    remaining = iter(ids)
    return [
        message | {"tool_call_id": message.get("tool_call_id") or next(remaining, "call00000")}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or lists."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _describe_difference(trajectory: str, whole: str) -> str:
    """Describe two texts that should be equal."""
    place = shared(trajectory, whole)
    start = max(0, place - 40)
    return (
        f"the trajectory continues with {trajectory[start : place + 40]!r}, and the chat template writes "
        f"{whole[start : place + 40]!r} for the whole conversation."
    )
