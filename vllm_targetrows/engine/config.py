# SPDX-License-Identifier: Apache-2.0
"""The options of ``{"method": "targetrows", ...}``, validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

METHOD = "targetrows"
MAX_POOL_SIZE = 4096
MAX_NODES = 255
STOPPING = r"^(exhaustive|sampled_leaf|cap:[1-9][0-9]*)$"

Selection = Literal["draft", "root", "root_draw", "pearl", "rerank"]
DRAWING_RULES = ("root_draw", "pearl")
"""Those that draw the first token from the root row before the tree is chosen."""
ROOT_RULES = ("root", *DRAWING_RULES)
"""Those that need the root row."""

#: Keys of vLLM's own ``SpeculativeConfig`` that mean the same here and are handed on.
STOCK_OPTIONS = (
    "code_revision",
    "disable_eagle_block_drop",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "max_model_len",
    "model",
    "moe_backend",
    "quantization",
    "revision",
)


class TargetRowsConfig(BaseModel):
    """The method's options.  A field's description is what its error message says is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_speculative_tokens: int = Field(ge=1, le=255, description="an integer from 1 to 255")
    """Node budget ``B`` of a tree."""
    selection: Selection = Field(default="draft", description="'draft', 'root', 'root_draw', 'pearl' or 'rerank'")
    """The selection rule."""
    reranker: str | None = Field(default=None, min_length=1, description="the path of a reranker that the study saved")
    """What ``selection: "rerank"`` scores nodes by."""
    tree_topk: int = Field(default=10, ge=1, description="an integer of at least 1")
    """``k``: children of a node and frontier nodes of a level while the pool grows."""
    tree_depth: int = Field(default=8, ge=1, description="an integer of at least 1")
    """Levels of the pool."""
    tree_min_probability: float = Field(default=0.0, ge=0, lt=1, description="a number from 0 to below 1")
    """Nodes whose path is less likely than this by the drafter's rows are neither extended nor verified."""
    tree_grow_probability: float = Field(default=0.0, ge=0, lt=1, description="a number from 0 to below 1")
    """A further level is grown only below paths of which one is at least this likely by the drafter's rows."""
    metrics_row_rate: float = Field(default=0.01, ge=0, le=1, description="a number from 0 to 1")
    """Share of the rounds of which a row is kept and compared with the next root row, for the metrics."""
    record: str | None = Field(default=None, min_length=1, description="the path of a file to write")
    """Parquet file of recorded rounds, for the study."""
    record_rate: float = Field(default=1.0, gt=0, le=1, description="a number above 0, at most 1")
    """Share of the steps whose rounds are recorded."""
    frontier: int = Field(default=0, ge=0, le=254, description="an integer from 0 to 254")
    """``F``: pool nodes outside the tree, but below one of its nodes or its root, that are scored with it."""
    stopping: str = Field(
        default="exhaustive",
        pattern=STOPPING,
        description="'exhaustive', 'sampled_leaf' or 'cap:k' with an integer k of at least 1",
    )
    """Where verification stops: when the drawn token is no child in the tree, before a leaf, or after ``k`` tokens."""
    root_row: Literal["separate", "covered"] = Field(default="separate", description="'separate' or 'covered'")
    """Where the root row comes from: ``separate`` is a target pass of its own over the continuations, ``covered`` the
    verification pass, in rounds whose exit prefix it scored (the others choose their trees by ``draft``)."""

    @property
    def pool_size(self) -> int:
        """Candidates in a pool: ``k + (depth - 1) * k ** 2`` (EAGLE-2 growth, arXiv 2406.16858)."""
        return self.tree_topk + (self.tree_depth - 1) * self.tree_topk**2

    @property
    def scored_nodes(self) -> int:
        """Most nodes whose rows a verification pass computes: the tree's and its frontier's."""
        return self.num_speculative_tokens + self.frontier

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> TargetRowsConfig:
        """The options that travelled with ``vllm_config``.

        Raises:
            ValueError: the engine was not configured with this method.
        """
        additional = vllm_config.additional_config
        if not isinstance(additional, dict) or METHOD not in additional:
            raise ValueError(f"this engine was not configured with speculative_config method {METHOD!r}")
        return _validated(additional[METHOD])

    @model_validator(mode="after")
    def _pool_fits(self) -> TargetRowsConfig:
        if self.pool_size > MAX_POOL_SIZE:
            raise ValueError(
                f"tree_topk={self.tree_topk} with tree_depth={self.tree_depth} grows a pool of {self.pool_size} nodes; "
                f"allowed: tree_topk + (tree_depth - 1) * tree_topk**2 of at most {MAX_POOL_SIZE}"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> TargetRowsConfig:
        if self.scored_nodes > MAX_NODES:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} with frontier={self.frontier} scores "
                f"{self.scored_nodes} nodes; allowed: at most {MAX_NODES} together"
            )
        if self.root_row == "covered" and self.selection in ("draft", "rerank"):
            raise ValueError(
                f"root_row='covered' with selection={self.selection!r} is not allowed; "
                "allowed with it: selection 'root', 'root_draw' or 'pearl'"
            )
        if (self.selection == "rerank") != (self.reranker is not None):
            raise ValueError(
                f"selection={self.selection!r} with reranker={self.reranker!r} is not allowed; "
                "allowed: selection 'rerank' with the path of a reranker, any other without one"
            )
        if self.root_row == "covered" and self.stopping == "exhaustive" and not self.frontier:
            raise ValueError(
                "root_row='covered' with frontier=0 and stopping='exhaustive' never finds a root row; "
                "allowed: a frontier of at least 1, or stopping 'sampled_leaf' or 'cap:k'"
            )
        if self.record is not None and self.stopping != "exhaustive":
            raise ValueError(f"record with stopping={self.stopping!r} is not allowed; allowed with it: 'exhaustive'")
        return self


def split_options(options: Mapping[str, Any]) -> tuple[TargetRowsConfig, dict[str, Any]]:
    """Split the dictionary of ``--speculative-config``.

    Args:
        options: the dictionary, ``method`` included; dashes in keys count as underscores, as in vLLM.

    Returns:
        Our options, and the dictionary of the stock ``eagle3`` configuration that vLLM is given.

    Raises:
        ValueError: one line that names the option, its value and what is allowed.
    """
    options = {key.replace("-", "_"): value for key, value in options.items() if key != "method"}
    ours = {key: value for key, value in options.items() if key not in STOCK_OPTIONS}
    config = _validated(ours)
    if not isinstance(options.get("model"), str) or not options["model"]:
        raise _refusal(f"model={options.get('model')!r} is not allowed; allowed: name or folder of an EAGLE-3 drafter")
    stock = {key: options[key] for key in STOCK_OPTIONS if key in options}
    return config, {**stock, "method": "eagle3", "num_speculative_tokens": config.scored_nodes}


def _validated(options: Mapping[str, Any]) -> TargetRowsConfig:
    try:
        return TargetRowsConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
    if not first["loc"]:  # the model validator's own line
        raise _refusal(str(first["ctx"]["error"]))
    name = str(first["loc"][0])
    fields = TargetRowsConfig.model_fields
    if first["type"] == "missing":
        raise _refusal(f"{name} is missing; allowed: {fields[name].description}")
    if name not in fields:
        raise _refusal(
            f"option {name!r} does not apply to method {METHOD!r}; allowed: "
            + ", ".join(sorted((*fields, *STOCK_OPTIONS, "method")))
        )
    raise _refusal(f"{name}={first['input']!r} is not allowed; allowed: {fields[name].description}")


def _refusal(line: str) -> ValueError:
    return ValueError(f"speculative_config: {line}")
