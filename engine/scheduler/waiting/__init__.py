# SPDX-License-Identifier: Apache-2.0
"""The admission of waiting requests into a step."""
