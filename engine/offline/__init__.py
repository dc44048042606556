# SPDX-License-Identifier: Apache-2.0
"""The parts of the Python API (`engine/llm.py`): runs of many prompts, and their answers."""
