# SPDX-License-Identifier: Apache-2.0
"""Parts of the Python API (`engine/llm.py`): running many prompts, and the classes of results."""
