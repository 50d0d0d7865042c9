# SPDX-License-Identifier: Apache-2.0
"""Make ``speculators_head/``: the tiny pair's EAGLE-3 head as the library ``speculators`` (0.9.0) saves one.

Its torchvision and torchaudio do not go beside a CPU torch, so it is no dependency of the tests.  Once, by hand:

    pip install --no-deps --target LIBRARY speculators==0.9.0 hs-connectors loguru typer shellingham click
    pip install --no-deps --target LIBRARY pydantic-settings python-dotenv typing-inspection datasets
    pip install --no-deps --target LIBRARY dill multiprocess xxhash
    PYTHONPATH=LIBRARY python -P tests/engine/make_speculators_checkpoint.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    sys.path.append(str(HERE))
    import tiny
    import torch
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        target, drafter = tiny.make_tiny_pair(Path(folder))
        os.chdir(folder)  # the target's name goes into the checkpoint
        weights = load_file(drafter / "model.safetensors")
        config = AutoConfig.from_pretrained(target.name)
        config.num_hidden_layers = 1
        model = Eagle3DraftModel.from_training_args(
            config,
            t2d=weights.pop("t2d"),
            d2t=weights.pop("d2t"),
            draft_vocab_size=tiny.DRAFT_VOCABULARY,
            norm_before_residual=True,
            ttt_steps=3,
            verifier_name_or_path=target.name,
            num_layers=1,
            draft_attn_impl="eager",
        )
        state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        state["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        left = model.load_state_dict(state, strict=False)
        assert not left.unexpected_keys, left
        model.to(torch.bfloat16).save_pretrained(HERE / "speculators_head")
    for other in (HERE / "speculators_head").iterdir():
        if other.name not in ("config.json", "model.safetensors"):
            other.unlink()


if __name__ == "__main__":
    main()
