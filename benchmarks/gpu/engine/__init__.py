# SPDX-License-Identifier: Apache-2.0
"""The sections for the whole engine on a GPU: decode steps and the time to the first token."""
