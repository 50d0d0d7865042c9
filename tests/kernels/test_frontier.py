# SPDX-License-Identifier: Apache-2.0
"""frontier: children of draft rows, levels and selection, against torch and against the engine's own selection."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows import selection
from vllm_targetrows.trees import Pool
from vllm_targetrows.triton_kernels import frontier as op

RULES = tuple(op.RULES)
FORMS = ("chain", "star", "binary", "random")
NEVER = float("-inf")
POISON = -7

# numpy, which the interpreter computes with, warns where a GPU gives inf.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


# ---------------------------------------------------------------------- children


def children(
    logits: torch.Tensor, k: int, d2t: torch.Tensor | None, lanes: int, fault: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on poisoned outputs and scratch; ``fault`` doubles one split's part of the normaliser."""
    rows, vocabulary = logits.shape
    plan = op.row_splits(rows, vocabulary, lanes)
    log_q = torch.full((rows, k), float("nan"))
    token = torch.full((rows, k), POISON, dtype=torch.int64)
    keys, sums = op.topk_scratch(rows, k, plan, logits.device)
    keys.fill_(2**62)
    sums.fill_(float("nan"))
    for launch in op.topk_log_softmax_launches(logits, d2t, log_q, token, keys, sums, plan):
        launch.run()
        if fault:
            sums[:, 0, 1] *= 2
    return log_q, token


def check_children(logits: torch.Tensor, k: int, d2t: torch.Tensor | None, lanes: int) -> None:
    log_q, token = children(logits, k, d2t, lanes)
    expected_q, expected = op.topk_log_softmax_reference(logits, k, d2t)
    assert torch.equal(token, expected)
    torch.testing.assert_close(log_q.double(), expected_q, rtol=2e-6, atol=2e-6)


def draft_rows(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows like a drafter's, in a wider tensor whose other columns hold nan; 16-bit rows have many ties."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, vocabulary + 3), float("nan"), dtype=dtype)
    wide[:, :vocabulary] = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)
    return wide[:, :vocabulary]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "lanes"), [(10, 16), (127, 16), (129, 64), (1025, 32), (3000, 2048)])
def test_children(dtype: torch.dtype, vocabulary: int, lanes: int) -> None:
    mapped = torch.randperm(9000)[:vocabulary].to(torch.int32 if vocabulary % 2 else torch.int64)
    check_children(draft_rows(2, vocabulary, dtype, vocabulary), 10, mapped, lanes)


@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.integers(1, 16),
    st.integers(0, 200),
    st.sampled_from([16, 32]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
    st.sampled_from([1, 264]),
)
def test_any_children(rows: int, k: int, more: int, lanes: int, dtype: torch.dtype, seed: int, programs: int) -> None:
    """Also with one program for each row, which looks at the best lanes again."""
    logits = draft_rows(rows, k + more, dtype, seed)
    logits[torch.rand(rows, k + more, generator=torch.Generator().manual_seed(seed)) < 0.2] = NEVER
    logits[:, seed % (k + more)] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "PROGRAMS", programs)
        check_children(logits, k, None, lanes)


def test_children_of_equal_logits_are_the_smallest_ids() -> None:
    logits = torch.full((1, 700), 3.0)
    logits[0, 5] = -0.0
    logits[0, 300] = NEVER
    check_children(logits, 10, None, 32)
    assert children(torch.zeros(1, 40) * -1, 16, None, 16)[1].tolist() == [list(range(16))]


def test_extreme_logits() -> None:
    logits = draft_rows(3, 200, torch.float32, 5)
    logits[0] += 3e4
    logits[1] -= 3e4
    logits[2, 77] = 3e38
    check_children(logits, 10, None, 64)
    assert children(torch.full((1, 100), NEVER), 3, None, 32)[0].tolist() == [[NEVER] * 3]


def test_the_op_allocates_and_checks() -> None:
    logits = draft_rows(2, 50, torch.bfloat16, 1)
    log_q, token = op.topk_log_softmax(logits, 4, token_dtype=torch.int32)
    expected_q, expected = op.topk_log_softmax_reference(logits, 4)
    assert token.dtype == torch.int32 and torch.equal(token.long(), expected)
    torch.testing.assert_close(log_q.double(), expected_q, rtol=2e-6, atol=2e-6)
    with pytest.raises(ValueError, match="k=17"):
        op.topk_log_softmax(logits, 17)
    with pytest.raises(ValueError, match="stride"):
        op.topk_log_softmax(logits.T, 2)


def test_a_wrong_split_is_caught() -> None:
    logits = draft_rows(2, 300, torch.float32, 2)
    expected = op.topk_log_softmax_reference(logits, 10)[0]
    assert (children(logits, 10, None, 32)[0] - expected).abs().max() < 1e-5
    assert (children(logits, 10, None, 32, fault=True)[0] - expected).abs().max() > 1e-3


# ---------------------------------------------------------------------- levels


def level_inputs(requests: int, k: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Coarse scores, so that there are ties; one frontier node does not exist."""
    generator = torch.Generator().manual_seed(seed)
    log_q = -torch.randint(1, 9, (requests, k, k), generator=generator) / 4
    token = torch.randint(1, 999, (requests, k, k), generator=generator)
    score = -torch.randint(1, 9, (requests, k), generator=generator) / 4
    score[0, k - 1] = NEVER
    node = torch.randint(0, 99, (requests, k), generator=generator)
    return log_q, token, score, node, torch.randint(0, k, (requests, k), generator=generator)


@pytest.mark.parametrize("k", [1, 2, 3, 10, 16])
def test_expand(k: int) -> None:
    inputs = level_inputs(3, k, k)
    level, chosen = op.expand(*inputs, 40, 3)
    expected_level, expected = op.expand_reference(*inputs, 40, 3)
    for mine, theirs in zip((*level, *chosen), (*expected_level, *expected), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_expand_writes_into_the_pool() -> None:
    inputs = level_inputs(2, 4, 0)
    whole = [torch.full((2, 40), POISON, dtype=d) for d in (*[torch.int64] * 3, torch.float32, torch.int64)]
    op.expand(*inputs, 20, 2, op.Level(*(tensor[:, 20:36] for tensor in whole)))
    for mine, theirs in zip(whole, op.expand_reference(*inputs, 20, 2)[0], strict=True):
        assert torch.equal(mine[:, 20:36], theirs)
        assert (mine[:, :20] == POISON).all() and (mine[:, 36:] == POISON).all()


# ---------------------------------------------------------------------- selection


def pool_of(form: str, nodes: int, seed: int) -> Pool:
    """One request's pool, in level order, coarse scores that never grow downwards; some nodes do not exist."""
    rng = random.Random(seed)
    if form == "random":
        depth = sorted(rng.choice((1, 2, 2, 3, 4)) for _ in range(nodes))
        for i, d in enumerate(depth):
            depth[i] = min(d, 1 if i == 0 else depth[i - 1] + 1)
        above = [[i for i in range(nodes) if depth[i] == d] for d in range(nodes + 2)]
        parents = [-1 if d == 1 else rng.choice(above[d - 1]) for d in depth]
    else:
        parents = [{"chain": i - 1, "star": -1, "binary": (i + 2) // 2 - 2}[form] for i in range(nodes)]
        depth = []
        for p in parents:
            depth.append(1 if p < 0 else depth[p] + 1)
    score: list[float] = []
    branch: list[int] = []
    tokens: list[int] = []
    for i, p in enumerate(parents):
        above_score = 0.0 if p < 0 else score[p]
        score.append(NEVER if rng.random() < 0.05 else above_score - rng.randrange(4) / 8)
        branch.append(i if p < 0 else branch[p])
        tokens.append(i * 7 % 10007)  # all different
    as_row = [torch.tensor([x]) for x in (tokens, parents, depth)]
    return Pool(*as_row, torch.tensor([score]), torch.tensor([branch]), depth.count(1))


def batch_of(pools: list[Pool]) -> Pool:
    """Pools of one width and size together, and behind them one request without any node."""
    fields = [torch.cat([getattr(p, f) for p in pools]) for f in ("tokens", "parents", "depth", "score", "branch")]
    fields = [torch.cat((t, t[:1])) for t in fields]
    fields[3][-1] = NEVER
    return Pool(*fields, width=pools[0].width)


def run_select(pool: Pool, budget: int, rule: str, **rows: torch.Tensor | None) -> op.Selected:
    """The op on poisoned outputs."""
    requests, nodes = pool.tokens.shape
    shape = (requests, min(budget, nodes))
    out = op.Selected(*(torch.full(shape, POISON) for _ in range(3)), torch.full((requests,), POISON))
    inputs = (pool.tokens, pool.parents, pool.depth, pool.score, pool.branch, pool.width)
    rows = {name: rows.get(name) for name in ("root_log_p", "drawn", "has_row")}
    for launch in op.select_launches(*inputs, budget, rule, *rows.values(), out):
        launch.run()
    return out


def check_select(pool: Pool, budget: int, rule: str, seed: int = 0, by_definition: bool = True) -> op.Selected:
    generator = torch.Generator().manual_seed(seed)
    requests = len(pool.tokens)
    root_log_p = -torch.randint(1, 9, (requests, pool.width), generator=generator) / 8
    root_log_p[0, 0] = NEVER
    drawn = pool.tokens.gather(1, torch.randint(0, pool.width, (requests, 1), generator=generator))[:, 0]
    drawn[torch.rand(requests, generator=generator) < 0.25] = -1
    drawn[torch.rand(requests, generator=generator) < 0.1] = 99999
    has_row = None if seed % 3 == 0 else torch.rand(requests, generator=generator) < 0.7
    rows = {"root_log_p": root_log_p, "drawn": drawn, "has_row": has_row}
    tree = run_select(pool, budget, rule, **rows)
    engine = selection.select(pool, budget, rule, **rows)
    expected = [engine]
    if by_definition:
        inputs = (pool.tokens, pool.parents, pool.depth, pool.score, pool.branch, pool.width)
        expected.append(op.select_reference(*inputs, budget, rule, **rows))
    for theirs in expected:
        for field in op.Selected._fields:
            assert torch.equal(getattr(tree, field), getattr(theirs, field)), (rule, field)
    return tree


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_select_forms(form: str, rule: str) -> None:
    pool = batch_of([pool_of(form, 40, 3)])
    check_select(pool, 17, rule, 1)


@settings(max_examples=20)
@given(st.sampled_from(FORMS), st.integers(1, 50), st.integers(1, 60), st.sampled_from(RULES), st.integers(0, 999))
def test_select_any(form: str, nodes: int, budget: int, rule: str, seed: int) -> None:
    check_select(batch_of([pool_of(form, nodes, seed)]), budget, rule, seed)


def grown_pool(requests: int, k: int, levels: int, seed: int) -> Pool:
    """A pool of the engine's shape, by ``expand``'s reference."""
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        best = torch.randn(*shape, 60, generator=generator).mul(3).log_softmax(-1).topk(k, -1)
        return best.values, best.indices

    score, token = rows(requests)
    node = branch = torch.arange(k).expand(requests, k)
    parts = [op.Level(token, torch.full_like(token, -1), torch.ones_like(token), score, branch)]
    base = k
    for depth in range(2, levels + 1):
        level, chosen = op.expand_reference(*rows(requests, k), score, node, branch, base, depth)
        parts.append(level)
        score, node, branch, base = chosen.score, chosen.node, chosen.branch, base + k * k
    return Pool(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)), width=k)


@pytest.mark.parametrize(("rule", "budget"), [("draft", 8), ("root", 59), ("root_draw", 59), ("pearl", 256)])
def test_select_from_the_engine_s_pool(rule: str, budget: int) -> None:
    pool = grown_pool(2, 10, 8, 1)
    assert pool.tokens.shape[1] == 710
    tree = check_select(pool, budget, rule, 2)
    assert int(tree.size.max()) > 0


@pytest.mark.parametrize("form", ["star", "binary"])
def test_select_a_thousand_nodes(form: str) -> None:
    check_select(batch_of([pool_of(form, 1024, 4)]), 1024, "root", 3, by_definition=False)


def test_nearly_equal_scores_keep_their_order() -> None:
    """Scores that differ in the last bit of float32 stay apart under ``root``, whatever is added to them."""
    pool = grown_pool(2, 4, 3, 2)
    score = pool.score.clone()
    score[:, 4:20] = torch.nextafter(score[:, :4], torch.tensor(-9.0)).repeat_interleave(4, 1)
    pool = Pool(pool.tokens, pool.parents, pool.depth, score, pool.branch, pool.width)
    check_select(pool, 11, "root", 4)


def test_select_checks() -> None:
    pool = pool_of("star", 4, 1)
    inputs = (pool.tokens, pool.parents, pool.depth, pool.score, pool.branch, pool.width)
    assert op.select(*inputs, 3, "draft").tokens.shape == (1, 3)
    for rule, score, message in (
        ("best", pool.score, "draft, root, root_draw, pearl"),
        ("root", pool.score, "root_log_p"),
        ("pearl", pool.score, "drawn"),
        ("draft", pool.score.double(), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            op.select(*inputs[:3], score, *inputs[4:], 3, rule)


def test_one_wrong_parent_or_score_is_caught() -> None:
    pool = grown_pool(1, 4, 3, 7)
    expected = selection.select(pool, 12, "draft")
    right = run_select(pool, 12, "draft")
    assert torch.equal(right.parents, expected.parents)
    last = int((pool.tokens == expected.tokens[:, -1:]).nonzero()[-1, 1])
    score = pool.score.clone()
    score[0, last] = NEVER
    wrong = run_select(Pool(pool.tokens, pool.parents, pool.depth, score, pool.branch, 4), 12, "draft")
    assert not torch.equal(wrong.tokens, expected.tokens)
    parents = pool.parents.clone()
    inner = int(((pool.depth == 2) & (pool.score >= pool.score.sort(descending=True).values[0, 11])).nonzero()[0, 1])
    parents[0, inner] = (parents[0, inner] + 1) % 4
    wrong = run_select(Pool(pool.tokens, parents, pool.depth, pool.score, pool.branch, 4), 12, "draft")
    assert not torch.equal(wrong.parents, expected.parents) or not torch.equal(wrong.tokens, expected.tokens)


# ---------------------------------------------------------------------- ahead of time
