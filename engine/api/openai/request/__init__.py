# SPDX-License-Identifier: Apache-2.0
"""An OpenAI request's body: parsed, checked, turned into prompts and parameters."""
