# SPDX-License-Identifier: Apache-2.0
"""One launch of a Triton kernel as a value: run it, or compile it for a GPU that is not there.

Every op builds its launches from tensors and runs them.  Built from *meta* tensors the same launch says what the engine
would compile, so ahead-of-time compilation covers exactly the kernels that run, with the same constants and the same
alignment hints.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TYPE_NAMES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
}


def power_of_two(n: int, least: int) -> int:
    """The smallest power of two that is at least ``n`` and ``least`` (itself one): lanes that hold ``n`` entries."""
    return max(least, 1 << max(n - 1, 0).bit_length())


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments by name (tensors, numbers, constants)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch the kernel; an empty grid launches nothing."""
        if 0 not in self.grid:
            self.kernel[self.grid](
                **self.arguments, num_warps=self.num_warps, num_stages=self.num_stages, **self.options
            )


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes on its chip."""

    registers: int  # per thread
    shared_bytes: int  # per program
    spill_bytes: int  # per thread; of an AMD kernel the number of spilled registers


def compile_for(launch: Launch, target: GPUTarget) -> Resources:
    """Compile a launch for ``target`` without any GPU.

    Args:
        launch: built from meta tensors (or real ones); needs ``TRITON_INTERPRET`` unset when its kernel was imported.
        target: such as ``GPUTarget("cuda", 90, 32)`` or ``GPUTarget("hip", "gfx942", 64)``.

    Raises:
        TypeError: the kernel was imported for the interpreter.
        triton.CompilationError: the kernel does not compile.
    """
    if not isinstance(launch.kernel, triton.runtime.JITFunction):
        raise TypeError("the kernel was imported with TRITON_INTERPRET set: ahead-of-time compilation needs it unset")
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        registers, spill = _ptxas_report(compiled.asm["ptx"], target)
    else:
        listing = compiled.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", listing)[-1])
        spill = int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", listing)[-1])
    return Resources(registers, int(compiled.metadata.shared), spill)


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
    """Types, constants and alignment hints, by the rules of Triton's own launcher."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def _ptxas_report(ptx: str, target: GPUTarget) -> tuple[int, int]:
    """Registers and spilled bytes per thread, by ptxas's own account."""
    program = get_ptxas(target.arch).path
    match = re.search(r"\.target (sm_\w+)", ptx)
    assert match is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [program, "-v", f"--gpu-name={match[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", report)[-1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return registers, spilled
