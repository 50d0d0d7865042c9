# SPDX-License-Identifier: Apache-2.0
"""The console script ``vllm-targetrows``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_targetrows import __version__
from vllm_targetrows.embedded import EmbeddedModelError, drafter_folder, target_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. A foreseeable failure is one line on stderr and status 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="vllm-targetrows", description="Draft trees for vLLM, verified exactly.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", add_help=False, help="answers of the embedded model, and their speed")
    model = commands.add_parser("model", help="prepare an embedded model and print the path of its folder")
    model.add_argument("which", choices=["target", "drafter"])
    try:
        if arguments[:1] == ["demo"]:
            # The demo reads its own options. It imports vLLM, which the other commands do not need.
            from vllm_targetrows.demo import main as demo_main

            return demo_main(arguments[1:])
        which = parser.parse_args(arguments).which
        print(target_folder() if which == "target" else drafter_folder())
    except EmbeddedModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
