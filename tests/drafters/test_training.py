# SPDX-License-Identifier: Apache-2.0
"""Training: what is learnt, from which rows, and that a killed run ends like one that was not."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from vllm_targetrows.drafters import features, training
from vllm_targetrows.drafters.conversations import Conversation, read
from vllm_targetrows.drafters.features import FeatureStore
from vllm_targetrows.drafters.head import Eagle3Head
from vllm_targetrows.drafters.learners import (
    Batch,
    Eagle3Drafter,
    LanguageModelDrafter,
    Rows,
    TrainSettings,
    by_frequency,
    token_counts,
)
from vllm_targetrows.drafters.target import Target
from vllm_targetrows.drafters.training import batches, curve, learning_rate, train


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target(str(tiny_target), dtype=torch.float32)


def rows(target: Target, settings: TrainSettings, drafted: int = 24, store: FeatureStore | None = None) -> Rows:
    return Rows(target, store, torch.arange(drafted), torch.arange(24), settings)


def full_rows(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    return target.model(tokens).logits.softmax(-1)


def test_the_features_are_the_inputs_of_three_layers(target):
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    inputs: dict[int, torch.Tensor] = {}
    layers = target.model.get_decoder().layers
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, n=n: inputs.__setitem__(n, args[0]))
        for n, layer in enumerate(layers)
    ]
    seen = target.see(tokens)
    for hook in hooks:
        hook.remove()
    assert target.feature_layers == (2, 4, 5)
    torch.testing.assert_close(seen.features, torch.cat([inputs[n] for n in (2, 4, 5)], dim=-1))
    torch.testing.assert_close((seen.last @ target.head.T).softmax(-1), full_rows(target, tokens))


def test_a_batch_marks_the_rows_of_the_answers():
    batch = Batch.of([Conversation(1, 0.0, [5, 6, 7], [8, 9]), Conversation(2, 0.0, [5], [8, 9, 10, 11, 12])], 5)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [5, 8, 9, 10, 11]]
    assert batch.answer.tolist() == [[False, False, True, True, False], [True, True, True, True, False]]


def test_a_heads_loss_is_the_mean_cross_entropy_of_its_steps(target):
    """With every token in the rows: written out from the whole rows, one base and step at a time."""
    settings = TrainSettings(unroll=3, decay=0.5, frequent=24, sampled=0)
    drafter = Eagle3Drafter(Eagle3Head.from_target(target, torch.arange(24)), rows(target, settings))
    batch = Batch.of([Conversation(1, 0.0, [5, 6, 7], [8, 9, 3]), Conversation(2, 0.0, [5], [8, 9])], 10)
    wanted = full_rows(target, batch.tokens)
    seen = target.see(batch.tokens)
    total = 0.0
    for step, hidden in enumerate(drafter.module.unroll(target.embedding[batch.tokens], seen.features, 3)):
        own = drafter.module.lm_head(hidden).log_softmax(-1)
        losses = [
            -(wanted[text, base + 1 + step] * own[text, base]).sum()
            for text in range(2)
            for base in range(own.shape[1])
            if batch.answer[text, base + 1 + step]
        ]
        total += 0.5**step * sum(losses) / len(losses)
    torch.testing.assert_close(drafter.loss(batch), total / 1.75)


def test_a_language_models_loss_is_the_mean_cross_entropy(target, tiny_target):
    drafter = LanguageModelDrafter.from_target(str(tiny_target), (0, 3, 7), rows(target, TrainSettings(frequent=24)))
    batch = Batch.of([Conversation(1, 0.0, [5, 6, 7], [8, 9, 3]), Conversation(2, 0.0, [5], [8, 9])], 10)
    own = drafter.model(batch.tokens).logits.log_softmax(-1)
    losses = -(full_rows(target, batch.tokens) * own).sum(-1)[batch.answer]
    torch.testing.assert_close(drafter.loss(batch), losses.mean())


def test_all_layers_make_the_target_again(target, tiny_target, tmp_path):
    """A standalone drafter of all layers starts as the target, and its checkpoint loads as one."""
    from transformers import AutoModelForCausalLM

    drafter = LanguageModelDrafter.from_target(str(tiny_target), range(8), rows(target, TrainSettings(frequent=24)))
    batch = Batch.of([Conversation(1, 0.0, [5, 6], [8, 9, 3])], 10)
    found = drafter.measure(batch)
    assert found["top1/0"] == (3.0, 3.0)
    assert found["overlap/0"][0] == pytest.approx(3.0)
    drafter.save(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(back.float()(batch.tokens).logits, target.model(batch.tokens).logits, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("layers", [(), (8,), (-1,)])
def test_layers_that_are_not_there_are_refused(target, tiny_target, layers):
    with pytest.raises(ValueError, match="allowed are one or more from 0 to 7"):
        LanguageModelDrafter.from_target(str(tiny_target), layers, rows(target, TrainSettings()))


def test_agreement_counts_rows(target):
    found = rows(target, TrainSettings(), drafted=20)
    last = target.see(torch.tensor([[3, 4, 5, 6, 7, 8, 9]])).last[0]
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    wanted, own = (last @ target.head.T).softmax(-1), logits.softmax(-1)
    expected = dict.fromkeys(("top1", "absent", "overlap", "mass"), 0.0)
    for p, q in zip(wanted, own, strict=True):
        ten = sorted(range(20), key=lambda v: -q[v])[:10]
        expected["top1"] += ten[0] == int(p.argmax())
        expected["absent"] += int(p.argmax()) not in ten
        expected["overlap"] += sum(min(float(p[v]), float(q[v])) for v in range(20))
        expected["mass"] += float(p[ten].sum())
    got = found.agreement(logits, last)
    assert {name: pytest.approx(part, rel=1e-5) for name, (part, _) in got.items()} == expected
    assert all(count == 7 for _, count in got.values())


def test_states_come_back_from_the_store(target, tmp_path):
    texts = [[3, 4, 5], [6, 7, 8, 9, 10], [11]]
    store = FeatureStore(tmp_path, target, texts)
    padded = torch.tensor([[6, 7, 8, 9, 10], [3, 4, 5, 0, 0]])
    live = store.see(padded, (1, 0))
    assert store.known == 2
    again = FeatureStore(tmp_path, target, texts)  # as another process finds it
    again.target = None
    kept = again.see(padded, (1, 0))
    for name in ("features", "last"):
        a, b = getattr(live, name).bfloat16(), getattr(kept, name)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1, :3], b[1, :3])
    assert FeatureStore(tmp_path, target, [[3, 4, 5], [6, 7, 8, 9, 11], [11]]).known == 0


def test_the_store_keeps_what_it_knows_when_texts_are_added(target, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "TEXTS_IN_FILE", 2)
    texts = [[3, 4, 5], [6, 7], [8, 9]]
    store = FeatureStore(tmp_path, target, texts)
    store.see(torch.tensor([[3, 4, 5], [8, 9, 0]]), (0, 2))
    assert store.known == 2
    more = FeatureStore(tmp_path, target, [*texts, [10, 11]])
    assert more.known == 1  # the file that grew is another one
    more.see(torch.tensor([[10, 11, 0], [6, 7, 0], [3, 4, 5]]), (3, 1, 0))
    assert more.known == 3


def test_every_pass_has_every_text_once_and_batches_keep_their_size(data):
    conversations, settings = list(read(data)), TrainSettings(batch_tokens=64)
    source = batches(conversations, settings)
    for _ in range(2):
        seen: list[int] = []
        while len(seen) < len(conversations):
            batch = next(source)
            longest = max(len(conversations[i].prompt + conversations[i].answer) for i in batch)
            assert longest * len(batch) <= 64 or len(batch) == 1
            seen += batch
        assert sorted(seen) == list(range(len(conversations)))
    first, second = (list(islice(batches(conversations, settings), 40)) for _ in range(2))
    assert first == second
    assert first != list(islice(batches(conversations, TrainSettings(batch_tokens=64, seed=1)), 40))


def test_frequent_tokens_come_first():
    counts = token_counts([Conversation(1, 0.0, [9, 9], [4, 4, 2]), Conversation(2, 0.0, [9], [7, 2])], 10)
    assert counts.tolist() == [0, 0, 2, 0, 2, 0, 0, 1, 0, 0]
    assert by_frequency(counts).tolist() == [2, 4, 7, 0, 1, 3, 5, 6, 8, 9]


def test_the_learning_rate_rises_and_falls():
    settings = TrainSettings(warmup=0.1)
    assert [learning_rate(share, settings) for share in (0.0, 0.05, 0.1)] == pytest.approx([0.0, 0.5, 1.0])
    falling = [learning_rate(share / 20, settings) for share in range(2, 21)]
    assert falling == sorted(falling, reverse=True) and falling[-1] == pytest.approx(0.05)


SETTINGS = {
    "eagle3": TrainSettings(tokens=4000, batch_tokens=256, draft_vocabulary=16, frequent=8, sampled=4),
    "lm": TrainSettings(kind="lm", layers=(0, 7), tokens=4000, batch_tokens=256, frequent=8, sampled=4),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_killed_run_ends_like_one_that_was_not(kind, data, tiny_target, tmp_path, monkeypatch):
    settings = SETTINGS[kind]
    train(tmp_path / "whole", data, str(tiny_target), settings)
    saves = []

    def killed(self):
        training.Run.save_whole(self)
        saves.append(self.step)
        if len(saves) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Run, "save_whole", training.Run.save, raising=False)
    monkeypatch.setattr(training.Run, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", data, str(tiny_target), settings, save_every=0)
    train(tmp_path / "killed", data, str(tiny_target), settings)
    a, b = (load_file(tmp_path / run / "drafter" / "model.safetensors") for run in ("whole", "killed"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    points = curve(tmp_path / "whole")
    assert points[0]["step"] == 0 and points[-1]["tokens"] >= settings.tokens
    assert points[-1]["overlap/0"] > points[0]["overlap/0"]
    assert (tmp_path / "whole" / "curve.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"begun with other settings \(seed=0\)"):
        train(tmp_path / "whole", data, str(tiny_target), settings.model_copy(update={"seed": 1}))


def test_a_head_reports_its_vocabulary(data, tiny_target, tmp_path, capsys):
    train(tmp_path, data, str(tiny_target), SETTINGS["eagle3"])
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["draft_vocab_size"] == 16
    answers = [token for each in read(data, held_out=False) for token in each.answer]
    known = load_file(tmp_path / "drafter" / "model.safetensors")["t2d"]
    covered = sum(bool(known[token]) for token in answers) / len(answers)
    assert f"16 tokens cover {covered:.2%} of the answers' tokens" in capsys.readouterr().out


def test_too_little_data_is_refused(tiny_target, tmp_path):
    with pytest.raises(ValueError, match="too few conversations"):
        train(tmp_path / "run", tmp_path, str(tiny_target), SETTINGS["eagle3"])
