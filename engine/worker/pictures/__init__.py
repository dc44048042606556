# SPDX-License-Identifier: Apache-2.0
"""The pictures of a step."""
