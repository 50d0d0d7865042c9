# SPDX-License-Identifier: Apache-2.0
"""Drafters from nothing but their target: data, features, training, evaluation; one command a stage.

``vllm-targetrows-drafter STAGE --help`` tells a stage's options.  A stage that was killed goes on where it was when the
same command is given again.
"""
