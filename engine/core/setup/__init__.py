# SPDX-License-Identifier: Apache-2.0
"""Checks, choices and measurements before an engine's first step."""
