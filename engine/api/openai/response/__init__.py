# SPDX-License-Identifier: Apache-2.0
"""Answers in OpenAI's forms: choices, streams, tool calls, logprobs."""
