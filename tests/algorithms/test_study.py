# SPDX-License-Identifier: Apache-2.0
"""The study on synthetic recordings: every quantity against a slow, obvious reference."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_targetrows.coverage import coverage, exit_prefix_law, expected_accepted, frontier, tree_prefixes
from vllm_targetrows.recording import RecordedRound, Recorder, read
from vllm_targetrows.reranker import FEATURES, Reranker, features, load
from vllm_targetrows.selection import oracle, select
from vllm_targetrows.study import reranking
from vllm_targetrows.study.__main__ import main, measured
from vllm_targetrows.study.bootstrap import Prompts, estimate
from vllm_targetrows.study.estimates import quintiles, study, task_of
from vllm_targetrows.study.quantities import CUTS, FRONTIERS, REPORTED, STOPPING
from vllm_targetrows.study.report import sections
from vllm_targetrows.study.reranking import halves
from vllm_targetrows.study.rounds import groups
from vllm_targetrows.trees import Pool

NAN = float("nan")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other cost more than these small operations; the command does the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def synthetic_round(
    rng, request="task/0", position=0, *, width=3, levels=3, vocabulary=8, temperature=1.0, coarse=False, budget=8
):
    """A round whose drafter is the target with noise, grown as EAGLE-3 grows: the best nodes of a level get children.

    ``coarse`` rounds log q, so that ties are common.  The engine verified ``draft``'s tree of ``budget`` nodes.
    """
    width = min(width, vocabulary)
    tokens, parents, log_q, p, match, score = [], [], [], [], [], []
    root_row = np.zeros(0)
    grown, base = [-1], 0
    for _ in range(levels):
        for parent in grown:
            logits = rng.normal(size=vocabulary) * 2
            noisy = np.log(softmax(logits + rng.normal(size=vocabulary)))
            row = softmax(logits / temperature) if temperature else np.eye(vocabulary)[logits.argmax()]
            if parent < 0:
                root_row = row
            for token in np.argsort(-noisy)[:width].tolist():
                tokens.append(token)
                parents.append(parent)
                log_q.append(float(np.float32(min(round(noisy[token]), 0) if coarse else noisy[token])))
                p.append(float(np.float32(row[token])))
                match.append(
                    NAN if rng.random() < 0.2 else float(softmax(logits + rng.normal(size=vocabulary) / 4)[token])
                )
                score.append((score[parent] if parent >= 0 else 0.0) + log_q[-1])
        level = sorted(range(base, len(tokens)), key=lambda node: -score[node])
        grown, base = sorted(level[:width]), len(tokens)
    tree = sorted(sorted(range(len(tokens)), key=lambda node: (-score[node], node))[:budget])
    here, accepted, emitted = -1, 0, []
    while True:
        children = [node for node in tree if parents[node] == here]
        mass = np.array([p[node] for node in children])
        drawn = rng.random()
        at = int(np.searchsorted(mass.cumsum(), drawn))
        if at == len(children):
            break
        here = children[at]
        accepted += 1
        emitted.append(tokens[here])
    top = np.argsort(-root_row)
    return RecordedRound(
        request=request,
        position=position,
        temperature=temperature,
        pool_token=tokens,
        pool_parent=parents,
        pool_log_q=log_q,
        pool_p=p,
        token_match_p=match,
        ancestor_p=[NAN if rng.random() < 0.5 else float(rng.random()) for _ in tokens],
        root_entropy=float(-(root_row[root_row > 0] * np.log(root_row[root_row > 0])).sum()) + rng.random() * 1e-3,
        root_top_token=top[:4].tolist(),
        root_top_p=root_row[top[:4]].tolist(),
        drawn=-1,
        tree=tree,
        accepted=accepted,
        emitted=[*emitted, 0],
        address_variation=NAN if rng.random() < 0.6 else abs(rng.normal()) * 0.004,
        token_variation=NAN if rng.random() < 0.3 else rng.beta(3, 2),
    )


def write(path, rounds, **settings):
    recorder = Recorder(path, settings)
    for each in rounds:
        recorder.add(each)
    recorder.close()
    return path


def pool_and_rows(recorded):
    """The round as ``selection``'s pool of one request, with float64 scores and ``log p [1, N]``."""
    parents = recorded.pool_parent
    depth, branch, score, reach = [], [], [], []
    for node, parent in enumerate(parents):
        depth.append(1 + (depth[parent] if parent >= 0 else 0))
        branch.append(branch[parent] if parent >= 0 else node)
        score.append((score[parent] if parent >= 0 else 0.0) + recorded.pool_log_q[node])
        reach.append((reach[parent] if parent >= 0 else 1.0) * recorded.pool_p[node])
    pool = Pool(
        tokens=torch.tensor([recorded.pool_token]),
        parents=torch.tensor([parents]),
        depth=torch.tensor([depth]),
        score=torch.tensor([score], dtype=torch.float64),
        branch=torch.tensor([branch]),
        width=sum(parent < 0 for parent in parents),
    )
    return pool, torch.tensor([recorded.pool_p], dtype=torch.float64).log(), reach


def prefixes(recorded):
    """Each pool node's prefix."""
    named = []
    for token, parent in zip(recorded.pool_token, recorded.pool_parent, strict=True):
        named.append((*(named[parent] if parent >= 0 else ()), token))
    return named


def value_of(tree, recorded, reach, below=()):
    """Sum of P(v) over a tree, whose root is the node ``below``."""
    by_prefix = dict(zip(prefixes(recorded), reach, strict=True))
    return math.fsum(by_prefix[(*below, *prefix)] for prefix in tree_prefixes(tree))


def draft_tree(recorded, budget):
    pool, _, _ = pool_and_rows(recorded)
    return set(tree_prefixes(select(pool, budget, "draft")))


def target_rows(recorded, vocabulary):
    """The target that the pool knows; what it does not know of a row is spread over a token that no pool has."""
    known = {prefix: p for prefix, p in zip(prefixes(recorded), recorded.pool_p, strict=True)}

    def rows(prefix):
        row = torch.zeros(vocabulary + 1, dtype=torch.float64)
        for token in range(vocabulary):
            row[token] = known.get((*prefix, token), 0.0)
        row[vocabulary] = max(1 - float(row.sum()), 0.0)
        return row

    return rows


def measure(tmp_path, rounds):
    """``quantities`` of rounds, by way of a file."""
    (group,) = groups([read(write(tmp_path / "rounds.parquet", rounds))])
    return measured(group)[1]


SHAPES = st.fixed_dictionaries(
    {
        "width": st.integers(1, 4),
        "levels": st.integers(1, 3),
        "coarse": st.booleans(),
        "temperature": st.sampled_from([0.0, 1.0]),
    }
)
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(seed=st.integers(0, 2**32 - 1), shape=SHAPES)
def test_expected_accepted_tokens_are_those_of_the_selected_trees(tmp_path, seed, shape):
    rng = np.random.default_rng(seed)
    rounds = [synthetic_round(rng, f"a/{i}", **(shape | {"levels": shape["levels"] if i else 1})) for i in range(2)]
    numbers = measure(tmp_path, rounds)
    for i, recorded in enumerate(rounds):
        pool, log_p, reach = pool_and_rows(recorded)
        root_log_p = log_p[:, : pool.width]
        for budget in (1, 2, 3, 5, 8, 40, 64):
            at = budget - 1
            draft = value_of(select(pool, budget, "draft"), recorded, reach)
            assert numbers["accepted/draft"][i, at] == pytest.approx(draft)
            root = value_of(select(pool, budget, "root", root_log_p), recorded, reach)
            assert numbers["accepted/root"][i, at] == pytest.approx(root)
            assert numbers["accepted/oracle"][i, at] == pytest.approx(
                value_of(oracle(pool, log_p, budget), recorded, reach)
            )
            # The drawing rules, one drawn token after the other.
            accepted, nodes = {"root_draw": 0.0, "pearl": 0.0}, {"root_draw": 0.0, "pearl": 0.0}
            for first in range(pool.width):
                token = recorded.pool_token[first]
                for rule in accepted:
                    tree = select(pool, budget, rule, drawn=torch.tensor([token]))
                    kept = rule == "root_draw" or (token,) in draft_tree(recorded, budget)
                    below = value_of(tree, recorded, reach, (token,))
                    accepted[rule] += (reach[first] if kept else 0.0) + below
                    nodes[rule] += recorded.pool_p[first] * (kept + int(tree.size))
                    if first == 0 and rule == "root_draw":
                        assert numbers["accepted/top_first"][i, at] == pytest.approx(reach[0] + below)
            assert numbers["accepted/root_draw"][i, at] == pytest.approx(accepted["root_draw"])
            assert numbers["nodes/root_draw"][i, at] == pytest.approx(nodes["root_draw"])
            assert accepted["pearl"] == pytest.approx(draft)
            assert numbers["nodes/pearl"][i, at] == pytest.approx(nodes["pearl"])
        # Rows through some depth: the target's edges above, the drafter's below.
        for rows in (1, 2):
            log_q = torch.tensor([recorded.pool_log_q], dtype=torch.float64)
            mixed = torch.where(pool.depth <= rows + 1, log_p, log_q)
            tree = oracle(pool, mixed, 8)
            assert numbers[f"accepted/rows_to_{rows}"][i, 7] == pytest.approx(value_of(tree, recorded, reach))


@QUICK
@given(seed=st.integers(0, 2**32 - 1), shape=SHAPES)
def test_truncated_pools(tmp_path, seed, shape):
    recorded = synthetic_round(np.random.default_rng(seed), **shape)
    numbers = measure(tmp_path, [recorded])
    pool, log_p, reach = pool_and_rows(recorded)
    ranked = sorted(range(len(reach)), key=lambda node: (-pool.score[0, node].item(), node))
    for cut in CUTS:
        kept = torch.zeros_like(pool.score, dtype=torch.bool)
        kept[0, ranked[:cut]] = True
        smaller = replace(pool, score=pool.score.masked_fill(~kept, float("-inf")))
        for at, budget in enumerate(REPORTED):
            draft = value_of(select(smaller, budget, "draft"), recorded, reach)
            root = value_of(select(smaller, budget, "root", log_p[:, : pool.width]), recorded, reach)
            assert numbers[f"cut/{cut}/draft"][0, at] == pytest.approx(draft)
            assert numbers[f"cut/{cut}/root"][0, at] == pytest.approx(root)


@QUICK
@given(seed=st.integers(0, 2**32 - 1), shape=SHAPES)
def test_coverage_is_that_of_the_enumerated_exits(tmp_path, seed, shape):
    vocabulary = 5
    recorded = synthetic_round(np.random.default_rng(seed), vocabulary=vocabulary, **shape)
    numbers = measure(tmp_path, [recorded])
    rows, every = target_rows(recorded, vocabulary), prefixes(recorded)
    pool, _, _ = pool_and_rows(recorded)
    ranked = sorted(range(len(every)), key=lambda node: (-pool.score[0, node].item(), node))
    for budget in REPORTED:
        tree = {every[node] for node in ranked[:budget]}
        outside = frontier(tree, every)
        best = [every[node] for node in ranked if every[node] in outside]
        law = exit_prefix_law(rows, tree)
        assert sum(law.values()) == pytest.approx(1, abs=1e-6)
        sets = {"tree": tree, "candidates": {every[node] for node in ranked[:59]}, "frontier": tree | outside}
        sets |= {"pool": set(every)} | {f"best {count}": tree | set(best[:count]) for count in FRONTIERS}
        for name, scored in sets.items():
            assert numbers[f"covered/{budget}/{name}"][0] == pytest.approx(coverage(law, scored), abs=1e-9), name
            assert numbers[f"scored/{budget}/{name}"][0] == len(scored), name
        for rule in STOPPING:
            law = exit_prefix_law(rows, tree, rule)
            assert numbers[f"covered/{budget}/{rule}"][0] == pytest.approx(coverage(law, tree), abs=1e-9), rule
            # abs: a row of float32 probabilities may sum to a little more than one.
            assert numbers[f"stopped/{budget}/{rule}"][0] == pytest.approx(expected_accepted(law), abs=1e-6), rule


def test_root_quantities(tmp_path):
    rng = np.random.default_rng(0)
    rounds = [synthetic_round(rng, width=2) for _ in range(30)]
    numbers = measure(tmp_path, rounds)
    for i, recorded in enumerate(rounds):
        first = [p for p, parent in zip(recorded.pool_p, recorded.pool_parent, strict=True) if parent < 0]
        assert numbers["absent"][i] == pytest.approx(1 - sum(first))
        assert numbers["agree"][i] == (recorded.pool_token[0] == recorded.root_top_token[0])
        assert numbers["entropy"][i] == pytest.approx(recorded.root_entropy)
        for match in ("address", "token"):
            expected = getattr(recorded, f"{match}_variation")
            assert numbers[f"{match}_variation"][i] == pytest.approx(expected, nan_ok=True)
    assert 0 < numbers["agree"].mean() < 1


def test_the_engine_check_conditions_on_the_drawn_token(tmp_path):
    rng = np.random.default_rng(0)
    plain, drawn, empty, absent = (synthetic_round(rng) for _ in range(4))
    reach = pool_and_rows(drawn)[2]
    below = [node for node, prefix in enumerate(prefixes(drawn)) if prefix[0] == drawn.pool_token[1] and node != 1]
    drawn = replace(drawn, drawn=drawn.pool_token[1], tree=below)
    numbers = measure(tmp_path, [plain, drawn, replace(empty, tree=[]), replace(absent, drawn=99)])
    expected = numbers["engine/expected"]
    assert expected[0] == pytest.approx(sum(pool_and_rows(plain)[2][node] for node in plain.tree))
    assert expected[1] == pytest.approx(sum(reach[node] for node in below) / reach[1])
    assert np.isnan(expected[2:]).all()
    assert numbers["engine/accepted"][:2].tolist() == [plain.accepted, drawn.accepted]
    assert np.isnan(numbers["engine/accepted"][2:]).all()


def test_means_are_over_prompts_and_intervals_over_resampled_prompts():
    requests, values = ["a", "a", "b", "c"], np.array([1.0, 3.0, 5.0, NAN])
    prompts = Prompts(requests, 4000, 0)
    sample = prompts.sample(values)
    assert sample[0] == pytest.approx((2 + 5) / 2)  # c has no value
    # A resample without a and b has none either; all others are 2, 5 or between.
    assert np.nanmin(sample) == 2
    assert np.nanmax(sample) == 5
    assert np.isnan(sample[1:]).mean() == pytest.approx(1 / 27, abs=0.01)
    found = estimate(sample)
    assert (found.low, found.value, found.high) == (2, 3.5, 5)
    only = prompts.sample(np.stack([values, values * 2], axis=1), np.array([True, False, True, True]))
    assert only[0].tolist() == [3, 6]
    assert estimate(prompts.sample(np.full(4, NAN))).text() == "-"
    one = estimate(Prompts(["a", "a"], 10, 0).sample(np.array([1.0, 2.0])))
    assert (one.low, one.value, one.high) == (1.5, 1.5, 1.5)


def test_the_interval_is_as_wide_as_the_mean_varies():
    rng = np.random.default_rng(0)
    values = rng.normal(size=400)
    found = estimate(Prompts([str(i) for i in range(400)], 2000, 0).sample(values))
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


def recording_of(tmp_path, prompts=6, rounds=4, temperatures=(1.0,), name="rounds", **options):
    rng = np.random.default_rng(3)
    tasks = ("math", "code")
    recorded = [
        synthetic_round(rng, f"{tasks[prompt % 2]}/{prompt}", i, temperature=temperature, **options)
        for temperature in temperatures
        for prompt in range(prompts)
        for i in range(rounds)
    ]
    return write(tmp_path / f"{name}.parquet", recorded, model="target", drafter="drafter"), recorded


def test_the_study_of_a_recording(tmp_path):
    path, rounds = recording_of(tmp_path, prompts=8, rounds=6, width=4, vocabulary=10)
    (group,) = groups([read(path)])
    requests, numbers = measured(group)
    found = study(requests, numbers, 200, 0)

    def prompt_mean(values, where=None):
        of = {}
        for request, value, counts in zip(
            requests, values, where if where is not None else [True] * len(values), strict=True
        ):
            if counts:
                of.setdefault(request, []).append(value)
        return np.mean([np.mean(each) for each in of.values()])

    rules = ("draft", "root", "root_draw", "oracle")
    mean = {rule: [prompt_mean(numbers[f"accepted/{rule}"][:, at]) for at in range(64)] for rule in rules}
    for rule, curve in mean.items():
        assert [each.value for each in found["accepted"][rule]] == pytest.approx(curve)
        assert all(each.low <= each.value <= each.high for each in found["accepted"][rule])
    assert found["ratio"]["root/draft"][7].value == pytest.approx(mean["root"][7] / mean["draft"][7])
    assert found["ratio"]["root_draw/pearl"] == found["ratio"]["root_draw/draft"]
    needed = 1 + next(at for at in range(64) if mean["draft"][at] >= mean["root"][7])
    assert found["matching"]["8"]["draft_for_root"].value == needed
    needed = 1 + next(at for at in range(64) if mean["root"][at] >= mean["draft"][7])
    assert found["matching"]["8"]["root_for_draft"].value == needed

    equal = found["equal_nodes"]["8"]
    sizes = [prompt_mean(numbers["nodes/root_draw"][:, at]) for at in range(64)]
    size = prompt_mean(numbers["nodes/pearl"][:, 7])
    above = next(at for at in range(64) if sizes[at] >= size)
    part = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    accepted = mean["root_draw"][above - 1] * (1 - part) + mean["root_draw"][above] * part
    assert equal["equal_nodes"].value == pytest.approx(accepted / mean["draft"][7])
    assert equal["emitted_equal_cap"].value == pytest.approx((1 + mean["root_draw"][7]) / (1 + mean["draft"][7]))
    assert 1 <= equal["equal_nodes"].value <= equal["equal_cap"].value

    recovered = (mean["root"][7] - mean["draft"][7]) / (mean["oracle"][7] - mean["draft"][7])
    assert found["recovered"]["8"]["root"].value == pytest.approx(recovered)
    agree = numbers["agree"] > 0
    ratio = prompt_mean(numbers["accepted/root"][:, 7], agree) / prompt_mean(numbers["accepted/draft"][:, 7], agree)
    assert found["first_token"]["agree"]["8"]["root/draft"].value == pytest.approx(ratio)
    assert sum(each["rounds"] for each in found["entropy"]["quintiles"]) == len(rounds)
    assert [each["entropy"] for each in found["entropy"]["quintiles"]] == sorted(
        each["entropy"] for each in found["entropy"]["quintiles"]
    )
    code = np.array([request.startswith("code/") for request in requests])
    ratio = prompt_mean(numbers["accepted/root"][:, 58], code) / prompt_mean(numbers["accepted/draft"][:, 58], code)
    assert found["tasks"]["code"]["59"]["root/draft"].value == pytest.approx(ratio)
    assert found["tasks"]["code"]["prompts"] == 4
    known = [each.token_variation for each in rounds if not math.isnan(each.token_variation)]
    assert (
        sum(found["variation"]["token"]["histogram"]["rounds"]) == len(known) == found["variation"]["token"]["rounds"]
    )
    assert found["coverage"]["8"]["sets"]["tree"]["coverage"].value == 0


@pytest.mark.parametrize("off", [0, 1])
def test_the_engine_check_tells_a_wrong_recording(tmp_path, off):
    path, rounds = recording_of(tmp_path, prompts=30, rounds=6)
    write(path, [replace(each, accepted=each.accepted + off) for each in rounds])
    requests, numbers = measured(groups([read(path)])[0])
    assert study(requests, numbers, 300, 0)["engine"]["agrees"] == (not off)
    notes = sections({"name": "x", **study(requests, numbers, 50, 0)})[0].notes
    assert ("does not hold 0" in notes[0]) == bool(off)


def test_entropy_fifths_and_tasks():
    assert quintiles(np.arange(10.0)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert set(quintiles(np.zeros(7)).tolist()) == {0}
    assert [task_of(request) for request in ("math/3/1", "x", "")] == ["math", "-", "-"]


# ------------------------------------------------------------------ reranker


def test_features_hold_missing_and_impossible_values():
    p = torch.tensor([[NAN, 0.0, 1.0]])
    x = features(torch.full((1, 3), float("-inf")), torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.int64), p, p)
    assert x.shape == (1, 3, len(FEATURES))
    assert x.dtype == torch.float32
    assert x.isfinite().all()
    named = dict(zip(FEATURES, x[0].T.tolist(), strict=True))
    assert named["has_match"] == [0, 1, 1]
    assert named["log_ancestor"] == pytest.approx([0, math.log(1e-6), 0])


def test_reranker_round_trip_and_refusals(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(50, len(FEATURES)) * 3 + 1
    for inputs in (len(FEATURES), 3):
        reranker = Reranker(inputs, hidden=8)
        reranker.normalise_by(x)
        reranker.save(tmp_path / "new" / "r.safetensors")
        read_back = load(tmp_path / "new" / "r.safetensors")
        assert (read_back.log_p(x) <= 0).all()
        assert torch.equal(read_back.log_p(x), reranker.log_p(x))
        assert read_back.log_p(x.view(5, 10, -1)).shape == (5, 10)
        assert not read_back.log_p(x).requires_grad
    (tmp_path / "other").write_text("other")
    save_file({"x": torch.zeros(1)}, str(tmp_path / "plain"))
    for name, message in (("absent", "no reranker at"), ("other", "is no reranker"), ("plain", "is no reranker")):
        with pytest.raises(ValueError, match=message) as caught:
            load(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_halves_are_disjoint_and_depend_on_the_seed():
    requests = [f"task/{i}" for i in range(21)]
    first, second = halves(requests * 2, 0)
    assert not first & second
    assert first | second == set(requests)
    assert (len(first), len(second)) == (10, 11)
    assert halves(requests, 1) != (first, second)
    assert halves(["one"], 0)[0] == set()


def test_the_reranker_beats_draft_where_the_rows_are_informative(tmp_path, monkeypatch):
    monkeypatch.setattr(reranking, "STEPS", 300)
    path, _ = recording_of(tmp_path, prompts=40, rounds=4, width=4, vocabulary=12)
    (group,) = groups([read(path)])
    requests, _ = measured(group)
    found, reranker = reranking.compare(group, requests, 200, 0)
    assert reranker is not None
    assert found["prompts"] == found["training_prompts"] == 20
    assert found["8"]["with rows/draft"].low > 1
    assert found["8"]["substitution/draft"].value > 1
    assert found["8"]["with rows/without rows"].value > 1


# ------------------------------------------------------------------ files and the command


def test_groups_by_settings_and_temperature(tmp_path):
    first, _ = recording_of(tmp_path, prompts=2, temperatures=(0.0, 0.7), name="first")
    second, rounds = recording_of(tmp_path, prompts=3, temperatures=(0.7,), name="second")
    parts = groups([read(first), read(second)])
    assert [(part.name, part.rounds) for part in parts] == [("temperature 0", 8), ("temperature 0.7", 8 + 12)]
    paths = [write(path, rounds, record=str(path)) for path in (tmp_path / "a", tmp_path / "b")]
    assert [part.rounds for part in groups([read(path) for path in paths])] == [24]  # the path is no setting
    write(second, rounds, model="another")
    assert [part.name for part in groups([read(first), read(second)])] == [
        "first, temperature 0",
        "first, temperature 0.7",
        "second, temperature 0.7",
    ]
    (tmp_path / "more").mkdir()
    third = write(tmp_path / "more" / "first.parquet", rounds, model="another")
    assert [part.name for part in groups([read(first), read(third)])][1:] == [
        f"{first}, temperature 0.7",
        f"{third}, temperature 0.7",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_p": [0.5]}, "pool_p is not as long"),
        ({"pool_parent": [-1, 1, 0]}, "does not come before"),
        ({"pool_parent": [-1, 0, -1]}, "not in order of depth"),
        ({"pool_p": [0.5, NAN, 0.1]}, "no probability"),
        ({"pool_log_q": [0.5, -1, -1]}, "no log probability"),
        ({"tree": [3]}, "not in the pool"),
    ],
)
def test_rounds_that_contradict_the_format_are_refused(tmp_path, change, message):
    fine = replace(
        synthetic_round(np.random.default_rng(0), "task/1", 17, width=1, levels=3, budget=1), pool_parent=[-1, -1, -1]
    )
    path = write(tmp_path / "rounds.parquet", [fine, replace(fine, **change, position=18)])
    with pytest.raises(ValueError, match=message) as caught:
        measured(groups([read(path)])[0])
    assert "rounds.parquet" in str(caught.value)
    assert "'task/1' at position 18" in str(caught.value)


def run(*arguments):
    return main([str(each) for each in arguments])


def test_the_command_writes_everything(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reranking, "STEPS", 20)
    path, _ = recording_of(tmp_path, prompts=5, rounds=3, temperatures=(0.0, 1.0))
    out = tmp_path / "out"
    assert run(path, "--out", out, "--bootstrap", 50, "--save-reranker", tmp_path / "r.safetensors") == 0
    printed = capsys.readouterr().out
    found = json.loads((out / "study.json").read_text())
    assert [group["temperature"] for group in found["groups"]] == [0, 1]
    assert len(found["groups"][0]["accepted"]["draft"]) == 64
    markdown, html = (out / "study.md").read_text(), (out / "study.html").read_text()
    charts = sorted(each.name for each in out.glob("*.png"))
    assert len(charts) == 14
    assert html.count("data:image/png;base64,") == 14
    assert 'src="http' not in html
    assert all(f"]({name})" in markdown for name in charts)
    for part in (printed, markdown, html):
        assert "Coverage of the next root row" in part
        assert "28…35 %" in part
    for temperature in (0, 1):
        assert load(tmp_path / f"r-temperature-{temperature}.safetensors").inputs == len(FEATURES)


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": 1, "rounds": 1, "width": 1, "levels": 1},
        {"prompts": 2, "rounds": 1, "temperatures": (0.0,), "width": 2, "levels": 2},
    ],
    ids=["one node", "greedy"],
)
def test_small_recordings(tmp_path, options, capsys, monkeypatch):
    monkeypatch.setattr(reranking, "STEPS", 20)
    path, _ = recording_of(tmp_path, **options)
    assert run(path, "--out", tmp_path, "--bootstrap", 20) == 0
    assert ": the intervals are too narrow" in capsys.readouterr().out
    assert "NaN" not in (tmp_path / "study.json").read_text()


def test_greedy_root_draw_is_root_and_both_never_lose(tmp_path):
    path, _ = recording_of(tmp_path, temperatures=(0.0,), width=4)
    numbers = measured(groups([read(path)])[0])[1]
    assert (numbers["accepted/root"] >= numbers["accepted/draft"][:, :64]).all()
    assert numbers["accepted/root"] == pytest.approx(numbers["accepted/root_draw"])
    assert set(np.unique(numbers["accepted/oracle"])) <= {0, 1, 2, 3}


def test_foreseeable_failures_are_one_line(tmp_path, capsys):
    empty = write(tmp_path / "empty.parquet", [])
    (tmp_path / "text.parquet").write_text("no recording")
    path, _ = recording_of(tmp_path, prompts=2, rounds=1)
    damaged = bytearray(path.read_bytes())
    damaged[-60:-20] = b"x" * 40
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    cases = {
        "empty.parquet": "holds no rounds",
        "text.parquet": "is no recording",
        "damaged.parquet": "is no recording",
        "absent.parquet": "no recording at",
    }
    assert empty.exists()
    for name, message in cases.items():
        assert run(path, tmp_path / name, "--out", tmp_path / "out") == 1
        printed = capsys.readouterr().err
        assert message in printed
        assert name in printed
        assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()
    for wrong in (["--bootstrap", 0], ["--no-rerank", "--save-reranker", "x"]):
        with pytest.raises(SystemExit):
            run(path, *wrong)


def test_the_study_needs_no_vllm():
    code = "import sys, vllm_targetrows.study.__main__; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
