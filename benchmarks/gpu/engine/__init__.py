# SPDX-License-Identifier: Apache-2.0
"""The whole engine on a GPU: decode steps and the time to a first token."""
