# SPDX-License-Identifier: Apache-2.0
"""A tiny target with a chat template, and conversations of random tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tiny

from vllm_targetrows.drafters.conversations import Conversation, ConversationFolder, DataSettings


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of eight layers and 24 tokens.  A user's turn stands between ``a`` and ``bc``."""
    target, _ = tiny.make_tiny_pair(tmp_path_factory.mktemp("tiny"))
    config = target / "tokenizer_config.json"
    template = "{% for m in messages %}a{{ m['content'] }}b{% endfor %}{% if add_generation_prompt %}c{% endif %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return target


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A folder of 120 conversations."""
    folder = tmp_path_factory.mktemp("data") / "conversations"
    chance = random.Random(0)
    found = ConversationFolder(folder, DataSettings(str(tiny_target)))
    for number in range(120):
        prompt, answer = ([chance.randrange(2, 24) for _ in range(chance.randint(1, 12))] for _ in range(2))
        found.add(Conversation(number, 1.0, prompt, answer))
    found.flush()
    return folder
