# SPDX-License-Identifier: Apache-2.0
"""What is behind the Python API (`engine/llm.py`): runs of many prompts, and their answers."""
