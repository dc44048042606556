# SPDX-License-Identifier: Apache-2.0
"""Parses and checks request bodies of OpenAI's API, and makes prompts and sampling parameters."""
