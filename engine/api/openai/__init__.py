# SPDX-License-Identifier: Apache-2.0
"""OpenAI's routes: chat and completions, from a request's body to the streamed answer."""
