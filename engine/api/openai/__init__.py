# SPDX-License-Identifier: Apache-2.0
"""OpenAI's routes for chats and completions, from a request's body to the streamed answer."""
