# SPDX-License-Identifier: Apache-2.0
"""Conversations: what is kept of what the target writes, and the folder that holds them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_targetrows.drafters import conversations
from vllm_targetrows.drafters.conversations import (
    Conversation,
    ConversationFolder,
    DataSettings,
    Template,
    is_a_turn,
    parts,
    read,
    repeats_itself,
    turns_of,
    without_loop,
)

COMMAND = [sys.executable, "-P", "-m", "vllm_targetrows.drafters", "data", "--enforce-eager"]


class FakeTokenizer:
    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, chat, add_generation_prompt, tokenize):
        return self.template.format(chat[0]["content"])

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}


def test_a_template_is_what_stands_around_a_turn():
    found = Template.of(FakeTokenizer("<u>{}</u><a>"))
    assert (bytes(found.opening), bytes(found.closing)) == (b"<u>", b"</u><a>")


@pytest.mark.parametrize("template", ["no turn", "<u>{0}|{0}</u>", "<u>{}", "{}</u>"])
def test_a_template_without_two_sides_is_refused(template):
    with pytest.raises(ValueError, match="the target's chat template must"):
        Template.of(FakeTokenizer(template))


def test_turns_are_complete_not_tiny_and_not_repetitive():
    assert is_a_turn([1, 2, 3, 4], complete=True)
    assert not is_a_turn([1, 2, 3, 4], complete=False)
    assert not is_a_turn([1, 2, 3], complete=True)
    assert not is_a_turn([1, 2] * 20, complete=True)
    assert not repeats_itself([]) and not repeats_itself(list(range(40)) * 2)


def reference_without_loop(tokens, loop):
    for end in range(len(tokens) + 1):
        last = tokens[max(end - loop, 0) : end]
        if len(last) == loop and any(tokens[i : i + loop] == last for i in range(end - loop)):
            return tokens[:end]
    return tokens


@given(tokens=st.lists(st.integers(0, 2), max_size=40), loop=st.integers(1, 6))
def test_an_answer_ends_where_it_repeats_itself(tokens, loop):
    before, conversations.LOOP = conversations.LOOP, loop
    try:
        assert without_loop(tokens) == reference_without_loop(tokens, loop)
    finally:
        conversations.LOOP = before


def test_a_folder_goes_on_behind_its_last_conversation(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "ROWS_IN_PART", 3)
    settings = DataSettings("target")
    folder = ConversationFolder(tmp_path, settings)
    for number in (1, 0, 2, 7):
        folder.add(Conversation(number, 0.7, [5], [6, 7]))
    (tmp_path / ".part-00001.parquet.unfinished").write_bytes(b"half a part")  # as a killed run leaves it
    again = ConversationFolder(tmp_path, settings)
    assert (again.conversations, again.answer_tokens, again.next_number) == (3, 6, 3)
    again.add(Conversation(3, 0.0, [5], [9]))
    again.flush()
    assert [each.number for each in read(tmp_path)] == [1, 0, 2, 3]
    assert [part.name for part in parts(tmp_path)] == ["part-00000.parquet", "part-00001.parquet"]


def test_one_of_fifty_turns_is_held_out_with_all_its_answers(tmp_path):
    folder = ConversationFolder(tmp_path, DataSettings("target"))
    for number in range(101):
        for temperature in (0.0, 1.0):
            folder.add(Conversation(number, temperature, [1], [2]))
    folder.flush()
    assert [each.number for each in read(tmp_path, held_out=True)] == [0, 0, 50, 50, 100, 100]
    assert len(list(read(tmp_path, held_out=False))) == 202 - 6


def test_other_settings_are_refused(tmp_path):
    ConversationFolder(tmp_path, DataSettings("target", seed=1))
    ConversationFolder(tmp_path, DataSettings("elsewhere/target", seed=1))  # a folder's name is what counts
    with pytest.raises(ValueError, match=r"begun with other settings \(seed=1\)"):
        ConversationFolder(tmp_path, DataSettings("target", seed=2))


def test_turns_from_a_file(tmp_path):
    file = tmp_path / "turns.jsonl"
    file.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    assert list(turns_of(file)) == ["one", "two"]
    file.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(ValueError, match="line 2: neither 'prompt' nor 'turns'"):
        list(turns_of(file))


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


def test_a_killed_run_goes_on(tiny_target, tmp_path):
    """The command is killed between two parts, given again, and ends with all that was asked for."""
    folder = tmp_path / "conversations"
    command = [*COMMAND, str(folder), "--target", str(tiny_target), "--dtype", "float32", "--concurrency", "8"]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen([*command, "--tokens", "1000000"], env=environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while not parts(folder) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert parts(folder), (tmp_path / "log").read_text()[-3000:]
    written = list(read(folder))
    tokens = sum(len(each.answer) for each in written) + 100
    done = subprocess.run(
        [*command, "--tokens", str(tokens)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = list(read(folder))
    assert found[: len(written)] == written
    assert sum(len(each.answer) for each in found) >= tokens
    assert len({(each.number, each.temperature) for each in found}) == len(found)
    assert {each.temperature for each in found} == {0.0, 0.7, 1.0}
    a, b, c = 2, 3, 4
    assert all(each.prompt[0] == a and each.prompt[-2:] == [b, c] for each in found)
    # A free turn ended there; every second one begins with given words.
    assert all(b not in each.prompt[1:-2] for each in found if each.number % 2 == 0)


def test_turns_of_a_file_are_answered(tiny_target, tmp_path):
    turns = tmp_path / "turns.jsonl"
    turns.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def", "ghij")))
    folder: Path = tmp_path / "conversations"
    done = subprocess.run(
        [*COMMAND, str(folder), "--target", str(tiny_target), "--dtype", "float32", "--turns", str(turns)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = sorted(read(folder), key=lambda each: (each.number, each.temperature))
    assert [(each.number, each.temperature) for each in found] == [(n, t) for n in (0, 1) for t in (0.0, 0.7, 1.0)]
    assert [found[0].prompt, found[3].prompt] == [[2, 5, 6, 7, 3, 4], [2, 8, 9, 10, 11, 3, 4]]
