# SPDX-License-Identifier: Apache-2.0
"""Stage *data*: the target writes both turns of conversations.

A user's turn is sampled from what the chat template puts before it, so the target invents it as it learned to (the
idea of Magpie, arXiv 2406.08464); or turns come from a file.  Each turn is answered at several temperatures.  vLLM
decodes in batches, and a finished text makes room for the next one.

A folder holds ``part-00000.parquet``, ...: a row is a conversation.  Parts appear whole or not at all, so a run that is
killed loses the conversations of its unfinished part and the next run goes on behind them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

SETTINGS = "settings.json"
ROWS_IN_PART = 250
HELD_OUT = 50
"""Every so many conversations, by number, one is held out of training."""
TURN_MARK = "<<<turn>>>"
GRAM = 4
LEAST_NEW_GRAMS = 0.35
"""A turn of whose runs of ``GRAM`` tokens a smaller share is distinct repeats itself and is dropped."""
LOOP = 24
"""An answer is cut where a run of so many tokens comes for the second time."""

OPENINGS = (
    "Translate the following German sentence into English:",
    "Translate German to English:",
    "Translate this into French:",
    "How do you say in Spanish:",
    "Summarize the following article:",
    "Summarize:",
    "Give me the key points of this news story:",
    "Write a headline and a short summary for the text below.\n\n",
    "Answer the question based on the context below.\n\nContext:",
    "Here are some passages from an encyclopedia.\n\n[1]",
    "Using the documents provided, answer the question. Document 1:",
    "Question:",
    "Who",
    "When did",
    "Where is",
    "What is the name of",
    "A train",
    "Solve the following math problem step by step.",
    "A shop sells",
    "If",
    "Find the value of",
    "Write a Python function that",
    "Complete the following code:\n\ndef",
    "from typing import List\n\n\ndef",
    "Write a program in",
    "Explain the difference between",
    "Write an email to",
    "Write a short story about",
    "Pretend you are",
    "Rewrite the following paragraph:",
    "Extract the names and dates from this text:",
    "Compare",
    "Give me a list of",
)
"""First words of users' turns.  Left to itself the target invents the turns that are most common in its training; the
kinds of work that people measure (translation, summaries, questions on a text, sums, code) are rare among them."""


@dataclass(frozen=True)
class DataSettings:
    """What the conversations depend on.  A folder is continued with the same ones only."""

    target: str
    """Folder or name of the target; of a folder only its name is kept."""
    dtype: str = "bfloat16"
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Of the answers: every turn is answered at each."""
    openings: tuple[str, ...] = OPENINGS
    """Every second turn begins with one of these, in turn; empty: none does."""
    max_turn: int = 192
    """Most tokens of a user's turn; longer ones are dropped."""
    max_answer: int = 320
    """Tokens after which an answer is cut."""
    seed: int = 0
    turns: str | None = None
    """JSON lines with the users' turns (``prompt``, or the first of ``turns``); ``None``: the target writes them."""


@dataclass(frozen=True)
class Template:
    """What a chat template puts around a user's turn, in tokens."""

    opening: list[int]
    closing: list[int]
    """The end of the turn and the opening of the answer; its first token ends a turn."""

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """The template of a tokenizer.

        Raises:
            ValueError: it has none, or the template changes the turn's text.
        """
        chat = [{"role": "user", "content": TURN_MARK}]
        text: str = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        opening, mark, closing = text.partition(TURN_MARK)
        if not mark or TURN_MARK in closing:
            raise ValueError("the target's chat template must show a user's turn once, as it is")
        parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (opening, closing)]
        if not all(parts):
            raise ValueError("the target's chat template must put tokens before and behind a user's turn")
        return cls(*parts)


@dataclass(frozen=True)
class Conversation:
    """A user's turn and one answer."""

    number: int
    """Of the turn: its answers share it."""
    temperature: float
    prompt: list[int]
    """All that stands before the answer, the template's tokens included."""
    answer: list[int]

    @property
    def held_out(self) -> bool:
        """Whether it is kept for evaluation."""
        return self.number % HELD_OUT == 0


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether too few of the text's runs of ``GRAM`` tokens are distinct."""
    runs = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return bool(runs) and len(set(runs)) < LEAST_NEW_GRAMS * len(runs)


def is_a_turn(tokens: Sequence[int], complete: bool) -> bool:
    """Whether sampled tokens can be a user's turn: complete, not tiny, not repetitive."""
    return complete and len(tokens) >= GRAM and not repeats_itself(tokens)


def without_loop(tokens: Sequence[int]) -> list[int]:
    """An answer up to the end of the first run of ``LOOP`` tokens that it had before: small models end up in loops."""
    seen: set[tuple[int, ...]] = set()
    for end in range(LOOP, len(tokens) + 1):
        run = tuple(tokens[end - LOOP : end])
        if run in seen:
            return list(tokens[:end])
        seen.add(run)
    return list(tokens)


class ConversationFolder:
    """Conversations on disk.

    Args:
        folder: made if it does not exist.
        settings: kept beside the conversations.

    Raises:
        ValueError: the folder was begun with other settings.
    """

    def __init__(self, folder: Path, settings: DataSettings) -> None:
        self.folder = folder
        self.conversations = self.answer_tokens = self.next_number = 0
        self._waiting: list[Conversation] = []
        folder.mkdir(parents=True, exist_ok=True)
        known, now = folder / SETTINGS, json.loads(json.dumps(asdict(settings)))
        now["target"] = Path(settings.target).name
        if known.exists() and (before := json.loads(known.read_text())) != now:
            other = ", ".join(f"{k}={before.get(k)!r}" for k in now if before.get(k) != now[k])
            raise ValueError(f"{folder} was begun with other settings ({other}): continue with those, or elsewhere")
        if not known.exists():
            _replace(known, lambda path: path.write_text(json.dumps(now, indent=1) + "\n"))
        for each in read(folder):
            self._count(each)

    def add(self, conversation: Conversation) -> None:
        """Add a conversation; every ``ROWS_IN_PART`` of them are written."""
        self._waiting.append(conversation)
        self._count(conversation)
        if len(self._waiting) >= ROWS_IN_PART:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        import pyarrow.parquet as pq

        if self._waiting:
            part = self.folder / f"part-{len(parts(self.folder)):05d}.parquet"
            table = _table(self._waiting)
            _replace(part, lambda path: pq.write_table(table, path, compression="zstd", compression_level=19))
            self._waiting = []

    def _count(self, conversation: Conversation) -> None:
        self.conversations += 1
        self.answer_tokens += len(conversation.answer)
        self.next_number = max(self.next_number, conversation.number + 1)


def parts(folder: Path) -> list[Path]:
    """The folder's files of conversations, in order."""
    return sorted(folder.glob("part-*.parquet"))


def read(folder: Path, held_out: bool | None = None) -> Iterator[Conversation]:
    """The folder's conversations; only those held out, or only the others, if asked."""
    import pyarrow.parquet as pq

    for part in parts(folder):
        for row in pq.read_table(part).to_pylist():
            each = Conversation(**row)
            if held_out is None or each.held_out == held_out:
                yield each


def turns_of(path: Path) -> Iterator[str]:
    """The users' turns of a file of JSON lines.

    Raises:
        ValueError: a line has neither ``prompt`` nor ``turns``.
    """
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row: Mapping[str, Any] = json.loads(line)
        if isinstance(row.get("prompt"), str):
            yield row["prompt"]
        elif row.get("turns"):
            yield row["turns"][0]
        else:
            raise ValueError(f"{path}, line {number}: neither 'prompt' nor 'turns'")


def write(
    folder: Path, settings: DataSettings, answer_tokens: int, concurrency: int, eager: bool = False
) -> ConversationFolder:
    """Let the target write conversations until the folder has ``answer_tokens`` tokens of answers.

    With turns from a file it ends when each has been answered.
    """
    from tqdm import tqdm

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = ConversationFolder(folder, settings)
    if found.answer_tokens >= answer_tokens:
        return found
    with tqdm(total=answer_tokens, initial=found.answer_tokens, unit="token", unit_scale=True, mininterval=1) as bar:
        for conversation in _written(settings, concurrency, found.next_number, eager):
            found.add(conversation)
            bar.update(len(conversation.answer))
            bar.set_postfix(conversations=found.conversations, refresh=False)
            if found.answer_tokens >= answer_tokens:
                break
    found.flush()
    return found


def _written(settings: DataSettings, concurrency: int, first: int, eager: bool) -> Iterator[Conversation]:
    """Conversations from number ``first`` on, as they are finished."""
    from vllm import LLM, SamplingParams

    longest = settings.max_turn + settings.max_answer + 256  # the template, generously
    llm = LLM(
        settings.target,
        dtype=settings.dtype,
        max_model_len=longest,
        max_num_seqs=concurrency,
        enforce_eager=eager,
        block_size=32,  # the CPU's 128 would keep short prompts out of the prefix cache
        seed=settings.seed,
    )
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    template = Template.of(tokenizer)
    openings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in settings.openings]
    given = None
    if settings.turns is not None:
        given = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in turns_of(Path(settings.turns))]
    number, running = first, 0

    def ask(name: str, tokens: list[int], temperature: float, most: int, seed: int) -> None:
        nonlocal running
        wish = SamplingParams(
            temperature=temperature, max_tokens=most, stop_token_ids=template.closing[:1], seed=seed, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": tokens}, wish)
        running += 1

    def given_words(number: int) -> list[int]:
        which, second = divmod(number, 2)
        return openings[which % len(openings)] if second and openings else []

    def answer(number: int, turn: list[int]) -> None:
        prompts[number] = [*template.opening, *turn, *template.closing]
        for which, temperature in enumerate(settings.temperatures):
            seed = _seed(settings, number, 1 + which)
            ask(f"answer/{number}/{which}", prompts[number], temperature, settings.max_answer, seed)

    prompts: dict[int, list[int]] = {}
    while True:
        while running < concurrency and (given is None or number < len(given)):
            if given is None:
                first_words = given_words(number)
                prompt = template.opening + first_words
                ask(f"turn/{number}", prompt, 1.0, settings.max_turn - len(first_words), _seed(settings, number, 0))
            elif len(given[number]) <= settings.max_turn:
                answer(number, given[number])
            number += 1
        if not running:
            return
        for output in engine.step():
            if not output.finished:
                continue
            running -= 1
            kind, of, *which = output.request_id.split("/")
            made, complete = list(output.outputs[0].token_ids), output.outputs[0].finish_reason == "stop"
            if kind == "turn":
                turn = given_words(int(of)) + made[:-1]
                if is_a_turn(turn, complete):
                    answer(int(of), turn)
            else:
                yield Conversation(int(of), settings.temperatures[int(which[0])], prompts[int(of)], without_loop(made))


def _seed(settings: DataSettings, number: int, text: int) -> int:
    """A text's own seed, so that a conversation is the same whenever it is written."""
    texts = 1 + len(settings.temperatures)
    return (settings.seed * 1_000_003 + texts * number + text) % 2**31


def _table(conversations: Sequence[Conversation]) -> pa.Table:
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    columns = {"number": pa.int64(), "temperature": pa.float64(), "prompt": tokens, "answer": tokens}
    return pa.Table.from_pylist([asdict(each) for each in conversations], schema=pa.schema(list(columns.items())))


def _replace(path: Path, write_to: Any) -> None:
    """Write a file under another name first: it is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    write_to(unfinished)
    os.replace(unfinished, path)
