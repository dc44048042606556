# SPDX-License-Identifier: Apache-2.0
"""What a request says about its answer, and what an answer is taken apart into: structured outputs,
tool calls, reasoning."""
