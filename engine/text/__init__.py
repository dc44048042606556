# SPDX-License-Identifier: Apache-2.0
"""Text and token ids: tokenizing, detokenizing, and the answer made of a request's tokens."""
