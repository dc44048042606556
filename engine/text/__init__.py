# SPDX-License-Identifier: Apache-2.0
"""Text and token ids: tokenizing, detokenizing, and the text of a request's answer."""
