# SPDX-License-Identifier: Apache-2.0
"""The trace of an engine's steps: what it saw, found and decided, one line of JSON for each."""
